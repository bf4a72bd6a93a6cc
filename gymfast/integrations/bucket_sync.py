"""One update after the other: pause, send buckets from every pipeline stage, resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gymfast.errors import GymfastError
from gymfast.integrations.bucket_broadcast import BucketBroadcast
from gymfast.integrations.bucket_pipe import BucketPipe, Chunk
from gymfast.integrations.delta_sync import Pause
from gymfast.integrations.engine_link import EngineLink
from gymfast.integrations.engines import EngineError, Engines
from gymfast.integrations.part_sync import PartSync
from gymfast.integrations.phases import Phases, longest
from gymfast.integrations.ranks import Ranks

Walk = Callable[[Callable[[Chunk], None]], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    """What a framework brings: walks over its tensors, in which all ranks take part, and settings.

    `is_packed`: engines unpack weights before a load and pack them after it. With a `selector` the
    framework has engines begin an update of such models, and end it. `urls` has the addresses of
    the servers, for deltas to those that have our loader; None: no deltas.
    """

    walks: Sequence[Walk]
    is_packed: bool
    timeout_s: float
    pause: Pause = field(default_factory=Pause)
    selector: str | None = None
    urls: Callable[[], Sequence[Any]] | None = None


class BucketSync:
    """Brings engines from version to version; all ranks call every method.

    Engines get the number of a version with the last bucket of all ranks, so that none has it
    before it has all tensors.
    """

    def __init__(self, ranks: Ranks, trainer: Trainer, ray: Any) -> None:
        self._ranks, self._trainer, self._ray = ranks, trainer, ray
        ends_sessions = trainer.selector is None
        self._parts = PartSync(ranks, trainer.timeout_s, ends_sessions=ends_sessions)
        self._handles: Sequence[Any] = ()
        self._link: EngineLink | None = None
        self._to_finish: list[Callable[[], None]] = []
        self._seconds: dict[str, float] = {}
        self._counts = 0, 0, 0, 0  # bytes, buckets, broadcasts, frames

    def connect(self, handles: Sequence[Any], link: EngineLink | None) -> None:
        """Takes these engines from here on; `link` is there on ranks that send."""
        self.disconnect()
        self._handles, self._link = handles, link
        self._join()
        if self._trainer.urls is not None:
            self._parts.connect(link.group.name if link is not None else "", self._trainer.urls)

    def disconnect(self) -> None:
        """Leaves the group of this rank, if it has one."""
        if self._link is not None:
            self._link.leave(self._timeout_s)

    def update(self, version: int) -> None:
        """Sends the weights as this version. Raises GymfastError on all ranks if one fails.

        Engines generate again whatever happens: after an error some have old weights, some new
        ones and some both, under the number of the version before. One whose loader failed half
        way refuses to run.
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
                self._send_version(pipe, str(version))
            except BaseException:
                self._parts.forget()
                raise
            finally:
                pipe.close()
                if broadcast is not None and broadcast.is_broken:
                    self.disconnect()  # before anything is asked of engines that wait in it
        self._seconds = phases.seconds | pipe.phases.seconds
        self._counts = 0, 0, 0, 0
        if broadcast is not None:
            self._seconds |= broadcast.phases.seconds
            sent = broadcast.wire_bytes, broadcast.num_buckets, broadcast.num_broadcasts
            self._counts = *sent, self._parts.num_frames

    def metrics(self) -> dict[str, float]:
        """Sums over ranks, and seconds of the rank that took longest; the same on every rank."""
        rows = self._ranks.gather((self._seconds, self._counts))
        names = ("wire_bytes", "num_buckets", "num_broadcasts", "num_frames")
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
        named, is_many = self._parts.pack(chunk)
        return self._link.pack(named, is_many=is_many)

    def _join(self) -> None:
        with self._ranks.together("connecting the engines"):
            if self._link is not None and not self._link.is_joined:
                self._link.join(self._timeout_s)

    def _send_version(self, pipe: BucketPipe, version: str) -> None:
        """Sends what is needed; everything, where an engine does not take what changed."""
        parts = self._parts
        parts.begin()
        self._send(pipe, version)
        refused = parts.commit(version)
        if refused and parts.kind == "delta":
            _log.warning("version %s is sent again, all of it: %s", version, refused)
            parts.begin_again()
            self._send(pipe, version)
            refused = parts.commit(version)
        if refused:
            raise EngineError(f"version {version} was not loaded: {refused}")

    def _send(self, pipe: BucketPipe, version: str) -> None:
        """One pass over all weights. Where engines keep parts, the number comes with the commit."""
        ranks = self._ranks
        pipe.holds_back = self._parts.kind == "plain"
        for walk in self._trainer.walks:
            with ranks.together("sending the weights"):
                pipe.gather(walk)
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
            self._on_first("making the new weights usable", self._finish)
        except BaseException:
            if self._ranks.is_first:
                self._resume_after_error()
            raise
        self._on_first("resuming the engines", lambda: self._ask("continue_generation"))

    def _pause(self) -> None:
        pause = self._trainer.pause
        self._ask("pause_generation", **pause.options)
        if pause.flushes_cache:
            self._ask("flush_cache")
        if self._trainer.is_packed:
            self._unpack(True)
            self._to_finish.append(lambda: self._unpack(False))
        if self._trainer.selector is not None:
            self._ask("begin_weight_update", selector=self._trainer.selector)
            self._to_finish.append(lambda: self._ask("end_weight_update"))

    def _finish(self) -> None:
        """What was begun when the engines were paused is ended."""
        self._parts.close()
        while self._to_finish:
            self._to_finish.pop(0)()

    def _resume_after_error(self) -> None:
        for step in (self._finish, lambda: self._ask("continue_generation")):
            try:
                step()
            except GymfastError as error:
                _log.error("after a failed update: %s", error)

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
