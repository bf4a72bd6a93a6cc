"""Mode dense of the canonical encoder: one block at a time, its symbols counted on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gymfast.delta.backends.triton_arrays import Array, Arrays, upload
from gymfast.delta.backends.triton_kernels_dense import index_kernel, rest_kernel, symbol_kernel
from gymfast.delta.backends.triton_section import Section

TILE = 1024


@dataclass(frozen=True)
class DenseBlock:
    """A dense candidate: header and the array of its indices."""

    header: bytes
    array: Array
    arrays: Arrays

    def write(
        self,
        new: torch.Tensor,
        section: Section,
        i: int,
        words: torch.Tensor,
        placed: Sequence[tuple[Array, int, int]],
        rests_at: int,
    ) -> None:
        """L, P and U of block i of the section into the words of a body."""
        self.arrays.pack(words, placed)
        rest_kernel[(section.tiles_per_block(TILE),)](
            new,
            words.view(torch.uint8),
            section.first_block + i,
            rests_at,
            *section.shape,
            section.geometry.unit_bytes,
            section.is_flat,
            TILE,
        )


def dense_block(
    base: torch.Tensor, new: torch.Tensor, section: Section, i: int, use_base: bool
) -> DenseBlock:
    """The dense candidate of block i of a section."""
    num_tiles = section.tiles_per_block(TILE)
    size = section.block_sizes()[i]
    symbols = torch.empty(size, dtype=torch.int32, device=new.device)
    counts = torch.empty((num_tiles, 256), dtype=torch.int32, device=new.device)
    symbol_kernel[(num_tiles,)](
        base,
        new,
        symbols,
        counts,
        section.first_block + i,
        *section.shape,
        section.geometry.unit_bytes,
        section.is_flat,
        use_base,
        TILE,
    )
    totals = counts.sum(0).cpu().numpy()
    listed = [s for s in sorted(range(256), key=lambda s: (-int(totals[s]), s)) if totals[s]]
    index_of = np.zeros(256, np.int32)
    index_of[listed] = np.arange(len(listed))
    index_kernel[(num_tiles,)](symbols, upload(index_of, new.device), size, TILE)
    in_order = totals[listed]
    places = np.arange(len(listed))
    costs = [size * bits + int((in_order * (places >> bits)).sum()) for bits in range(8)]
    low_bits = costs.index(min(costs))
    array = Array(0, size)
    arrays = Arrays(symbols, [array], low_bits)
    header = bytes((int(use_base), len(listed) - 1, *listed, low_bits))
    return DenseBlock(header, array, arrays)
