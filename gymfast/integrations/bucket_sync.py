"""One full update after the other: pause, send buckets from every pipeline stage, resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gymfast.integrations.bucket_broadcast import BucketBroadcast
from gymfast.integrations.bucket_pipe import BucketPipe, Chunk
from gymfast.integrations.engines import EngineError, Engines
from gymfast.integrations.phases import Phases, longest
from gymfast.integrations.ranks import Ranks
from gymfast.integrations.slime_groups import EngineLink

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    """What a framework brings: chunks of tensors, in which all ranks take part, and settings."""

    passes: Callable[[], Sequence[Iterable[Chunk]]]
    on_chunk: Callable[[Chunk], None]
    is_packed: bool  # engines unpack weights before a load and pack them after it
    timeout_s: float


class BucketSync:
    """Brings engines from version to version; all ranks call every method.

    Engines get the number of a version with the last bucket of all ranks, so that none has it
    before it has all tensors.
    """

    def __init__(self, ranks: Ranks, trainer: Trainer, ray: Any) -> None:
        self._ranks, self._trainer, self._ray = ranks, trainer, ray
        self._handles: Sequence[Any] = ()
        self._link: EngineLink | None = None
        self._seconds: dict[str, float] = {}
        self._counts = 0, 0, 0  # bytes, buckets, broadcasts

    def connect(self, handles: Sequence[Any], link: EngineLink | None) -> None:
        """Takes these engines from here on; `link` is there on ranks that send."""
        self.disconnect()
        self._handles, self._link = handles, link
        self._join()

    def disconnect(self) -> None:
        """Leaves the group of this rank, if it has one."""
        if self._link is not None:
            self._link.leave(self._timeout_s)

    def update(self, version: int) -> None:
        """Sends all weights as this version. Raises GymfastError on all ranks if one fails.

        Engines generate again whatever happens: after an error some have old weights, some new
        ones and some both, under the number of the version before.
        """
        if any(self._ranks.gather(self._link is not None and not self._link.is_joined)):
            _log.warning("a process group of the engines was left after an error: made again")
            self._join()
        phases = Phases()
        broadcast = None
        if self._link is not None:
            broadcast = BucketBroadcast(self._link.group, self._timeout_s)
        pipe = BucketPipe(broadcast.send if broadcast else _refuse, self._pack)
        with phases("pause"), self._paused():
            try:
                self._send(pipe, str(version))
            finally:
                pipe.close()
                if broadcast is not None and broadcast.is_broken:
                    self.disconnect()  # before anything is asked of engines that wait in it
        self._seconds = phases.seconds | pipe.phases.seconds
        self._counts = 0, 0, 0
        if broadcast is not None:
            self._seconds |= broadcast.phases.seconds
            self._counts = broadcast.wire_bytes, broadcast.num_buckets, broadcast.num_broadcasts

    def metrics(self) -> dict[str, float]:
        """Sums over ranks, and seconds of the rank that took longest; the same on every rank."""
        rows = self._ranks.gather((self._seconds, self._counts))
        names = ("wire_bytes", "num_buckets", "num_broadcasts")
        sums = (sum(column) for column in zip(*(counts for _, counts in rows), strict=True))
        seconds = longest([one for one, _ in rows])
        return {
            **{f"perf/update_weights_{n}": value for n, value in zip(names, sums, strict=True)},
            **{f"perf/update_weights_{name}_time": value for name, value in seconds.items()},
        }

    @property
    def _timeout_s(self) -> float:
        return self._trainer.timeout_s

    def _pack(self, chunk: Chunk) -> Any:
        assert self._link is not None, "a rank that does not send has a chunk"
        return self._link.pack(chunk)

    def _join(self) -> None:
        with self._ranks.together("connecting the engines"):
            if self._link is not None and not self._link.is_joined:
                self._link.join(self._timeout_s)

    def _send(self, pipe: BucketPipe, version: str) -> None:
        ranks = self._ranks
        for chunks in self._trainer.passes():
            with ranks.together("sending the weights"):
                for chunk in pipe.watch(chunks):
                    self._trainer.on_chunk(chunk)
                    pipe.put(chunk)
                pipe.settle()  # other stages need the lock before they meet this rank again
        holding = ranks.gather(pipe.is_holding)
        last = max((rank for rank, holds in enumerate(holding) if holds), default=0)
        with ranks.together("sending the last buckets"):
            if ranks.rank != last:
                pipe.send_last(None)
        with ranks.together(f"sending the last bucket of version {version}"):
            if ranks.rank == last:
                pipe.send_last(version)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        try:
            self._on_first("pausing the engines", self._pause)
            yield
            if self._trainer.is_packed:
                self._on_first("packing the new weights", lambda: self._unpack(False))
        except BaseException:
            if self._ranks.is_first:
                try:
                    self._ask("continue_generation")
                except EngineError as error:
                    _log.error("after a failed update: %s", error)
            raise
        self._on_first("resuming the engines", lambda: self._ask("continue_generation"))

    def _pause(self) -> None:
        self._ask("pause_generation")
        self._ask("flush_cache")
        if self._trainer.is_packed:
            self._unpack(True)

    def _unpack(self, is_before: bool) -> None:
        self._ask(
            "post_process_weights",
            restore_weights_before_load=is_before,
            post_process_quantization=not is_before,
        )

    def _on_first(self, what: str, step: Callable[[], None]) -> None:
        with self._ranks.together(what):
            if self._ranks.is_first:
                step()

    def _ask(self, method: str, **options: Any) -> None:
        Engines(self._handles, self._ray.get, self._timeout_s).call(method, **options)


def _refuse(bucket: Any, weight_version: str | None) -> None:  # noqa: ARG001 - the type of send
    raise AssertionError("a rank that does not send has a bucket")
