"""The way back from an encode that was not committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from gymfast.delta.backends import Backend
from gymfast.delta.geometry import Geometry
from gymfast.delta.memory import U8
from gymfast.delta.state import Rows, Slot, State
from gymfast.errors import GymfastError

_CHUNK_BYTES = 8 << 20  # NumPy asks for huge pages from 4 MiB on


class UndoMemory:
    """Memory for the old values of one version at a time, kept for the next version.

    Fresh pages cost more than what is written into them. `max_kept_bytes` bounds what stays
    allocated between versions. Thread-safe.
    """

    def __init__(self, max_kept_bytes: int) -> None:
        self._max_kept_chunks = max_kept_bytes // _CHUNK_BYTES
        self._chunks: list[U8] = []
        self._current = 0
        self._used = 0
        self.num_bytes = 0
        self._lock = Lock()

    def keep(self, blob: bytes) -> memoryview:
        """A copy of the blob, valid until clear()."""
        size = len(blob)
        with self._lock:
            self.num_bytes += size
            if size > _CHUNK_BYTES // 4:  # a chunk never loses more than a quarter of its room
                return memoryview(blob)
            if self._current < len(self._chunks) and self._used + size > _CHUNK_BYTES:
                self._current, self._used = self._current + 1, 0
            if self._current == len(self._chunks):
                self._chunks.append(np.empty(_CHUNK_BYTES, np.uint8))
            place = self._chunks[self._current][self._used : self._used + size]
            self._used += size
        place[:] = np.frombuffer(blob, np.uint8)
        return place.data

    def clear(self) -> None:
        """Everything kept is forgotten; what was returned may be overwritten."""
        with self._lock:
            del self._chunks[self._max_kept_chunks :]
            self._current = self._used = self.num_bytes = 0


@dataclass
class Undo:
    """The way back from a pass: slots as they were, and what to write into changed memory.

    `pending` holds the blocks that are being encoded: name, slot, first block, number of blocks.
    """

    slots: dict[str, Slot]
    memory: UndoMemory
    rows: list[tuple[Rows, Rows]] = field(default_factory=list)
    blocks: list[tuple[U8, Geometry, memoryview]] = field(default_factory=list)
    pending: dict[tuple[str, int], tuple[Slot, int]] = field(default_factory=dict)

    def run(self, state: State, backend: Backend, threads: int) -> None:
        """Puts the state back; safe to repeat after an interruption.

        Raises GymfastError if an interrupt came between an update and the note of it, or the
        device failed there.
        """
        for (name, first), (slot, count) in list(self.pending.items()):
            self._check_pending(name, first, slot, count, backend, threads)
        for data, geometry, blob in reversed(self.blocks):
            backend.rollback_blocks(data, blob, geometry)
        for rows, saved in self.rows:
            rows[:] = saved
        state.slots = dict(self.slots)

    def _check_pending(
        self, name: str, first: int, slot: Slot, count: int, backend: Backend, threads: int
    ) -> None:
        """An interrupted section is harmless if its blocks still are what their digests say."""
        saved = next(saved for rows, saved in self.rows if rows is slot.rows)
        found = backend.digest_blocks(slot.tensor.data, slot.geometry, threads, first, count)
        if not np.array_equal(found, saved[first : first + count]):
            raise GymfastError(
                f"tensor {name!r}: an interrupt, or a device that failed, came between the update "
                f"of blocks {first} to {first + count - 1} and the note of their old values: the "
                "state cannot be rolled back; make a new one and publish an anchor"
            )
        del self.pending[name, first]
