"""Deltas over the process groups of a trainer, for engines that have our loader.

An engine keeps, in CPU memory, what each chunk of an update brought, as a part. A delta for a part
says what its base has to be; what all parts have to be together is compared before any is loaded.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

from gymfast.integrations.engines import EngineError
from gymfast.integrations.part_engines import PartEngines
from gymfast.integrations.part_packer import PartPacker
from gymfast.integrations.ranks import Ranks
from gymfast.integrations.sglang_messages import Parts, root_of_parts

Kind = Literal["plain", "full", "delta"]
"""Buckets as for any engine; buckets that engines keep as well; what changed."""
_MAX_REFUSED = 2  # deltas in a row
_log = logging.getLogger(__name__)


class PartSync:
    """Which sort of update the next one is, and its agreement with the engines.

    All ranks call every method but `pack` and `close`.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, *, ends_sessions: bool) -> None:
        """`ends_sessions` False: the framework begins and ends sessions of engines by itself."""
        self.kind: Kind = "plain"
        self._ranks, self._timeout_s, self._ends_sessions = ranks, timeout_s, ends_sessions
        self._packer = PartPacker("")
        self._engines: PartEngines | None = None
        self._held: Parts | None = None
        self._num_refused = 0

    @property
    def num_frames(self) -> int:
        """Frames of this rank in the newest pass."""
        return self._packer.num_frames if self.kind == "delta" else 0

    def connect(self, name: str, urls: Callable[[], Sequence[Any]]) -> None:
        """Takes these engines from here on; `name` is that of this rank's group, if it has one."""
        self._packer, self._engines, self._held = PartPacker(name), None, None
        self._num_refused = 0
        with self._ranks.together("asking the engines for their loaders"):
            if self._ranks.is_first:
                self._engines = self._find(urls())

    def begin(self) -> None:
        """Before a pass: what it is going to be. Raises EngineError on all ranks."""
        choice: tuple[Kind, str] = "plain", ""
        with self._ranks.together("preparing the loaders of the engines"):
            if self._engines is not None:
                choice = self._choose(self._engines)
        self._begin(*self._ranks.gather(choice)[0])

    def begin_again(self) -> None:
        """Before a second pass, in which everything is sent."""
        self._begin("full", self._ranks.gather(secrets.token_hex(8))[0])

    def pack(self, chunk: Sequence[tuple[str, Any]]) -> tuple[Sequence[tuple[str, Any]], bool]:
        """What is sent for a chunk, and whether it is more than one tensor."""
        if self.kind == "plain":
            return chunk, len(chunk) > 1
        message, is_frame = self._packer.pack(chunk)
        return message, is_frame or len(chunk) > 1

    def commit(self, version: str) -> str:
        """After a pass: has engines load it; why not, if they go on as before.

        Raises EngineError on all ranks if an engine does not answer.
        """
        if self.kind == "plain":
            return ""
        all_roots = self._ranks.gather(self._packer.roots)
        root = root_of_parts({key: one for roots in all_roots for key, one in roots.items()})
        parts = Parts(version, root, are_loaded=self.kind == "full")
        refused = ""
        with self._ranks.together(f"loading version {version}"):
            if self._engines is not None:
                refused = self._engines.load(parts)
        refused = self._ranks.gather(refused)[0]
        self._held = None if refused else parts
        if self.kind == "delta":
            self._num_refused = self._num_refused + 1 if refused else 0
        return str(refused)

    def forget(self) -> None:
        """After an error: the next update is a full one."""
        self._held = None

    def close(self) -> None:
        """Makes the weights of all engines usable, on the rank that speaks to them."""
        if self._engines is not None:
            self._engines.end()

    def _find(self, urls: Sequence[Any]) -> PartEngines | None:
        try:
            return PartEngines(urls, self._timeout_s, ends_sessions=self._ends_sessions)
        except EngineError as error:
            _log.info("everything is sent at each update: %s", error)
            return None

    def _choose(self, engines: PartEngines) -> tuple[Kind, str]:
        unready = engines.begin()
        if unready:
            _log.warning("full buckets, which no delta can follow: %s", unready)
            return "plain", ""
        if self._num_refused >= _MAX_REFUSED:
            return "plain", ""  # such as models that are packed, and cannot be unpacked
        reason = engines.why_not(self._held)
        if reason:
            _log.info("everything is sent: %s", reason)
        return "full" if reason else "delta", secrets.token_hex(8)

    def _begin(self, kind: Kind, update_id: str) -> None:
        self.kind = kind
        self._packer.begin(update_id, is_delta=kind == "delta")
