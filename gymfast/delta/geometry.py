"""How the units of a tensor are cut into blocks: section 4 of docs/wire-format.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_BLOCK_UNITS = 2**20
DEFAULT_BLOCK_UNITS = 2**19
MAX_TENSOR_BYTES = 2**62
_MAX_BLOCKS_OF_SMALL = 4096
_UNITS_PER_BLOCK = 1024
_SHARDS = 16

DTYPE_BITS: dict[str, int] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class Geometry:
    """The unit matrix of one tensor and its tiles; all five are counts of units but unit_bytes."""

    num_units: int
    unit_bytes: int
    cols: int
    tile_rows: int
    tile_cols: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.num_units * self.unit_bytes

    @property
    def num_rows(self) -> int:
        """Rows of the unit matrix; 0 for an empty tensor."""
        return self.num_units // self.cols if self.cols else 0

    @property
    def blocks_per_row(self) -> int:
        """Blocks side by side, J of the specification; 0 for an empty tensor."""
        return -(-self.cols // self.tile_cols) if self.tile_cols else 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the tensor; 0 for an empty tensor."""
        if self.num_units == 0:
            return 0
        return -(-self.num_rows // self.tile_rows) * self.blocks_per_row

    @property
    def max_blocks(self) -> int:
        """The most blocks that a tensor of this size may have; see `most_blocks`."""
        return most_blocks(self.num_units)

    def block_span(self, block: int) -> tuple[int, int, int, int]:
        """First row, end row, first column and end column of a block.

        Raises ValueError if there is no such block.
        """
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} of a tensor of {self.num_blocks} blocks")
        i, j = divmod(block, self.blocks_per_row)
        return (
            i * self.tile_rows,
            min((i + 1) * self.tile_rows, self.num_rows),
            j * self.tile_cols,
            min((j + 1) * self.tile_cols, self.cols),
        )

    def section_blocks(self) -> int:
        """Consecutive blocks of one BLOCKS section of the canonical encoder (section 10)."""
        return max(1, 2**23 // max(1, self.tile_rows * self.tile_cols))


def most_blocks(num_units: int) -> int:
    """The most blocks that a tensor of so many units may have in a frame.

    Source: docs/wire-format.md section 9.
    """
    return _MAX_BLOCKS_OF_SMALL + num_units // _UNITS_PER_BLOCK


def unit_bytes_of(dtype: str) -> int:
    """Bytes of one coded unit: 1 up to 8 bits, 2 for 16 bits, 4 for more (section 3.2).

    Raises ValueError if the dtype is not in the table of section 3.2.
    """
    bits = _bits_of(dtype)
    return 1 if bits <= 8 else 2 if bits == 16 else 4


def num_bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this dtype and shape; packed dtypes round up to whole bytes.

    Raises ValueError if the dtype is unknown, a dimension negative or the tensor above 2^62 bytes.
    """
    if any(dim < 0 for dim in shape):
        raise ValueError(f"negative dimension in shape {tuple(shape)}")
    num_bytes = -(-math.prod(shape) * _bits_of(dtype) // 8)
    if num_bytes > MAX_TENSOR_BYTES:
        raise ValueError(f"a tensor of {num_bytes} bytes is above the limit of 2^62")
    return num_bytes


def plan_geometry(
    dtype: str,
    shape: Sequence[int],
    *,
    block_units: int = DEFAULT_BLOCK_UNITS,
    tiled: bool = False,
) -> Geometry:
    """The geometry a writer gives to a tensor: flat, or tiled where that was asked and divides.

    Blocks have at most block_units units, or as many more as keep their number within most_blocks.
    Raises ValueError if dtype or shape are impossible or block_units is not in 1..2^20.
    """
    if not 1 <= block_units <= MAX_BLOCK_UNITS:
        raise ValueError(f"block_units is {block_units}, expected 1..{MAX_BLOCK_UNITS}")
    unit_bytes = unit_bytes_of(dtype)
    num_units = num_bytes_of(dtype, shape) // unit_bytes
    if num_units == 0:
        return Geometry(0, unit_bytes, 0, 0, 0)
    if tiled and (tiles := _plan_tiles(dtype, shape, num_units, block_units)):
        geometry = Geometry(num_units, unit_bytes, *tiles)
        if geometry.num_blocks <= geometry.max_blocks:
            return geometry
    tile_cols = max(block_units, -(-num_units // most_blocks(num_units)))
    return Geometry(num_units, unit_bytes, num_units, 1, min(num_units, tile_cols))


def _plan_tiles(
    dtype: str, shape: Sequence[int], num_units: int, block_units: int
) -> tuple[int, int, int] | None:
    """cols, tile_rows and tile_cols of 1/16 tiles, or None where the tensor has to be flat."""
    bits = _bits_of(dtype)
    if len(shape) < 2 or bits < 8:
        return None
    cols = shape[-1] * bits // 8 // unit_bytes_of(dtype)
    rows = num_units // cols
    tile_cols = cols // _SHARDS
    if cols % _SHARDS or rows % _SHARDS or tile_cols > MAX_BLOCK_UNITS:
        return None
    shard_rows = rows // _SHARDS
    most = max(1, min(shard_rows, block_units // tile_cols))
    tile_rows = next(d for d in range(most, 0, -1) if shard_rows % d == 0)
    return cols, tile_rows, tile_cols


def _bits_of(dtype: str) -> int:
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPE_BITS)}")
    return bits
