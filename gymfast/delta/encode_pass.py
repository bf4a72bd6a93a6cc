"""One pass over a state and new weights: the sections of a frame, and the way back."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np

from gymfast.delta.authentication import check_key
from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks
from gymfast.delta.encode_plan import Entry
from gymfast.delta.frame import FAST, EndEntry, FrameWriter, Kind, Status, TensorRecord, root_of
from gymfast.delta.geometry import Geometry
from gymfast.delta.records import Digest
from gymfast.delta.state import Rows, Slot, State
from gymfast.delta.tensors import U8, Tensor, as_tensor, zeros
from gymfast.errors import GymfastError


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


@dataclass
class Undo:
    """The way back from a pass: slots as they were, and what to write into changed memory."""

    slots: dict[str, Slot]
    rows: list[tuple[Rows, Rows]] = field(default_factory=list)
    blocks: list[tuple[U8, Geometry, bytes]] = field(default_factory=list)
    pending: tuple[str, Slot, int, int] | None = None

    def run(self, state: State, options: Options) -> None:
        """Puts the state back; safe to repeat after an interruption.

        Raises GymfastError if an interrupt came between an update and the note of it.
        """
        self._check_pending(options)
        for data, geometry, blob in reversed(self.blocks):
            options.backend.rollback_blocks(data, blob, geometry)
        for rows, saved in self.rows:
            rows[:] = saved
        state.slots = dict(self.slots)

    def _check_pending(self, options: Options) -> None:
        """An interrupted section is harmless if its blocks still are what their digests say."""
        if self.pending is None:
            return
        name, slot, first, count = self.pending
        saved = next(saved for rows, saved in self.rows if rows is slot.rows)
        found = options.backend.digest_blocks(
            slot.tensor.data, slot.geometry, options.threads, first, count
        )
        if not np.array_equal(found, saved[first : first + count]):
            raise GymfastError(
                f"tensor {name!r}: an interrupt came between the update of blocks {first} to "
                f"{first + count - 1} and the note of their old values: the state cannot be rolled "
                "back; make a new one and publish an anchor"
            )
        self.pending = None


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
        self._state = state
        self._entries = entries
        self._options = options
        self._update = update
        self._undo = undo or Undo({})
        self._writer = FrameWriter(options.backend.check64, options.key)
        self._zeros = np.zeros(0, np.uint8)
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
        ends = []
        for ordinal, entry in enumerate(self._entries):
            if entry.kind in (Kind.ALIAS, Kind.REMOVED):
                yield self._writer.tensor(_record(entry, self._params[entry.name]))
                ends.append(self._end_of(entry))
            else:
                ends.append((yield from self._tensor(ordinal, entry)))
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

    def _end_of(self, entry: Entry) -> EndEntry:
        if entry.kind is Kind.ALIAS:
            return EndEntry(Status.ALIAS)
        return EndEntry(Status.REMOVED, self._base_digests[entry.name])

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

    def _tensor(self, ordinal: int, entry: Entry) -> Generator[bytes, None, EndEntry]:
        """TENSOR and BLOCKS sections; returns what END says of the tensor."""
        new = as_tensor(entry.value, entry.name)
        params = self._block_params(entry)
        yield self._writer.tensor(_record(entry, params))
        base_digest = self._base_digests.get(entry.name)
        slot = self._slot(entry)
        num_changed = 0
        geometry = entry.geometry
        step = geometry.section_blocks()
        for first in range(0, geometry.num_blocks, step):
            count = min(step, geometry.num_blocks - first)
            encoded = self._blocks(entry, slot, new, params, (first, count))
            num_changed += encoded.num_changed
            if encoded.body:
                yield self._writer.blocks(ordinal, first, count, encoded.body)
        self._slots[entry.name] = slot
        self._digests[entry.name] = slot.digest
        self._counts["raw"] += geometry.num_bytes
        self._counts["units"] += geometry.num_units
        self._counts["changed"] += num_changed
        if entry.kind is Kind.DELTA:
            status = Status.CHANGED if num_changed else Status.UNCHANGED
        else:
            status = Status.ADDED if entry.kind is Kind.ADDED else Status.REPLACED
        return EndEntry(status, base_digest, None if status is Status.UNCHANGED else slot.digest)

    def _slot(self, entry: Entry) -> Slot:
        """Where a tensor is encoded against: its base, or zeros that become (with update) new."""
        if entry.kind is Kind.DELTA:
            slot = self._state.slots[entry.name]
            if not self._update:
                return Slot(slot.tensor, slot.geometry, slot.rows.copy())
            self._undo.rows.append((slot.rows, slot.rows.copy()))
            return slot
        rows = np.zeros((entry.geometry.num_blocks, 2), np.uint64)
        if self._update:
            return Slot(zeros(entry.dtype, entry.shape), entry.geometry, rows)
        num_bytes = entry.geometry.num_bytes
        if self._zeros.size < num_bytes:
            self._zeros = np.zeros(num_bytes, np.uint8)
        tensor = Tensor(entry.dtype, entry.shape, self._zeros[:num_bytes])
        return Slot(tensor, entry.geometry, rows)

    def _blocks(
        self, entry: Entry, slot: Slot, new: Tensor, params: BlockParams, span: tuple[int, int]
    ) -> EncodedBlocks:
        """The blocks of one section; span is first block and number of blocks."""
        data, needs_undo = slot.tensor.data, self._update and entry.kind is Kind.DELTA
        if needs_undo:
            self._undo.pending = (entry.name, slot, *span)
        encoded = self._options.backend.encode_blocks(
            data,
            new.data,
            slot.geometry,
            params,
            slot.rows,
            *span,
            update=self._update,
            undo=needs_undo,
            threads=self._options.threads,
        )
        if needs_undo:
            self._undo.blocks.append((data, slot.geometry, encoded.undo))
            self._undo.pending = None
        return encoded


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
