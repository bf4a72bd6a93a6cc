"""Triton kernels that read sparse payloads: unary parts, split-Rice values, changes (section 5).

Rows of pieces are int64 of 12 columns; each kernel names those that it reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(12)
POSITION_RANGE = tl.constexpr(54)


@triton.jit
def popcount8(byte):
    """Ones in bytes given as int32."""
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 15


@triton.jit
def count_ones_kernel(body, pieces, out, PIECE: tl.constexpr):
    """Ones in each piece of bytes (0: first byte, 1: number)."""
    piece = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PIECE)
    mask = lane < tl.load(pieces + piece * COLUMNS + 1)
    byte = tl.load(body + tl.load(pieces + piece * COLUMNS) + lane, mask=mask, other=0)
    tl.store(out + piece, tl.sum(popcount8(byte.to(tl.int32)), 0).to(tl.int64))


@triton.jit
def select_kernel(body, pieces, ones, PIECE: tl.constexpr):
    """Where the ones of U stand, in bits from its start.

    0: first byte, 1: number of bytes, 2: byte that is bit 0, 3: ones before this piece.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * COLUMNS
    lane = tl.arange(0, PIECE)
    mask = lane < tl.load(row + 1)
    at = tl.load(row) + lane
    byte = tl.load(body + at, mask=mask, other=0).to(tl.int32)
    count = popcount8(byte)
    to = tl.load(row + 3) + (tl.cumsum(count, 0) - count)
    bit = (at - tl.load(row + 2)) * 8
    for i in tl.static_range(8):
        is_one = (byte >> i) & 1
        tl.store(ones + to, bit + i, mask=mask & (is_one != 0))
        to += is_one


@triton.jit
def load_bits(body, bit, width, mask):
    """Fields of `width` (0..31) bits at bit offsets, int64."""
    at = bit >> 3
    word = tl.zeros_like(bit)
    for i in tl.static_range(5):
        needed = mask & ((bit & 7) + width > 8 * i)
        byte = tl.load(body + at + i, mask=needed, other=0)
        word = word | (byte.to(tl.int64) << (8 * i))
    return (word >> (bit & 7)) & ((tl.full((), 1, tl.int64) << width) - 1)


@triton.jit
def values_kernel(body, pieces, ones, values, errors, PIECE: tl.constexpr):
    """Values of a piece of an array.

    0: first value, 1: number, 2: first value of the payload, 3: bit of its low part, 4: l,
    5: block in errors.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * COLUMNS
    lane = tl.arange(0, PIECE).to(tl.int64)
    mask = lane < tl.load(row + 1)
    at = tl.load(row) + lane
    one = tl.load(ones + at, mask=mask, other=0)
    has_before = mask & (at > tl.load(row + 2))
    before = tl.load(ones + at - 1, mask=has_before, other=-1)
    high = one - before - 1
    width = tl.load(row + 4)
    low = load_bits(body, tl.load(row + 3) + lane * width, width, mask)
    is_bad = mask & ((high >> (32 - width)) != 0)
    tl.store(values + at, tl.where(is_bad, 0, (high << width) | low), mask=mask)
    bad = tl.max(is_bad.to(tl.int32), 0)
    tl.atomic_max(errors + tl.load(row + 5), bad * POSITION_RANGE, mask=bad != 0)


@triton.jit
def exceptions_kernel(
    values, sums, pieces, v, flips, errors, half, IS_FLIP: tl.constexpr, PIECE: tl.constexpr
):
    """V or flips of the changes that a list of indices names.

    0: first index in values, 1: number, 2: first index of the array, 3: distance from an index to
    its size, 4: first change of the group, 5: block in errors, 6: changes of the group.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * COLUMNS
    lane = tl.arange(0, PIECE).to(tl.int64)
    mask = lane < tl.load(row + 1)
    at = tl.load(row) + lane
    first = tl.load(row + 2)
    index = tl.load(sums + at + 1, mask=mask, other=0) - tl.load(sums + first) - 1
    is_bad = mask & (index >= tl.load(row + 6))
    to = tl.load(row + 4) + index
    if IS_FLIP:
        tl.store(flips + to, tl.full((PIECE,), 1, tl.int8), mask=mask & (is_bad == 0))
    else:
        value = tl.load(values + at + tl.load(row + 3), mask=mask, other=0) + 1
        is_bad = is_bad | (mask & (value >= half))
        tl.store(v + to, value.to(tl.int32), mask=mask & (is_bad == 0))
    bad = tl.max(is_bad.to(tl.int32), 0)
    tl.atomic_max(errors + tl.load(row + 5), bad * POSITION_RANGE, mask=bad != 0)


@triton.jit
def plain_values_kernel(values, pieces, v, errors, half, PIECE: tl.constexpr):
    """V of all changes of a group (value_mode 2).

    0: first value, 1: number, 4: change of the first value, 5: block in errors.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * COLUMNS
    lane = tl.arange(0, PIECE).to(tl.int64)
    mask = lane < tl.load(row + 1)
    value = tl.load(values + tl.load(row) + lane, mask=mask, other=0)
    is_bad = mask & (value >= half)
    tl.store(v + tl.load(row + 4) + lane, value.to(tl.int32), mask=mask & (is_bad == 0))
    bad = tl.max(is_bad.to(tl.int32), 0)
    tl.atomic_max(errors + tl.load(row + 5), bad * POSITION_RANGE, mask=bad != 0)


@triton.jit
def places_kernel(sums, pieces, places, errors, PIECE: tl.constexpr):
    """Places of the changes of a group, listed or inverted.

    0: first change, 1: number, 2: first change of the group, 3: first value of its array,
    4: size of the array, 5: block in errors, 6: n_c, 7: inverted, 8: where places start.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * COLUMNS
    lane = tl.arange(0, PIECE).to(tl.int64)
    mask = lane < tl.load(row + 1)
    i = tl.load(row) - tl.load(row + 2) + lane
    first, size = tl.load(row + 3), tl.load(row + 4)
    start = tl.load(sums + first)
    if tl.load(row + 7) == 0:
        place = tl.load(sums + first + i + 1, mask=mask, other=0) - start - 1
    else:
        # Unchanged places before the i-th changed one: those with at most i changed before them.
        low = tl.zeros((PIECE,), tl.int64)
        high = low + size
        for _step in range(21):
            middle = (low + high) >> 1
            is_open = mask & (low < high)
            total = tl.load(sums + first + middle + 1, mask=is_open, other=0) - start
            is_before = is_open & (total - middle - 1 <= i)
            low = tl.where(is_before, middle + 1, low)
            high = tl.where(is_open & (is_before == 0), middle, high)
        place = i + low
    is_bad = mask & (place >= tl.load(row + 6))
    last = tl.load(sums + first + size) - start - 1
    bad = tl.maximum(tl.max(is_bad.to(tl.int32), 0), (last >= tl.load(row + 6)).to(tl.int32))
    to = tl.load(row + 8) + i
    tl.store(places + to, tl.where(is_bad, 0, place).to(tl.int32), mask=mask)
    tl.atomic_max(errors + tl.load(row + 5), bad * POSITION_RANGE, mask=bad != 0)
