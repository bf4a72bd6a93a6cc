"""One section of blocks as the kernels see it: typed units, geometry, and how it is tiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from gymfast.delta.backends.triton_kernels_digest import digest_rows_kernel, digest_tiles_kernel
from gymfast.delta.geometry import Geometry

UNIT_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_DIGEST_ROWS = 8
_DIGEST_TILE = 2048
_MASK64 = 2**64 - 1


@dataclass(frozen=True)
class Section:
    """A range of blocks of one tensor."""

    geometry: Geometry
    first_block: int
    num_blocks: int

    @property
    def is_flat(self) -> bool:
        """Whether blocks are runs of consecutive units."""
        return self.geometry.tile_rows == 1 and self.geometry.cols == self.geometry.num_units

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """num_units, cols, tile_rows and tile_cols: arguments of every kernel over units."""
        g = self.geometry
        return g.num_units, g.cols, g.tile_rows, g.tile_cols

    def tiles_per_block(self, tile: int) -> int:
        """Tiles of a block that is not cut at an edge."""
        return -(-self.geometry.tile_rows * self.geometry.tile_cols // tile)

    def block_sizes(self) -> list[int]:
        """Units of each block."""
        sizes = []
        for block in range(self.first_block, self.first_block + self.num_blocks):
            row, row_end, col, col_end = self.geometry.block_span(block)
            sizes.append((row_end - row) * (col_end - col))
        return sizes


@cache
def column_keys(device: torch.device) -> torch.Tensor:
    """k[0] and k[1] of section 2 as int64 [2, 1024] on a device."""
    x = np.arange(2048, dtype=np.uint64)
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys = ((z ^ (z >> np.uint64(31))) >> np.uint64(32)) | np.uint64(1)
    return torch.from_numpy(keys.astype(np.int64)).to(device)


def fold32(digest: np.ndarray) -> int:
    """The 32-bit form of a digest [2]."""
    high, low = int(digest[0]), int(digest[1])
    folded = high ^ ((low << 32 | low >> 32) & _MASK64)
    return (folded ^ folded >> 32) & (2**32 - 1)


def digest_section(units: torch.Tensor, section: Section) -> np.ndarray:
    """Partial digests of the blocks of a section, uint64 [num_blocks, 2]."""
    geometry, num_blocks = section.geometry, section.num_blocks
    if not num_blocks:
        return np.zeros((0, 2), np.uint64)
    keys = column_keys(units.device)
    if section.is_flat:
        row_units = 4096 // geometry.unit_bytes
        per_block = -(-(geometry.tile_cols + row_units) // (row_units * _DIGEST_ROWS))
    else:
        per_block = section.tiles_per_block(_DIGEST_TILE)
    out = torch.empty((num_blocks, per_block, 2), dtype=torch.int64, device=units.device)
    args = (units, out, keys, section.first_block, per_block, geometry.num_units)
    grid = (num_blocks * per_block,)
    if section.is_flat:
        digest_rows_kernel[grid](*args, geometry.tile_cols, geometry.unit_bytes, _DIGEST_ROWS)
    else:
        digest_tiles_kernel[grid](
            *args,
            geometry.cols,
            geometry.tile_rows,
            geometry.tile_cols,
            geometry.unit_bytes,
            _DIGEST_TILE,
        )
    result: np.ndarray = out.sum(1).cpu().numpy().view(np.uint64)
    return result
