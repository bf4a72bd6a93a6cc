"""One delta sync after the other: write, tell the engines, wait for all of them, promote."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymfast.integrations.delta_stream import DeltaStream, Written
from gymfast.integrations.engine_loads import Address, EngineLoads, LoadSettings
from gymfast.integrations.engines import Calls, Engines
from gymfast.integrations.phases import Phases, longest
from gymfast.integrations.rank_encoder import Walk
from gymfast.integrations.ranks import Ranks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pause:
    """How engines are paused for a load."""

    options: dict[str, Any] = field(default_factory=dict)
    flushes_cache: bool = True


@dataclass(frozen=True)
class Trainer:
    """What a framework brings: its tensors, its engines as they are now, and its hook, if any."""

    walk: Walk
    engines: Callable[[], Engines]
    local_checkpoint: str
    hook: Callable[[str], None] | None = None
    pause: Pause = Pause()
    address: Address | None = None
    loads_base: bool = False  # at the start, so that engines that began without weights have some


class DeltaSync:
    """Brings engines from version to version; all ranks call every method.

    The snapshot follows the engines, not the trainer: it is promoted once every engine answered
    that it has a version. A version that no engine was told of is written again under its number;
    one that only some engines took stays in the directory as it is, and is offered to all of them
    again before the next one is encoded.
    """

    def __init__(self, stream: DeltaStream, ranks: Ranks, trainer: Trainer) -> None:
        self._stream, self._ranks, self._trainer = stream, ranks, trainer
        self._loads = EngineLoads(
            LoadSettings(
                trainer.local_checkpoint,
                str(stream.settings.directory),
                trainer.address,
                trainer.pause.flushes_cache,
            )
        )
        self._phases = Phases()
        self._written = Written(0, 0, 0)
        self.is_started = False

    def start(self) -> None:
        """Has engines make their local checkpoints from their base, and reads the same base."""
        ranks, engines = self._ranks, self._trainer.engines()
        self._stream.wipe()
        with ranks.together("telling the engines to start"):
            calls: Calls = {}
            if ranks.is_first:
                self._run_hook(self._stream.settings.directory)
                calls = engines.start("pull_weights", target_version=0)
        self._stream.seed(self._trainer.walk)
        with ranks.together("making the local checkpoints"):
            engines.finish("pull_weights", calls)
            if ranks.is_first and self._trainer.loads_base:
                engines.call(
                    "update_weights_from_disk",
                    model_path=self._trainer.local_checkpoint,
                    weight_version="0",
                )
        self.is_started = True

    def write(self, number: int) -> None:
        """Writes a version, after the one before has reached all engines."""
        self._phases = Phases()
        if self._stream.open is not None:
            _log.warning("version %d goes to the engines again", self._stream.open.number)
            self._pull(self._stream.open.number)
            self._promote()
        with self._phases("encode"):
            self._written = self._stream.write(number, self._trainer.walk)
        assert self._stream.open is not None
        path = self._stream.open.path
        try:
            with self._phases("hook"), self._ranks.together("the post-write hook"):
                self._run_hook(path)
        except BaseException:
            self._stream.abandon()
            raise

    def deliver(self) -> None:
        """Has every engine pull the version that was written, and load it."""
        assert self._stream.open is not None, "no version is written"
        number = self._stream.open.number
        self._pull(number)
        try:
            with self._ranks.together("loading"):
                if self._ranks.is_first:
                    self._reload(number)
        finally:
            self._promote()

    def metrics(self) -> dict[str, float]:
        """Density, bytes and seconds of the newest version, the same on every rank."""
        rows = self._ranks.gather((self._written, self._phases.seconds))
        total = sum(written.total_bytes for written, _ in rows)
        changed = sum(written.changed_bytes for written, _ in rows)
        seconds = longest([one for _, one in rows])
        return {
            "perf/update_weights_density": changed / max(total, 1),
            "perf/update_weights_wire_bytes": sum(written.file_bytes for written, _ in rows),
            **{f"perf/update_weights_{name}_time": value for name, value in seconds.items()},
        }

    def _pull(self, number: int) -> None:
        with self._phases("pull"), self._ranks.together(f"pulling version {number}"):
            if self._ranks.is_first:
                self._trainer.engines().call("pull_weights", number)

    def _promote(self) -> None:
        with self._phases("promote"):
            self._stream.promote()

    def _reload(self, number: int) -> None:
        """Has the engines load a version; whatever happens, those that may generate do so again."""
        engines = self._trainer.engines()
        with self._phases("plan"):
            plan = self._loads.plan(engines)
        with self._phases("pause"):
            try:
                engines.call("pause_generation", **self._trainer.pause.options)
                if self._trainer.pause.flushes_cache:
                    engines.call("flush_cache")
                with self._phases("reload"):
                    self._loads.load(engines, plan, number)
            finally:
                engines.call("continue_generation", to=self._loads.may_run(engines))

    def _run_hook(self, path: Path) -> None:
        if self._trainer.hook is not None:
            self._trainer.hook(str(path))
