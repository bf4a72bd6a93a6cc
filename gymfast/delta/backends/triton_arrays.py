"""Split-Rice arrays on the device: what they cost, and where their pieces are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gymfast.delta.backends.triton_kernels_pack import (
    NO_GAPS,
    pack_kernel,
    shifted_sums_kernel,
    sum_kernel,
)

I64 = NDArray[np.int64]
PIECE = 1024
PIECE_FIELDS = 8


@dataclass
class Array:
    """`size` values from `start` of x: gaps of ascending positions, or plain values.

    `before` is what precedes the first position; None for plain values. low_bits, unary_bits and
    index are set by `Arrays`.
    """

    start: int
    size: int
    before: int | None = None
    low_bits: int = 0
    unary_bits: int = 0
    index: int = -1

    @property
    def bits(self) -> int:
        """Bits in L and U together."""
        return self.size * self.low_bits + self.unary_bits


def piece_rows(starts: I64, sizes: I64) -> tuple[I64, I64]:
    """Rows of pieces with first value and number of values set, and whose piece each is."""
    counts = -(-sizes // PIECE)
    owner = np.repeat(np.arange(starts.size), counts)
    ordinal = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.zeros((owner.size, PIECE_FIELDS), np.int64)
    rows[:, 0] = starts[owner] + ordinal * PIECE
    rows[:, 1] = np.minimum(sizes[owner] - ordinal * PIECE, PIECE)
    rows[:, 2] = starts[owner]
    return rows, owner


def upload(rows: NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """A host table on the device."""
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)


def candidate_parameters(total: int, size: int) -> range:
    """The parameters that the canonical encoder tries for `size` values of this sum."""
    t = (total + size) * 11 // (16 * size) if size else 0
    centre = max(0, t.bit_length() - 1)
    return range(max(0, centre - 1), min(31, centre + 1) + 1)


class Arrays:
    """Arrays over one int32 tensor x, with the parameters that section 10 chooses for them."""

    def __init__(
        self, x: torch.Tensor, arrays: Sequence[Array], low_bits: int | None = None
    ) -> None:
        """With low_bits this is the parameter of all arrays; otherwise each gets its own."""
        self._x = x
        self._arrays = arrays
        starts = np.array([array.start for array in arrays], np.int64)
        sizes = np.array([array.size for array in arrays], np.int64)
        self._rows, self._owner = piece_rows(starts, sizes)
        before = [NO_GAPS.value if array.before is None else array.before for array in arrays]
        self._rows[:, 3] = np.array(before, np.int64)[self._owner]
        self._first = np.searchsorted(self._owner, np.arange(len(arrays) + 1))
        self._piece_unary = np.zeros((self._owner.size, 3), np.int64)
        if self._owner.size:
            self._choose(starts.size, low_bits)

    def _choose(self, num_arrays: int, fixed: int | None) -> None:
        """low_bits and unary_bits of all arrays."""
        if fixed is None:
            sums = self._per_array(self._launch(sum_kernel, 1), num_arrays)[:, 0]
            ranges = [
                candidate_parameters(int(total), array.size)
                for total, array in zip(sums, self._arrays, strict=True)
            ]
        else:
            ranges = [range(fixed, fixed + 1)] * num_arrays
        lowest = np.array([candidates.start for candidates in ranges], np.int64)
        self._rows[:, 4] = lowest[self._owner]
        self._piece_unary = self._launch(shifted_sums_kernel, 3) + self._rows[:, 1:2]
        unary = self._per_array(self._piece_unary, num_arrays)
        for i, array in enumerate(self._arrays):
            array.index = i
            if not array.size:
                continue
            costs = [array.size * bits + int(unary[i, j]) for j, bits in enumerate(ranges[i])]
            best = costs.index(min(costs))
            array.low_bits, array.unary_bits = ranges[i][best], int(unary[i, best])

    def _launch(self, kernel: object, width: int) -> I64:
        """What a kernel says of each piece, [num_pieces, width]."""
        num_pieces = self._owner.size
        out = torch.empty((num_pieces, width), dtype=torch.int64, device=self._x.device)
        kernel[(num_pieces,)](self._x, upload(self._rows, self._x.device), out, PIECE)  # type: ignore[index]
        result: I64 = out.cpu().numpy()
        return result

    def _per_array(self, of_pieces: I64, num_arrays: int) -> I64:
        sums = np.zeros((num_arrays, of_pieces.shape[1]), np.int64)
        np.add.at(sums, self._owner, of_pieces)
        return sums

    def pack(self, body: torch.Tensor, chosen: Sequence[tuple[Array, int, int]]) -> None:
        """Writes arrays whose first bits in L and U are given into the words of body."""
        parts = []
        for array, low_bit, unary_bit in chosen:
            first, end = self._first[array.index], self._first[array.index + 1]
            rows = self._rows[first:end].copy()
            column = array.low_bits - rows[:, 4]
            unary = np.take_along_axis(self._piece_unary[first:end], column[:, None], 1)[:, 0]
            rows[:, 4] = array.low_bits
            rows[:, 5] = low_bit + (rows[:, 0] - array.start) * array.low_bits
            rows[:, 6] = unary_bit + np.cumsum(unary) - unary
            parts.append(rows)
        rows = np.concatenate([np.zeros((0, PIECE_FIELDS), np.int64), *parts])
        if rows.size:
            pack_kernel[(rows.shape[0],)](self._x, upload(rows, body.device), body, PIECE)
