"""Turns weights into a frame in the store: a version that is not committed yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gymfast.delta.tensors import Weights
from gymfast.stores.base import put_memory_bytes
from gymfast.sync.budget import MemoryPlan, plan_memory
from gymfast.sync.chain import EMPTY_ROOT, Tip
from gymfast.sync.committer import Place
from gymfast.sync.manifest import FORMAT, AnchorRecord, FrameRef, VersionRecord
from gymfast.sync.objects import FrameWriter
from gymfast.sync.publish_report import Kind, PhaseSeconds, PublishSettings
from gymfast.sync.snapshot import Snapshot, UndoTooLargeError, bytes_of

_log = logging.getLogger(__name__)
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Written:
    """A frame in the store and the state it leads to."""

    kind: Kind
    frame: FrameRef
    root: str
    schema: str
    num_tensors: int
    raw_bytes: int
    num_changed: int
    num_units: int

    def version_record(self, place: Place, version: int) -> VersionRecord:
        """The commit of the frame as `version`."""
        is_delta = self.kind == "delta"
        return VersionRecord(
            format=FORMAT,
            run=place.run,
            seq=place.tip.seq + 1,
            epoch=place.tip.epoch,
            nonce=place.nonce,
            previous=place.tip.record,
            created_us=place.created_us,
            version=version,
            kind=self.kind,
            base_version=version - 1 if is_delta else -1,
            base_root=place.tip.root if is_delta else EMPTY_ROOT,
            root=self.root,
            schema=self.schema,
            num_tensors=self.num_tensors,
            raw_bytes=self.raw_bytes,
            num_changed=self.num_changed,
            frame=self.frame,
        )

    def anchor_record(self, place: Place) -> AnchorRecord:
        """The full frame of the version that was committed last."""
        assert place.tip.version is not None
        return AnchorRecord(
            format=FORMAT,
            run=place.run,
            seq=place.tip.seq + 1,
            epoch=place.tip.epoch,
            nonce=place.nonce,
            previous=place.tip.record,
            created_us=place.created_us,
            version=place.tip.version,
            root=self.root,
            schema=self.schema,
            num_tensors=self.num_tensors,
            raw_bytes=self.raw_bytes,
            frame=self.frame,
        )


class Candidate:
    """Writes frames of one publish; afterwards the snapshot holds the new state, pending."""

    def __init__(
        self, snapshot: Snapshot, settings: PublishSettings, writer: FrameWriter, tip: Tip
    ) -> None:
        """A candidate for the version after `tip`."""
        self._snapshot = snapshot
        self._settings = settings
        self._writer = writer
        self._tip = tip
        self.seconds = PhaseSeconds()

    def write(
        self, weights: Weights, anchor_bytes: int | None, advance: Advance | None = None
    ) -> Written:
        """A delta on the tip; a full frame if there is no base, or `anchor_bytes` is None.

        Also a full frame if the delta would be larger than the agreed part of `anchor_bytes`, the
        size of the newest anchor, or its way back does not fit the budget.
        Raises BudgetError if the snapshot does not fit, what the codec says of the weights, and
        StoreError.
        """
        size_bytes = bytes_of(weights)
        settings, snapshot = self._settings, self._snapshot
        plan = plan_memory(
            snapshot.host_bytes_for(weights),
            settings.object_bytes,
            settings.memory_budget_bytes,
            resident_bytes=snapshot.host_bytes,
            put_bytes=self._put_bytes,
        )
        watch = _watcher(snapshot, size_bytes, advance)
        if snapshot.root is not None:
            try:
                return self._from_snapshot(weights, anchor_bytes, plan, watch)
            except UndoTooLargeError as error:
                _log.warning("an anchor replaces a delta: %s", error)
                self._writer.discard()
                snapshot.rollback()
                snapshot.drop()
        return self._from_copy(weights, anchor_bytes, plan, watch)

    def adopt(self, weights: Weights) -> bool:
        """True if the weights are the state of the tip; they are the committed state then."""
        settings = self._settings
        host_bytes = self._snapshot.host_bytes_for(weights)
        plan_memory(
            host_bytes,
            settings.object_bytes,
            settings.memory_budget_bytes,
            put_bytes=self._put_bytes,
        )
        self._snapshot.copy(weights)
        if self._snapshot.new_root != self._tip.root:
            self._snapshot.drop()
            return False
        self._snapshot.promote()
        return True

    def write_anchor(self) -> Written:
        """The full frame of the committed state."""
        return self._written("anchor", self._snapshot.anchor())

    @property
    def _put_bytes(self) -> int:
        """Bytes that the put of an object takes beside it; a small one is copied once."""
        return min(put_memory_bytes(self._writer.store), self._settings.object_bytes)

    def _from_snapshot(
        self,
        weights: Weights,
        anchor_bytes: int | None,
        plan: MemoryPlan,
        watch: Callable[[Iterable[bytes]], Iterator[bytes]],
    ) -> Written:
        sections = watch(self._snapshot.delta(weights, plan.undo_bytes))
        if anchor_bytes is None or self._snapshot.root != self._tip.root:
            self._encoded(_drained, sections)
            return self._written("anchor", self._snapshot.anchor())
        limit = _Limit(int(anchor_bytes * self._settings.anchor_ratio))
        written = self._written("delta", limit.up_to(sections))
        if not limit.is_exceeded:
            return written
        _log.info("an anchor replaces a delta of over %d bytes", limit.num_bytes)
        self._writer.discard()
        return self._written("anchor", self._snapshot.anchor())

    def _from_copy(
        self,
        weights: Weights,
        anchor_bytes: int | None,
        plan: MemoryPlan,
        watch: Callable[[Iterable[bytes]], Iterator[bytes]],
    ) -> Written:
        start_s = time.perf_counter()
        self._snapshot.copy(weights)
        self.seconds.diff += time.perf_counter() - start_s
        is_known = self._tip.version is not None and self._snapshot.new_root == self._tip.root
        if is_known and anchor_bytes is not None:
            self._snapshot.promote()
            return self._from_snapshot(weights, anchor_bytes, plan, watch)
        return self._written("anchor", watch(self._snapshot.anchor()))

    def _written(self, kind: Kind, sections: Iterable[bytes]) -> Written:
        frame = self._encoded(self._writer.write, sections)
        snapshot = self._snapshot
        stats = snapshot.stats
        return Written(
            kind=kind,
            frame=frame,
            root=snapshot.new_root,
            schema=snapshot.schema,
            num_tensors=snapshot.num_tensors,
            raw_bytes=stats.raw_bytes,
            num_changed=stats.num_changed,
            num_units=stats.num_units,
        )

    def _encoded(
        self, use: Callable[[Iterable[bytes]], FrameRef], sections: Iterable[bytes]
    ) -> FrameRef:
        """What `use` makes of the sections; its time less that of the puts is encoding."""
        start_s, put_before = time.perf_counter(), self._writer.seconds
        frame = use(sections)
        put = self._writer.seconds - put_before
        self.seconds.put += put
        self.seconds.encode += time.perf_counter() - start_s - put
        return frame


class _Limit:
    """Cuts a frame off after so many bytes, but takes all sections."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._passed = 0

    @property
    def is_exceeded(self) -> bool:
        return self._passed > self.num_bytes

    def up_to(self, sections: Iterable[bytes]) -> Iterator[bytes]:
        for section in sections:
            self._passed += len(section)
            if not self.is_exceeded:
                yield section


def _drained(sections: Iterable[bytes]) -> FrameRef:
    for _ in sections:
        pass
    return FrameRef(0, ())


def _watcher(
    snapshot: Snapshot, size_bytes: int, advance: Advance | None
) -> Callable[[Iterable[bytes]], Iterator[bytes]]:
    """Passes sections on and tells `advance` bytes done and to do."""

    def watch(sections: Iterable[bytes]) -> Iterator[bytes]:
        for section in sections:
            if advance is not None:
                advance(min(snapshot.stats.raw_bytes, size_bytes), size_bytes)
            yield section

    return watch
