"""States: named tensors and the partial digests of their blocks, kept by whoever stays resident."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gymfast.delta import memory
from gymfast.delta.backends import Backend, require_kinds, select
from gymfast.delta.geometry import DEFAULT_BLOCK_UNITS, Geometry, plan_geometry
from gymfast.delta.read_back import ReadBack, compare
from gymfast.delta.records import Digest, root_of
from gymfast.delta.tensors import (
    Identity,
    Tensor,
    Weights,
    as_tensor,
    check_name,
    identity,
    overlapping,
    why_not_live,
)
from gymfast.errors import BudgetError, ChainError, ChecksumError

Rows = NDArray[np.uint64]
SnapshotPlace = Literal["beside", "pinned"]


@dataclass(eq=False)
class Slot:
    """One piece of memory of a state; names that are tied share their slot."""

    tensor: Tensor
    geometry: Geometry
    rows: Rows = field(repr=False)

    @property
    def digest(self) -> Digest:
        """H[0] and H[1] of the tensor: the sum of the partial digests of its blocks."""
        return digest_of(self.rows)

    @property
    def spec(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape."""
        return self.tensor.dtype, self.tensor.shape


def digest_of(rows: Rows) -> Digest:
    """The digest of a tensor from the partial digests of its blocks, [num_blocks, 2]."""
    if len(rows) == 1:  # most tensors of a small model: no reduction to set up
        first, second = rows[0].tolist()
    else:
        first, second = np.add.reduce(rows, axis=0).tolist()
    return first, second


@contextmanager
def room_for(name: str, num_bytes: int, place: str) -> Iterator[None]:
    """Makes memory for a tensor that is not there a BudgetError; nothing else may be in the block.

    NumPy says ValueError for what is larger than the address space.
    """
    try:
        yield
    except (MemoryError, ValueError) as error:
        raise BudgetError(
            f"tensor {name!r} needs {num_bytes} bytes of {place} memory, this process gets no such "
            f"memory ({error}): free memory, or choose another place for it (snapshot='pinned' "
            "of a publisher, memory of your own by State.attach, a checkpoint in files)"
        ) from error


def zero_rows(name: str, geometry: Geometry) -> Rows:
    """The partial digests of a tensor of zeros, [num_blocks, 2].

    Raises BudgetError if there is no room for them: a frame may state any number of blocks.
    """
    try:
        return np.zeros((geometry.num_blocks, 2), np.uint64)
    except (MemoryError, ValueError) as error:  # ValueError: larger than the address space
        raise BudgetError(
            f"tensor {name!r}: the digests of {geometry.num_blocks} blocks need "
            f"{16 * geometry.num_blocks} bytes, this process gets no such memory: nothing was "
            "written; if the tensor is meant to be that large, publish it with larger blocks"
        ) from error


def num_threads(threads: int | None) -> int:
    """The number asked for, or that of the cores this process may use.

    Raises ValueError if it is below 1.
    """
    if threads is None:
        has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
        return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if threads < 1:
        raise ValueError(f"threads is {threads}, expected 1 or more")
    return threads


class State:
    """Tensors and the partial digests of their blocks, [num_blocks, 2] per tensor.

    The digests cost 16 bytes per block of 2^19 units. They are those of the bytes when the state
    was made or last changed through gymfast; `verify` reads all bytes again. Not thread-safe.
    `is_consistent` is False while a version is half written, and after a failure in that time.
    """

    def __init__(
        self,
        *,
        block_units: int = DEFAULT_BLOCK_UNITS,
        tiled: bool = False,
        backend: str = "auto",
        threads: int | None = None,
    ) -> None:
        """A state of no tensors, which owns the memory of what is added to it."""
        self.backend: Backend = select(backend)
        self.threads = num_threads(threads)
        self.slots: dict[str, Slot] = {}
        self.mapping: MutableMapping[str, Any] | None = None
        self.owns_memory = True
        self.is_read_only = False
        self.is_consistent = True
        self.snapshot: SnapshotPlace = "beside"
        self._block_units = block_units
        self._tiled = tiled

    @classmethod
    def empty(cls, **options: Any) -> State:
        """A state of no tensors; options are those of State()."""
        return cls(**options)

    @classmethod
    def attach(
        cls,
        weights: Weights,
        *,
        block_units: int = DEFAULT_BLOCK_UNITS,
        tiled: bool = False,
        backend: str = "auto",
        threads: int | None = None,
    ) -> State:
        """A state over live memory, without a copy; one pass computes the digests.

        Names added or removed later change `weights` too, if it is a mutable mapping.
        Raises ValueError if a tensor cannot be written in place or two share part of their memory.
        """
        state = cls(block_units=block_units, tiled=tiled, backend=backend, threads=threads)
        tensors = gather(weights)
        _check_live(tensors)
        state.owns_memory = False
        state.mapping = weights if isinstance(weights, MutableMapping) else None
        state.add_all(tensors)
        return state

    @classmethod
    def copy_of(
        cls,
        weights: Weights,
        *,
        block_units: int = DEFAULT_BLOCK_UNITS,
        tiled: bool = False,
        backend: str = "auto",
        threads: int | None = None,
        snapshot: SnapshotPlace = "beside",
    ) -> State:
        """A state with its own copy of the bytes: the snapshot of a publisher.

        The copy lies "beside" the weights, on the device that each tensor is on, or in "pinned"
        CPU memory, through which an encode streams (tensors in CPU memory stay there);
        `memory_bytes` says what it takes. To use memory of your own, such as a second BF16 copy,
        fill it and `attach` it.
        Raises ValueError for "pinned" with all weights in CPU memory, BudgetError for too little.
        """
        state = cls(block_units=block_units, tiled=tiled, backend=backend, threads=threads)
        state.snapshot = check_snapshot(snapshot)
        copies: dict[int, Tensor] = {}
        tensors = gather(weights)
        _check_pinned(snapshot, tensors)
        for name, tensor in tensors.items():
            if id(tensor) not in copies:
                copies[id(tensor)] = state._copy(name, tensor)
        state.add_all({name: copies[id(tensor)] for name, tensor in tensors.items()})
        return state

    @classmethod
    def reading(cls, weights: Weights, **options: Any) -> State:
        """A state over memory that is only read: strided, read-only and shared memory will do."""
        state = cls(**options)
        state.owns_memory, state.is_read_only = False, True
        state.add_all(gather(weights))
        return state

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name; tied names have the same one."""
        return {name: slot.tensor for name, slot in self.slots.items()}

    @property
    def digests(self) -> dict[str, Rows]:
        """The partial digests by name, [num_blocks, 2] each."""
        return {name: slot.rows for name, slot in self.slots.items()}

    @property
    def aliases(self) -> dict[str, str]:
        """For every name whose memory an earlier name has: that earlier name."""
        first: dict[int, str] = {}
        for name, slot in self.slots.items():
            first.setdefault(id(slot), name)
        return {n: first[id(s)] for n, s in self.slots.items() if first[id(s)] != n}

    @property
    def root(self) -> bytes:
        """The 32 bytes that name this exact state."""
        return root_of((name, *slot.spec, slot.digest) for name, slot in self.slots.items())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, tied ones once."""
        return sum(slot.tensor.num_bytes for slot in self._distinct().values())

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this state allocated, by place: "cpu", "pinned" or a device ("cuda:0").

        Each tensor in pinned memory counts as the power of two to which torch rounds it. Memory
        that was attached or is only read counts nothing. What a GPU needs on top while it encodes
        or applies is bounded: see docs/gpu.md.
        """
        sizes: dict[str, int] = {}
        for slot in self._distinct().values() if self.owns_memory else ():
            place, num_bytes = slot.tensor.place, slot.tensor.num_bytes
            sizes[place] = sizes.get(place, 0) + memory.allocated_bytes(num_bytes, place)
        return sizes

    @property
    def usual_place(self) -> str:
        """Where a tensor goes that a frame brings: to the first one of this state."""
        places = (slot.tensor.place for slot in self.slots.values() if slot.tensor.num_bytes)
        return next(places, self.backend.kinds[0])

    def place_beside(self, place: str) -> str:
        """Where this state keeps a tensor whose new bytes lie at a place."""
        is_device = memory.kind_of(place) == memory.CUDA
        return memory.PINNED if is_device and self.snapshot == "pinned" else place

    def tensor_digest(self, name: str) -> Digest:
        """H[0] and H[1] of one tensor; KeyError if there is none of this name."""
        return self.slots[name].digest

    def plan(self, dtype: str, shape: tuple[int, ...]) -> Geometry:
        """The geometry this state gives to a new tensor."""
        return plan_geometry(dtype, shape, block_units=self._block_units, tiled=self._tiled)

    def slot_of(self, tensor: Tensor, geometry: Geometry | None = None) -> Slot:
        """A slot around a tensor, with digests from one pass over its bytes; not yet in `slots`."""
        require_kinds(self.backend, tensor.place, "a tensor")
        geometry = geometry or self.plan(tensor.dtype, tensor.shape)
        rows = self.backend.digest_blocks(tensor.data, geometry, self.threads)
        return Slot(tensor, geometry, rows)

    def add_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors; names that have the same Tensor object become tied."""
        known = {id(slot.tensor): slot for slot in self.slots.values()}
        for name, tensor in tensors.items():
            slot = known.get(id(tensor))
            self.slots[name] = slot or self.slot_of(tensor)
            known[id(tensor)] = self.slots[name]

    def use_geometry(self, name: str, geometry: Geometry) -> None:
        """Makes the blocks of a tensor those of a frame; reads the tensor again if they differ.

        Raises ChecksumError if its bytes are no longer those that the state knew.
        """
        slot = self.slots[name]
        if slot.geometry == geometry:
            return
        fresh = self.slot_of(slot.tensor, geometry)
        if fresh.digest != slot.digest:
            raise ChecksumError(_changed_behind(name, fresh.digest, slot.digest), 60)
        slot.geometry, slot.rows = fresh.geometry, fresh.rows

    def untie(self, name: str) -> None:
        """Gives a name memory of its own, with the same bytes."""
        slot = self.slots[name]
        with room_for(name, slot.tensor.num_bytes, slot.tensor.place):
            tensor = slot.tensor.copy()
        self.slots[name] = Slot(tensor, slot.geometry, slot.rows.copy())

    def require_consistent(self) -> None:
        """Raises ChainError if a version is half written."""
        if not self.is_consistent:
            raise ChainError(
                "the state is inconsistent: a version was only partly written to it; restore it "
                "from an anchor (gymfast.delta.restore) or make a new one"
            )

    def verify(self, done: ReadBack | None = None) -> None:
        """Reads all bytes, but for what `done` has read, and compares them with the digests kept.

        Raises ChecksumError that names the first tensor and block that differ.
        """
        done = done or ReadBack()
        for name, slot in self._distinct().items():
            data, geometry = slot.tensor.data, slot.geometry
            for first, count in done.rest(slot):
                found = self.backend.digest_blocks(data, geometry, self.threads, first, count)
                try:
                    compare(name, slot, first, found)
                except ChecksumError:
                    self.is_consistent = False
                    raise

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        place = self.place_beside(tensor.place)
        if tensor.is_copy and place == tensor.place:
            return tensor
        require_kinds(self.backend, place, f"the snapshot of tensor {name!r}")
        with room_for(name, tensor.num_bytes, place):
            return tensor.copy(place)

    def _distinct(self) -> dict[str, Slot]:
        """One name, the first, for each slot."""
        by_slot: dict[int, tuple[str, Slot]] = {}
        for name, slot in self.slots.items():
            by_slot.setdefault(id(slot), (name, slot))
        return dict(by_slot.values())


def gather(weights: Weights) -> dict[str, Tensor]:
    """All tensors of a mapping; names of the same memory, dtype and shape get one Tensor object.

    Raises TypeError for a value that is no array and for names that are no strings, ValueError for
    names that a frame cannot carry.
    """
    items = list(weights.items())  # alive together, so that equal addresses mean equal memory
    seen: dict[Identity, Tensor] = {}
    tensors = {}
    for name, value in items:
        key = identity(value)
        tensor = seen.get(key) if key else None
        if tensor is None:
            tensor = as_tensor(value, check_name(name))
        tensors[check_name(name)] = tensor
        if key:
            seen[key] = tensor
    return tensors


def check_snapshot(snapshot: SnapshotPlace) -> SnapshotPlace:
    """The place itself; ValueError if there is none of this name."""
    if snapshot not in get_args(SnapshotPlace):
        raise ValueError(f"snapshot {snapshot!r}, expected one of beside, pinned")
    return snapshot


def _check_pinned(snapshot: SnapshotPlace, tensors: Mapping[str, Tensor]) -> None:
    places = {tensor.place for tensor in tensors.values()}
    if snapshot == "pinned" and places == {memory.CPU}:
        raise ValueError(
            "snapshot='pinned' is for weights in CUDA memory, and all of these are in CPU memory: "
            "leave the option out"
        )


def _check_live(tensors: Mapping[str, Tensor]) -> None:
    problems = [f"{n!r} {why}" for n, t in tensors.items() if (why := why_not_live(t))]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(
            f"cannot be updated in place: {', '.join(problems[:3])}{more}; pass contiguous "
            "writable tensors, or use State.copy_of"
        )
    distinct = {id(tensor): (name, tensor) for name, tensor in tensors.items()}
    if pair := overlapping(distinct.values()):
        raise ValueError(
            f"tensors {pair[0]!r} and {pair[1]!r} share part of their memory, so that an update of "
            "one would change the other: pass only one of them, or use State.copy_of"
        )


def _changed_behind(name: str, found: Digest, expected: Digest) -> str:
    return (
        f"tensor {name!r} has digest {_hex(found)}, this state knew {_hex(expected)}: its memory "
        "was changed from outside; nothing was written; restore the state from an anchor"
    )


def _hex(digest: Any) -> str:
    return f"{int(digest[0]):016x}{int(digest[1]):016x}"
