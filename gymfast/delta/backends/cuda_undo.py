"""What undoes an encode of the CUDA back end: old values in little room."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.memory import U8


@dataclass(frozen=True)
class UndoLog:
    """Old values of all changed units of some blocks, in order; index counts within a block.

    As bytes: where there are few changes the low 16 bits of each index, and how many there are in
    each 65,536 units; else a bit for each unit.
    """

    first_block: int
    block_units: int
    counts: NDArray[np.uint32]
    index: NDArray[np.uint32]
    before: U8

    def write(self) -> bytes:
        num_blocks, num_changed = self.counts.size, self.index.size
        is_dense = 2 * num_changed > num_blocks * self.block_units // 8
        head = np.array([self.first_block, num_blocks, self.block_units, is_dense], np.uint64)
        parts = [head.tobytes(), self.counts.tobytes()]
        if is_dense:
            ends = np.cumsum(self.counts, dtype=np.int64)
            for end, count in zip(ends.tolist(), self.counts.tolist(), strict=True):
                bits = np.zeros(self.block_units, np.bool_)
                bits[self.index[end - count : end]] = True
                parts.append(np.packbits(bits).tobytes())
        else:
            parts += [self._pieces().tobytes(), self.index.astype(np.uint16).tobytes()]
        return b"".join([*parts, self.before.tobytes()])

    def _pieces(self) -> NDArray[np.uint32]:
        """Changes in each piece of 65,536 units, pieces of all blocks in order."""
        per_block = _pieces_of(self.block_units)
        block = np.repeat(np.arange(self.counts.size), self.counts)
        pieces = block * per_block + (self.index >> 16)
        return np.bincount(pieces, minlength=self.counts.size * per_block).astype(np.uint32)

    @classmethod
    def read(cls, blob: U8) -> UndoLog:
        first_block, num_blocks, block_units, is_dense = map(int, blob[:32].view(np.uint64))
        at = 32 + 4 * num_blocks
        counts = blob[32:at].view(np.uint32)
        num_changed = int(counts.sum(dtype=np.int64))
        if is_dense:
            size = -(-block_units // 8)
            bits = blob[at : at + num_blocks * size].reshape(num_blocks, size)
            rows = [np.flatnonzero(np.unpackbits(row)).astype(np.uint32) for row in bits]
            index, at = np.concatenate(rows), at + bits.size
        else:
            per_block = _pieces_of(block_units)
            end = at + 4 * num_blocks * per_block
            pieces = blob[at:end].view(np.uint32)
            high = np.tile(np.arange(per_block, dtype=np.uint32) << 16, num_blocks)
            index = np.repeat(high, pieces)
            at = end + 2 * num_changed
            index |= blob[end:at].view(np.uint16)
        return cls(first_block, block_units, counts, index, blob[at:])


def _pieces_of(block_units: int) -> int:
    return -(-block_units // 2**16)
