"""Makes one fold: the frame between two checkpoints, offered if it pays.

Source: docs/sync-protocol.md section 15.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gymfast.delta.checkpoint import encode_checkpoint
from gymfast.delta.encode import Profile
from gymfast.delta.files import os_errors
from gymfast.errors import ChainError, FormatError, NotFoundError, StoreError
from gymfast.sync.chain import (
    EMPTY_ROOT,
    Costs,
    Entry,
    Plan,
    Tip,
    follow,
    is_full,
    plan,
)
from gymfast.sync.clock import Clock, Deadline
from gymfast.sync.epoch import created_us, require_key
from gymfast.sync.folds import create_fold, read_fold, read_useful
from gymfast.sync.keys import FoldKeys, Span, span_of_fold
from gymfast.sync.log import Log
from gymfast.sync.manifest import FORMAT, FoldRecord, FrameRef, StateRecord, sign
from gymfast.sync.objects import DEFAULT_OBJECT_BYTES, FrameWriter, sizes_of

_READ_BYTES = 8 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoldReport:
    """A fold that was offered; `base_version` is -1 for a full state.

    `replaced_bytes` have the `replaced_frames` frames that lead the same way without it; both are
    0 for a full state.
    """

    base_version: int
    version: int
    frame_bytes: int
    num_changed: int
    replaced_bytes: int
    replaced_frames: int
    seconds: float


@dataclass(frozen=True)
class FoldSettings:
    """How frames of folds are made and stored; `timeout_s` bounds the wait for the store."""

    profile: Profile = "auto"
    backend: str = "auto"
    threads: int | None = None
    object_bytes: int = DEFAULT_OBJECT_BYTES
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Held:
    """A checkpoint and the place of the log whose state it is."""

    path: Path
    tip: Tip


class FoldMaker:
    """Makes folds of one run; a frame lies in `folder`, without a name, while it is made."""

    def __init__(self, log: Log, folder: Path, settings: FoldSettings, clock: Clock) -> None:
        self._log = log
        self._folder = folder
        self._settings = settings
        self._clock = clock

    def make(self, base: Held | None, head: Held) -> FoldReport | None:
        """Offers the frame from `base` (None: from nothing) to `head`.

        None if such a fold is there, if it would cost a reader as much as the way without it, or if
        the log has no way, so that retention would delete it at once.
        Raises ConflictError without the key of a signed run, FormatError and ChainError for damage,
        StoreError and DeadlineError.
        """
        start_s = time.perf_counter()
        record, end, has_full = self._state_at(head.tip)
        require_key(self._log, record)
        without = Plan((), end) if base is None else self._way(base.tip, head.tip)
        if without is None or (base is None and has_full):
            return None
        version = -1 if base is None or base.tip.version is None else base.tip.version
        span = Span(version, record.version)
        base_root = EMPTY_ROOT if base is None else base.tip.root
        if self._is_there(span, base_root, end):
            return None
        with (
            os_errors("write a frame in", self._folder),
            tempfile.TemporaryFile(dir=self._folder) as file,
        ):
            num_changed = self._encode(base, head, file)
            frame_bytes = file.tell()
            num_objects = -(-frame_bytes // self._settings.object_bytes)
            cost = frame_bytes + Costs.request_bytes * num_objects
            if base is not None and cost >= without.cost:
                _log.info("a fold %s of %d bytes does not pay", span, frame_bytes)
                return None
            file.seek(0)
            writer, frame = self._put(span, file)
        fold = FoldRecord(
            format=FORMAT,
            run=self._log.keys.run,
            created_us=created_us(self._clock),
            base_version=span.base,
            base_root=base_root,
            seq=end.seq,
            record=end.record,
            epoch=end.epoch,
            version=span.version,
            root=record.root,
            schema=record.schema,
            num_tensors=record.num_tensors,
            raw_bytes=record.raw_bytes,
            num_changed=num_changed,
            frame=frame,
        )
        if not create_fold(self._log, sign(fold, self._log.key)):
            self._yield_to_other(fold, writer)
        return FoldReport(
            base_version=span.base,
            version=span.version,
            frame_bytes=frame_bytes,
            num_changed=num_changed,
            replaced_bytes=without.num_bytes,
            replaced_frames=len(without.steps),
            seconds=time.perf_counter() - start_s,
        )

    def withdraw(self, report: FoldReport) -> None:
        """Takes a fold back that turned out to be wrong; a store that refuses is a warning."""
        span = Span(report.base_version, report.version)
        _log.warning("run '%s': fold %s is taken back", self._log.keys.run, span)
        try:
            self._log.store.delete(self._log.keys.fold(span))
        except StoreError as error:
            _log.warning(
                "run '%s': fold %s stays, and is wrong: %s", *(self._log.keys.run, span, error)
            )

    def _state_at(self, tip: Tip) -> tuple[StateRecord, Tip, bool]:
        """The newest record of the state that holds at a place, and whether one is a full state."""
        newest: tuple[StateRecord, str] | None = None
        has_full = False
        for seq in range(tip.seq, 0, -1):
            try:
                record, digest = self._log.read(seq)
            except (NotFoundError, FormatError):
                break
            if isinstance(record, StateRecord):
                if record.version != tip.version:
                    break
                newest = newest or (record, digest)
                has_full |= is_full(record)
        if newest is None or newest[0].root != tip.root:
            raise ChainError(
                f"run '{self._log.keys.run}': no record of version {tip.version} lies at or before "
                f"place {tip.seq}: the log was replaced or cleaned"
            )
        state, digest = newest
        return state, Tip(state.seq, digest, state.epoch, state.version, state.root), has_full

    def _way(self, base: Tip, end: Tip) -> Plan | None:
        """What a reader at `base` takes to get to `end` now; None if the log has no way."""
        entries: list[Entry] = []
        tip = base
        try:
            for seq in range(base.seq + 1, end.seq + 1):
                record, digest = self._log.read(seq)
                entries.append(follow(tip, record, digest, self._log.keys.run))
                tip = entries[-1].tip
            if base.version is None or end.version is None:
                return None
            folds = read_useful(self._log, base.version, end.version)
            inner = [f for f in folds if (f.base_version, f.version) != (base.version, end.version)]
            return plan(entries, base, end.version, folds=inner)
        except (NotFoundError, ChainError):
            return None

    def _is_there(self, span: Span, base_root: str, end: Tip) -> bool:
        """True if a whole fold of this span is there; one that does not fit the log is deleted."""
        key = self._log.keys.fold(span)
        try:
            fold = read_fold(self._log, span)
        except NotFoundError:
            return False
        except FormatError as error:
            _log.warning("a fold is made anew: %s", error)
            self._log.store.delete(key)
            return False
        if (fold.base_root, fold.version, fold.root) != (base_root, end.version, end.root):
            _log.warning("a fold is made anew: '%s' does not fit the log", key)
            self._log.store.delete(key)
            return False
        if not self._has_objects(fold):
            _log.warning("a fold is made anew: objects of '%s' are missing", key)
            self._log.store.delete(key)
            return False
        return True

    def _has_objects(self, fold: FoldRecord) -> bool:
        keys = self._log.keys.of(fold)
        objects = [keys.object(0, ref.digest) for ref in fold.frame.objects]
        with closing(sizes_of(self._log.store, objects)) as sizes:
            try:
                found = [size.result() for size in sizes]
            except NotFoundError:
                return False
        return found == [ref.num_bytes for ref in fold.frame.objects]

    def _encode(self, base: Held | None, head: Held, file: BinaryIO) -> int:
        """Writes the frame; returns the units that changed."""
        stats = encode_checkpoint(
            *(None if base is None else base.path, head.path, file),
            profile=self._settings.profile,
            backend=self._settings.backend,
            threads=self._settings.threads,
        )
        return stats.num_changed

    def _put(self, span: Span, file: BinaryIO) -> tuple[FrameWriter, FrameRef]:
        """Puts the frame; StoreError or DeadlineError if the store does not show it."""
        keys = FoldKeys(self._log.keys.run, span)
        writer = FrameWriter(self._log.store, keys, 0, self._settings.object_bytes)
        frame = writer.write(_pieces(file))
        deadline = Deadline(self._clock, self._settings.timeout_s)
        for _ in deadline.pauses(0.05, 2.0):
            if writer.is_confirmed():
                return writer, frame
        deadline.require(f"waiting for the objects of fold {span}")
        raise StoreError(f"the objects of fold {span} do not appear in {self._log.store.url}")

    def _yield_to_other(self, fold: FoldRecord, writer: FrameWriter) -> None:
        """Another compactor was faster: what its fold does not name of ours goes."""
        try:
            theirs = read_fold(self._log, span_of_fold(fold))
        except (NotFoundError, FormatError, StoreError) as error:
            _log.warning("the fold of another compactor cannot be read: %s", error)
            return
        named = {ref.digest for ref in theirs.frame.objects}
        keys = self._log.keys.of(fold)
        for ref in writer.refs:
            if ref.digest not in named:
                with suppress(StoreError):
                    self._log.store.delete(keys.object(0, ref.digest))


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_READ_BYTES):
        yield piece
