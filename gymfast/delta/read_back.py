"""Reading the memory of a state again: all of it, or each block right after it was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gymfast.errors import ChecksumError

if TYPE_CHECKING:
    from gymfast.delta.state import Rows, Slot

_RESULT_MISMATCH = 61


class ReadBack:
    """Which blocks were read again in one version. Threads may read different blocks at once.

    A block that was written a moment ago is still in the cache: reading it there, and the others
    at the end, takes half the time of a pass over everything.
    """

    def __init__(self) -> None:
        self._done: dict[Slot, NDArray[np.bool_]] = {}

    def begin(self, slots: Iterable[Slot]) -> None:
        """These tensors are about to be written: nothing of them was read since."""
        for slot in slots:
            self._done[slot] = np.zeros(slot.geometry.num_blocks, np.bool_)

    def note(self, slot: Slot, first: int, count: int) -> None:
        """Blocks of a slot that has begun were read and compared."""
        self._done[slot][first : first + count] = True

    def rest(self, slot: Slot) -> Iterator[tuple[int, int]]:
        """First block and number of blocks of each run that was not read yet."""
        done = self._done.get(slot)
        if done is None:
            yield 0, slot.geometry.num_blocks
            return
        edges = np.flatnonzero(np.diff(done, prepend=True, append=True))
        for begin, end in edges.reshape(-1, 2).tolist():
            yield begin, end - begin


def compare(name: str, slot: Slot, first: int, found: Rows) -> None:
    """Compares what blocks of a tensor, from `first` on, were found to be with what is kept.

    Raises ChecksumError 61 that names the tensor and the first block that differs.
    """
    expected = slot.rows[first : first + len(found)]
    wrong = np.flatnonzero((found != expected).any(axis=1))
    if wrong.size:
        at = int(wrong[0])
        raise ChecksumError(
            f"tensor {name!r}: block {first + at} (and {wrong.size - 1} more of {len(slot.rows)}) "
            f"has digest {_hex(found[at])}, expected {_hex(expected[at])}: its memory was changed "
            "from outside or is damaged; restore the state from an anchor",
            _RESULT_MISMATCH,
        )


def _hex(row: Rows) -> str:
    return "".join(f"{int(lane):016x}" for lane in row)
