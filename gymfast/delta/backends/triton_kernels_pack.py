"""Triton kernels that write payloads: lists of flagged changes, sums and split-Rice packing.

A *piece* is up to PIECE consecutive values of one array, so that every program works on one array.
Its row in `pieces` is 8 int64: first value in x, number of values, first value of the array,
what precedes the first position (or NO_GAPS: plain values), l, bit in L, bit in U, unused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gymfast.delta.backends.triton_kernels_units import unit_offsets

NO_GAPS = tl.constexpr(-(2**40))


@triton.jit
def piece_values(x, pieces, piece, PIECE: tl.constexpr):
    """Values of a piece as int32, gaps already formed, and which lanes hold one."""
    row = pieces + piece * 8
    start = tl.load(row)
    lane = tl.arange(0, PIECE)
    mask = lane < tl.load(row + 1)
    at = start + lane
    value = tl.load(x + at, mask=mask, other=0)
    before_first = tl.where(mask, tl.load(row + 3), NO_GAPS)
    has_gaps = before_first != NO_GAPS
    is_first = at == tl.load(row + 2)
    before = tl.load(x + at - 1, mask=has_gaps & (is_first == 0), other=0)
    before = tl.where(is_first, before_first.to(tl.int32), before)
    value = tl.where(has_gaps, value - before - 1, value)
    return tl.where(mask, value, 0), mask


@triton.jit
def sum_kernel(x, pieces, out, PIECE: tl.constexpr):
    """The sum of each piece, int64."""
    piece = tl.program_id(0).to(tl.int64)
    value, _mask = piece_values(x, pieces, piece, PIECE)
    tl.store(out + piece, tl.sum(value.to(tl.int64), 0))


@triton.jit
def shifted_sums_kernel(x, pieces, out, PIECE: tl.constexpr):
    """Sums of x >> l, x >> l + 1 and x >> l + 2 of each piece, int64 [num_pieces, 3]."""
    piece = tl.program_id(0).to(tl.int64)
    value, _mask = piece_values(x, pieces, piece, PIECE)
    low_bits = tl.load(pieces + piece * 8 + 4)
    wide = value.to(tl.int64)
    for step in tl.static_range(3):
        tl.store(out + piece * 3 + step, tl.sum(wide >> (low_bits + step), 0))


@triton.jit
def or_bits(body, bit, field, mask):
    """ORs fields of at most 32 bits (uint64) into a bit array of 32-bit words."""
    word = bit >> 5
    shifted = field << (bit & 31).to(tl.uint64)
    low = (shifted & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (shifted >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(body + word, low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(body + word + 1, high, mask=mask & (high != 0), sem="relaxed")


@triton.jit
def pack_kernel(x, pieces, body, PIECE: tl.constexpr):
    """Lows and unary parts of a piece, into L and U of its payload (section 5.1)."""
    piece = tl.program_id(0).to(tl.int64)
    value, mask = piece_values(x, pieces, piece, PIECE)
    row = pieces + piece * 8
    low_bits = tl.load(row + 4)
    wide = value.to(tl.int64)
    lane = tl.arange(0, PIECE).to(tl.int64)
    low = (wide & ((tl.full((), 1, tl.int64) << low_bits) - 1)).to(tl.uint64)
    or_bits(body, tl.load(row + 5) + lane * low_bits, low, mask)
    ones = tl.cumsum(tl.where(mask, (wide >> low_bits) + 1, 0), 0) - 1
    or_bits(body, tl.load(row + 6) + ones, tl.full((PIECE,), 1, tl.uint64), mask)


@triton.jit
def pack_signs_kernel(records, pieces, body, PIECE: tl.constexpr):
    """Neg bits of the records of a piece, into S of its payload."""
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * 8
    lane = tl.arange(0, PIECE)
    mask = lane < tl.load(row + 1)
    record = tl.load(records + tl.load(row) + lane, mask=mask, other=0)
    neg = ((record >> 51) & 1).to(tl.uint64)
    or_bits(body, tl.load(row + 5) + lane, neg, mask)


@triton.jit
def flag_kernel(records, out, count, STEP: tl.constexpr):
    """Two flags of each record, int64 [2, count]: v is not 0; flip."""
    i = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    mask = i < count
    record = tl.load(records + i, mask=mask, other=0)
    is_exception = ((record >> 20) & 0x7FFFFFFF) != 0
    tl.store(out + i, is_exception.to(tl.int64), mask=mask)
    tl.store(out + count + i, (record >> 52) & 1, mask=mask)


@triton.jit
def list_kernel(records, flag_sums, exceptions, exception_values, flips, count, STEP: tl.constexpr):
    """Indices of the records with v != 0 and their v - 1, and indices of those with flip.

    flag_sums are inclusive prefix sums of what flag_kernel wrote.
    """
    i = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    mask = i < count
    record = tl.load(records + i, mask=mask, other=0)
    v = ((record >> 20) & 0x7FFFFFFF).to(tl.int32)
    is_exception = mask & (v != 0)
    at = tl.load(flag_sums + i, mask=is_exception, other=1) - 1
    tl.store(exceptions + at, i.to(tl.int32), mask=is_exception)
    tl.store(exception_values + at, v - 1, mask=is_exception)
    has_flip = mask & (((record >> 52) & 1) != 0)
    at = tl.load(flag_sums + count + i, mask=has_flip, other=1) - 1
    tl.store(flips + at, i.to(tl.int32), mask=has_flip)


@triton.jit
def invert_kernel(x, pieces, PIECE: tl.constexpr):
    """Gaps of the places that did not change, counted by the changed ones of a piece.

    The row of a piece holds: first place in x, number, first place of the group, -, -,
    first gap of the group in x (all 0 on entry), number of its gaps.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * 8
    lane = tl.arange(0, PIECE)
    mask = lane < tl.load(row + 1)
    at = tl.load(row) + lane
    place = tl.load(x + at, mask=mask, other=0)
    unchanged_before = place.to(tl.int64) - (at - tl.load(row + 2))
    mask = mask & (unchanged_before < tl.load(row + 6))
    tl.atomic_add(x + tl.load(row + 5) + unchanged_before, 1, mask=mask, sem="relaxed")


@triton.jit
def copy_block_kernel(
    data,
    out,
    block,
    out_start,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The units of one block as bytes in block order: the payload of mode raw."""
    from_unit = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wide_block = tl.full((), 0, tl.int64) + block
    offset, n = unit_offsets(wide_block, from_unit, num_units, cols, tile_rows, tile_cols, FLAT)
    mask = from_unit < n
    unit = tl.load(data + offset, mask=mask, other=0).to(tl.uint32)
    to = out + out_start + from_unit.to(tl.int64) * UNIT_BYTES
    for part in tl.static_range(UNIT_BYTES):
        tl.store(to + part, ((unit >> (8 * part)) & 255).to(tl.uint8), mask=mask)
