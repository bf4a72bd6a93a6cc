"""Fetches the frames of a plan, checks them, and keeps them until they are installed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from gymfast.delta import FrameInfo, inspect, verify
from gymfast.delta.files import os_errors
from gymfast.errors import BudgetError, FormatError
from gymfast.stores.base import Store
from gymfast.sync.budget import Reading, available_bytes, require_staging
from gymfast.sync.chain import EMPTY_ROOT, Plan, Step
from gymfast.sync.early import MAX_EARLY_BYTES, EarlyReads
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import FoldRecord, FrameRecord, ObjectRef
from gymfast.sync.objects import FrameReads, reading_for
from gymfast.sync.requests import READS_PER_AHEAD, Requests

Advance = Callable[[int, int], None]
MAX_EXPECTED = 4
_MAX_EXPECTED_ON_DISK = 2  # frames are in files so that little is in memory
_MAX_EARLY_ON_DISK_BYTES = 64 << 20


class _Bytes:
    """The bytes of a frame, in memory or in a file of the staging folder that has no name."""

    def __init__(self, data: bytearray | None = None, file: BinaryIO | None = None) -> None:
        self._data = data
        self._file = file

    def read(self) -> bytes | bytearray:
        if self._file is None:
            return self._data or b""
        self._file.seek(0)
        return self._file.read()

    def close(self) -> None:
        self._data = None
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class StagedFrame:
    """A frame that was checked against its record."""

    step: Step
    info: FrameInfo
    held: _Bytes = field(repr=False)

    def read(self) -> bytes | bytearray:
        """The bytes of the frame, not to be changed; those in a file are read anew each time."""
        return self.held.read()

    def close(self) -> None:
        """Gives memory and disk back."""
        self.held.close()


@dataclass
class Staged:
    """All frames of a plan, ready to be installed."""

    plan: Plan
    frames: tuple[StagedFrame, ...]
    fetch_s: float = 0.0
    verify_s: float = 0.0

    @property
    def version(self) -> int:
        """The version that is reached."""
        assert self.plan.end.version is not None
        return self.plan.end.version

    def close(self) -> None:
        """Gives memory and disk back."""
        for frame in self.frames:
            frame.close()

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Stager:
    """Brings frames from a store into memory or, with `folder`, into files that have no name."""

    def __init__(
        self, store: Store, keys: RunKeys, folder: Path | None, max_bytes: int | None
    ) -> None:
        self._store = store
        self._keys = keys
        self._folder = folder
        self._max_bytes = max_bytes
        self._reading = reading_for(store)
        self._requests = Requests(store, per_ahead=READS_PER_AHEAD)
        self._ahead: dict[str, FrameReads] = {}
        self._early = EarlyReads(store, keys, self._requests)
        self._pid = os.getpid()
        self.verify_s = 0.0

    def require_room(self, plan: Plan) -> None:
        """Raises BudgetError with the numbers if the frames of the plan cannot all be staged.

        What is left of a budget of memory says how much is read ahead; what was begun with more is
        forgotten.
        """
        if self._folder is None:
            room = require_staging(plan.num_bytes, self._max_bytes, "memory")
            self._early.keep([key for step in plan.steps for key in self._keys_of(step.record)])
            room = self._room_beside_early(room)
            self._reading = self._reading_in(room, max(2, len(plan.steps)))
            self._drop_greedy()
            return
        if self._max_bytes is not None:
            require_staging(plan.num_bytes, self._max_bytes, str(self._folder))
        free = shutil.disk_usage(self._folder).free
        if free < plan.num_bytes:
            raise BudgetError(
                f"frames of {plan.num_bytes} bytes are to be staged in {self._folder}, which has "
                f"{free} bytes free: make room, or name another staging_dir"
            )

    def begin(self, epoch: int, refs: Iterable[ObjectRef]) -> None:
        """Begins to read objects that the next record may name; from any thread."""
        if self._folder is not None:
            room = _MAX_EARLY_ON_DISK_BYTES
            self._early.begin(epoch, refs, room, self._reading.piece_bytes)
            return
        limit = available_bytes() if self._max_bytes is None else self._max_bytes
        room = MAX_EARLY_BYTES if limit is None else min(MAX_EARLY_BYTES, limit // 4)
        self._early.begin(epoch, refs, room, self._reading.piece_bytes)

    def expect(self, record: FrameRecord, *, is_planned: bool = False) -> None:
        """Begins to read a frame that is likely to be fetched next, where the store is far away.

        Of those that are not fetched yet, four are begun (two, if they go to files); more are not.
        `is_planned`: it is of the plan that `require_room` looked at, and shares what that leaves.
        """
        if not is_planned:
            self._early.keep(self._keys_of(record))
        name = name_of(record)
        most = MAX_EXPECTED if self._folder is None else _MAX_EXPECTED_ON_DISK
        is_new = name not in self._ahead and len(self._ahead) < most
        if self._requests.is_far and is_new:
            reading = self._reading if is_planned else self._reading_before(record)
            self._ahead[name] = reads = self._reads(record, reading)
            reads.start()

    def drop_expected(self, but: Collection[str] = ()) -> None:
        """Forgets what was begun and not fetched; `but` are the names of records that stay."""
        if not but:
            self._early.keep(())
        for name in self._ahead.keys() - set(but):
            self._ahead.pop(name).cancel()

    def close(self) -> None:
        """Gives the threads back."""
        self._early.close()
        self.drop_expected()
        self._requests.close()

    def fetch(self, step: Step, tick: Callable[[int], None], *, is_decoded: bool) -> StagedFrame:
        """One frame, checked against its record; `tick` is told the bytes of each piece.

        `is_decoded` also decodes all that needs no base. Adds to `verify_s`.
        Raises NotFoundError, ChecksumError, FormatError or StoreError; nothing is kept then.
        """
        held = self._read(step.record, tick)
        start_s = time.perf_counter()
        try:
            frame = held.read()
            info = verify(frame) if is_decoded else inspect(frame)
            _check_info(step, info)
        except BaseException:
            held.close()
            raise
        self.verify_s += time.perf_counter() - start_s
        return StagedFrame(step, info, held)

    def _read(self, record: FrameRecord, tick: Callable[[int], None]) -> _Bytes:
        pieces = self._pieces(record, tick)
        if self._folder is None:
            whole, end = bytearray(record.frame.num_bytes), 0
            for piece in pieces:
                whole[end : end + len(piece)] = piece
                end += len(piece)
                del piece  # before the next one comes
            return _Bytes(whole)
        with os_errors("stage a frame in", self._folder), ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=self._folder))
            for piece in pieces:
                file.write(piece)
            file.flush()
            stack.pop_all()
        return _Bytes(file=file)

    def _pieces(self, record: FrameRecord, tick: Callable[[int], None]) -> Iterator[bytes]:
        if self._pid != os.getpid():  # a forked process has nothing under way
            self._ahead.clear()
            self._pid = os.getpid()
        reads = self._ahead.pop(name_of(record), None) or self._reads(record)
        try:
            for piece in reads.pieces():
                tick(len(piece))
                yield piece
                del piece  # before the next one comes
        finally:
            reads.cancel()

    def _reads(self, record: FrameRecord, reading: Reading | None = None) -> FrameReads:
        how = reading or self._reading
        early = self._early.take
        return FrameReads(self._store, self._keys, record, self._requests, how, early)

    def _keys_of(self, record: FrameRecord) -> list[str]:
        keys = self._keys.of(record)
        return [keys.object(record.epoch, ref.digest) for ref in record.frame.objects]

    def _room_beside_early(self, room: int | None) -> int | None:
        """What early reads leave; none of them stay if they leave too little to read on."""
        if room is None:
            return None
        left = room - self._early.num_bytes
        least = MAX_EXPECTED * self._reading.memory_bytes
        if left < min(room, least):
            self._early.keep(())
            return room
        return left

    def _reading_before(self, record: FrameRecord) -> Reading:
        """How to read a frame of no plan yet: beside itself, and what was begun before it."""
        limit = available_bytes() if self._max_bytes is None else self._max_bytes
        if self._folder is not None or limit is None:
            return reading_for(self._store)
        begun = sum(reads.num_bytes for reads in self._ahead.values()) + self._early.num_bytes
        return self._reading_in(max(0, limit - begun - record.frame.num_bytes))

    def _drop_greedy(self) -> None:
        for name, reads in list(self._ahead.items()):
            if reads.reading.memory_bytes > self._reading.memory_bytes:
                self._ahead.pop(name).cancel()

    def _reading_in(self, room: int | None, num_frames: int = MAX_EXPECTED) -> Reading:
        """Where the store is far frames share the room: one that is fetched, others begun."""
        if room is not None and self._requests.is_far:
            room //= min(num_frames, MAX_EXPECTED)
        return reading_for(self._store, room)


def name_of(record: FrameRecord) -> str:
    """What tells a record from all others of the run."""
    if isinstance(record, FoldRecord):
        return f"{record.base_version} {record.version}"
    return record.nonce


def _check_info(step: Step, info: FrameInfo) -> None:
    """Raises FormatError where frame and record disagree."""
    record = step.record
    base_root = EMPTY_ROOT
    if step.kind == "delta":
        base_root = getattr(record, "base_root", EMPTY_ROOT)
    pairs: Sequence[tuple[str, object, object]] = (
        ("base root", info.base_root.hex(), base_root),
        ("root", info.new_root.hex(), record.root),
        ("size", info.frame_bytes, record.frame.num_bytes),
        ("tensors", sum(t.kind != "removed" for t in info.tensors), record.num_tensors),
    )
    for what, found, expected in pairs:
        if found != expected:
            raise FormatError(
                f"record {record.seq}, version {record.version}: the frame has {what} {found}, the "
                f"record says {expected}: this frame belongs to another record"
            )
