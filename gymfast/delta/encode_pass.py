"""One pass over a state and new weights: the sections of a frame, and the way back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from gymfast.delta import memory
from gymfast.delta.authentication import check_key
from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks, require_kinds
from gymfast.delta.encode_plan import Entry
from gymfast.delta.frame import FAST, EndEntry, FrameWriter, Kind, Status, TensorRecord, root_of
from gymfast.delta.memory import Data
from gymfast.delta.records import Digest
from gymfast.delta.state import Slot, State, room_for
from gymfast.delta.tensors import Tensor, as_tensor, zeros
from gymfast.delta.undo import Undo
from gymfast.delta.workers import OrderedWorkers

_NO_BYTES = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class EncodeStats:
    """What one version cost; raw_bytes counts the new state, tied tensors once."""

    raw_bytes: int
    frame_bytes: int
    num_changed: int
    num_units: int
    seconds: float


@dataclass(frozen=True)
class Options:
    """How to encode; profile is the number in HEADER, key (if any) authenticates the frame."""

    backend: Backend
    threads: int
    profile: int
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_key(self.key)


class EncodePass:
    """One pass over all tensors; with `update` the slots of the state become those of new."""

    def __init__(
        self,
        state: State,
        entries: list[Entry],
        options: Options,
        *,
        update: bool,
        undo: Undo | None = None,
    ) -> None:
        """A pass over the entries; undo is needed with update."""
        self._state = state
        self._entries = entries
        self._options = options
        self._update = update
        self._undo = undo
        sections = sum(-(-e.geometry.num_blocks // e.geometry.section_blocks()) for e in entries)
        self._workers: OrderedWorkers[_Place, list[EncodedBlocks]]
        # Kernels go to the current stream of the thread that takes the sections.
        in_place = any(e.place != memory.CPU for e in entries)
        self._workers = OrderedWorkers(options.threads, sections, in_place=in_place)
        for entry in entries:
            require_kinds(options.backend, entry.place, f"new tensor {entry.name!r}")
        self._writer = FrameWriter(options.backend.check64, options.key)
        self._zeros: dict[str, Data] = {}
        self._slots: dict[str, Slot] = {}
        self._digests: dict[str, Digest] = {}
        self._base_digests: dict[str, Digest] = {}
        self._base_root = b""
        self._params: dict[str, BlockParams] = {}
        self._counts = {"raw": 0, "frame": 0, "changed": 0, "units": 0}
        self._start_s = time.perf_counter()
        self._seconds = 0.0
        self.is_complete = False
        self.is_closed = False

    @property
    def stats(self) -> EncodeStats:
        """What it cost so far."""
        c = self._counts
        return EncodeStats(c["raw"], c["frame"], c["changed"], c["units"], self._seconds)

    def close(self) -> None:
        """Ends the pass: no job runs any more and its iterator raises."""
        self._workers.stop()
        self.is_closed = True

    def sections(self) -> Iterator[bytes]:
        """The bytes of the frame, a section at a time."""
        for section in self._sections():
            self._counts["frame"] += len(section)
            self._seconds = time.perf_counter() - self._start_s
            yield section
            if self.is_closed:
                raise ValueError("this version was committed or rolled back: call encode() again")

    def _sections(self) -> Iterator[bytes]:
        self._prepare()
        yield self._writer.header(self._options.profile, len(self._entries))
        ends: list[EndEntry] = []
        num_changed = 0
        for place, encoded in self._workers.run(self._jobs()):
            entry, first, count = place.entry, place.first_block, place.num_blocks
            if encoded is None and not place.is_end:
                num_changed = 0
                yield self._writer.tensor(_record(entry, self._params[entry.name]))
            elif encoded is None:
                ends.append(self._end_of(entry, num_changed))
            else:
                step = entry.geometry.section_blocks()
                for at, section in zip(range(first, first + count, step), encoded, strict=True):
                    num_changed += section.num_changed
                    if section.body:
                        covered = min(step, first + count - at)
                        yield self._writer.blocks(len(ends), at, covered, section.body)
        base_root = self._base_root
        new_root = root_of(self._new_entries())
        if self._update:
            live = (e for e in self._entries if e.kind is not Kind.REMOVED)
            self._state.slots = {e.name: self._slots[e.target or e.name] for e in live}
            self._state.is_consistent = True
        self.is_complete = True
        yield self._writer.end(base_root, new_root, ends)

    def _prepare(self) -> None:
        """What has to be known of the base before the first byte of it changes."""
        slots = self._state.slots
        self._base_digests = {name: slot.digest for name, slot in slots.items()}
        self._base_root = root_of((n, *s.spec, self._base_digests[n]) for n, s in slots.items())
        if self._update:
            self._untie()
        for entry in self._entries:
            if entry.kind in (Kind.ALIAS, Kind.REMOVED):
                self._params[entry.name] = self._block_params(entry)

    def _new_entries(self) -> Iterator[tuple[str, str, tuple[int, ...], Digest]]:
        for e in self._entries:
            if e.kind is not Kind.REMOVED:
                yield e.name, e.dtype, e.shape, self._digests[e.target or e.name]

    def _untie(self) -> None:
        """Own memory for tensors that were tied in the base and are not any more."""
        taken: set[int] = set()
        for entry in self._entries:
            if entry.kind is Kind.DELTA:
                if id(self._state.slots[entry.name]) in taken:
                    self._state.untie(entry.name)
                taken.add(id(self._state.slots[entry.name]))

    def _end_of(self, entry: Entry, num_changed: int) -> EndEntry:
        """What END says of a tensor whose blocks are all done."""
        if entry.kind is Kind.ALIAS:
            return EndEntry(Status.ALIAS)
        base_digest = self._base_digests.get(entry.name)
        if entry.kind is Kind.REMOVED:
            return EndEntry(Status.REMOVED, base_digest)
        digest = self._digests[entry.name] = self._slots[entry.name].digest
        self._counts["raw"] += entry.geometry.num_bytes
        self._counts["units"] += entry.geometry.num_units
        self._counts["changed"] += num_changed
        if entry.kind is Kind.DELTA:
            status = Status.CHANGED if num_changed else Status.UNCHANGED
        else:
            status = Status.ADDED if entry.kind is Kind.ADDED else Status.REPLACED
        return EndEntry(status, base_digest, None if status is Status.UNCHANGED else digest)

    def _block_params(self, entry: Entry) -> BlockParams:
        """The class parameters of a tensor, from its base if it has one of this dtype and shape."""
        slot = self._state.slots.get(entry.name)
        has_base = slot is not None and slot.spec == (entry.dtype, entry.shape)
        shift = base = 0
        needs_classes = self._options.profile != FAST and entry.geometry.num_units != 0
        if slot is not None and has_base and needs_classes:
            unit_bytes = entry.geometry.unit_bytes
            shift, base = self._options.backend.class_params(slot.tensor.data, unit_bytes)
        return BlockParams(self._options.profile, shift, base, has_base)

    def _jobs(self) -> Iterator[tuple[_Place, Callable[[], list[EncodedBlocks]] | None]]:
        """Begin, sections and end of each tensor in order; a job encodes some sections."""
        for entry in self._entries:
            if entry.kind in (Kind.ALIAS, Kind.REMOVED):
                yield _Place(entry), None
                yield _Place(entry, is_end=True), None
                continue
            new = as_tensor(entry.value, entry.name)
            params = self._params[entry.name] = self._block_params(entry)
            slot = self._slots[entry.name] = self._slot(entry)
            yield _Place(entry), None
            per_call = self._options.backend.sections_per_call(new.data, entry.geometry, params)
            step = entry.geometry.section_blocks() * per_call
            for first in range(0, entry.geometry.num_blocks, step):
                count = min(step, entry.geometry.num_blocks - first)
                job = partial(self._blocks, entry, slot, new, params, first, count)
                yield _Place(entry, first, count), job
            yield _Place(entry, is_end=True), None

    def _slot(self, entry: Entry) -> Slot:
        """Where a tensor is encoded against: its base, or zeros that become (with update) new."""
        if entry.kind is Kind.DELTA:
            slot = self._state.slots[entry.name]
            if self._undo is None:
                return Slot(slot.tensor, slot.geometry, slot.rows.copy())
            self._undo.rows.append((slot.rows, slot.rows.copy()))
            return slot
        rows = np.zeros((entry.geometry.num_blocks, 2), np.uint64)
        if self._update:
            place = self._state.place_beside(entry.place)
            with room_for(entry.name, entry.geometry.num_bytes, place):
                tensor = zeros(entry.dtype, entry.shape, place)
            return Slot(tensor, entry.geometry, rows)
        data = self._zeros_for(entry)
        return Slot(Tensor(entry.dtype, entry.shape, data), entry.geometry, rows)

    def _zeros_for(self, entry: Entry) -> Data:
        """Bytes of zero that stand for the base of a tensor that has none; they are not written."""
        num_bytes, place = entry.geometry.num_bytes, entry.place
        if memory.size_of(self._zeros.get(place, _NO_BYTES)) < num_bytes:
            self._zeros.pop(place, None)  # before there are two of them
            with room_for(entry.name, num_bytes, place):
                self._zeros[place] = memory.zeros(num_bytes, place)
        return self._zeros.get(place, _NO_BYTES)[:num_bytes]

    def _blocks(
        self, entry: Entry, slot: Slot, new: Tensor, params: BlockParams, first: int, count: int
    ) -> list[EncodedBlocks]:
        """The sections of some blocks; called on any thread."""
        undo = self._undo if entry.kind is Kind.DELTA else None
        if undo is not None:
            undo.pending[entry.name, first] = slot, count
        encoded = self._options.backend.encode_sections(
            slot.tensor.data,
            new.data,
            slot.geometry,
            params,
            slot.rows,
            first,
            count,
            update=self._update,
            undo=undo is not None,
            threads=self._workers.job_threads,
        )
        if undo is not None:
            for log in (section.undo for section in encoded):
                if log:
                    kept = undo.memory.keep(log)
                    undo.blocks.append((slot.tensor.data, slot.geometry, kept))
            del undo.pending[entry.name, first]
        return encoded


class _Place(NamedTuple):
    """Where in the frame a job belongs: begin or end of a tensor, or blocks of it."""

    entry: Entry
    first_block: int = 0
    num_blocks: int = 0
    is_end: bool = False


def _record(entry: Entry, params: BlockParams) -> TensorRecord:
    return TensorRecord(
        entry.kind,
        entry.name,
        entry.dtype,
        entry.shape,
        entry.geometry,
        params.class_shift,
        params.class_base,
        entry.target,
    )
