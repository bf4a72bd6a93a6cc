"""What the Triton kernels share: units, classes, ranks in a tile and the terms of digests."""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # splitmix64: docs/wire-format.md section 2
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def splitmix64(x):
    """The finaliser of splitmix64 on uint64."""
    z = x + tl.full((), GOLDEN, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), MIX_1, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), MIX_2, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def row_key(row, LANE: tl.constexpr):
    """K[LANE](row) of section 2; row is uint64."""
    return splitmix64(row * 2 + tl.full((), 0x8000000000000000 + LANE, tl.uint64)) | 1


@triton.jit
def unit_offsets(block, u, num_units, cols, tile_rows, tile_cols, FLAT: tl.constexpr):
    """Offsets in the tensor of the units u of a block, and the number of its units (section 4)."""
    wide = block.to(tl.int64)
    if FLAT:
        col = wide * tile_cols
        return col + u, tl.minimum(num_units - col, tile_cols).to(tl.int32)
    blocks_per_row = (cols + tile_cols - 1) // tile_cols
    i = wide // blocks_per_row
    row = i * tile_rows
    col = (wide - i * blocks_per_row) * tile_cols
    height = tl.minimum(num_units // cols - row, tile_rows).to(tl.int32)
    width = tl.minimum(cols - col, tile_cols).to(tl.int32)
    r = u // width
    return (row + r) * cols + col + (u - r * width), height * width


@triton.jit
def magnitude(x, UNIT_BYTES: tl.constexpr):
    """mag(x) of section 5.2 as int32; x is uint32."""
    return (x & ((1 << (8 * UNIT_BYTES - 1)) - 1)).to(tl.int32)


@triton.jit
def sign(x, UNIT_BYTES: tl.constexpr):
    """The top bit of a unit, sign of section 5.2; x is uint32."""
    return (x >> (8 * UNIT_BYTES - 1)) & 1


@triton.jit
def class_of(x, class_shift, class_base, UNIT_BYTES: tl.constexpr):
    """class(x) of section 5.2; x is uint32."""
    if UNIT_BYTES == 1:
        field = (x & 127).to(tl.int32)
    else:
        field = ((x >> (8 * UNIT_BYTES - 9)) & 255).to(tl.int32)
    return tl.minimum(tl.maximum((field >> class_shift) - class_base, 0), 15)


@triton.jit
def in_word(number, is_member, WORD: tl.constexpr):
    """A one in the 16-bit counter of each member's class, if that is in word WORD of four."""
    mine = is_member & ((number >> 2) == WORD)
    return tl.where(mine, tl.full((), 1, tl.int64) << ((number & 3) * 16).to(tl.int64), 0)


@triton.jit
def class_ranks(number, is_member):
    """How many members of the same class stand before each unit of a tile (int32)."""
    rank = tl.zeros_like(number)
    for word in tl.static_range(4):
        ones = in_word(number, is_member, word)
        before = tl.cumsum(ones, 0) - ones
        here = ((before >> ((number & 3) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)
        rank = tl.where((number >> 2) == word, here, rank)
    return rank


@triton.jit
def class_counts(number, is_member):
    """Members of each of the 16 classes, int32 [16]."""
    numbers = tl.arange(0, 16)
    counts = tl.zeros((16,), tl.int32)
    for word in tl.static_range(4):
        total = tl.sum(in_word(number, is_member, word), 0)
        mine = ((total >> ((numbers & 3) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)
        counts = tl.where((numbers >> 2) == word, mine, counts)
    return counts


@triton.jit
def digest_terms(offset, value, mask, column_keys, LANE: tl.constexpr, UNIT_BYTES: tl.constexpr):
    """What values (int64, possibly differences) at unit offsets add to H[LANE]; uint64."""
    at = offset.to(tl.uint64) * UNIT_BYTES
    column = ((at >> 2) & 1023).to(tl.int32)
    key = tl.load(column_keys + LANE * 1024 + column, mask=mask, other=0).to(tl.uint64)
    shifted = value.to(tl.uint64) << ((at & 3) * 8)
    return tl.where(mask, row_key(at >> 12, LANE) * key * shifted, 0)
