"""Triton kernels that stream over units: diff, compaction of its records, update, digest.

A record describes one changed unit in 64 bits: position in its block (bits 0-19), v (20-50), neg
(51), flip (52), sign of the base (53) and class of the base (54-57); docs/wire-format.md 5.2.
"""

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
    """sign(x) of section 5.2; x is uint32."""
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


@triton.jit
def diff_kernel(
    base,
    new,
    records,
    ranks,
    counts,
    unit_counts,
    change_counts,
    first_block,
    tiles_per_block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    class_shift,
    class_base,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    BY_CLASS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of a block: its records packed to the front of its slots, and its counts."""
    tile = tl.program_id(0)
    block = first_block + (tile // tiles_per_block).to(tl.int64)
    u = (tile % tiles_per_block) * TILE + tl.arange(0, TILE)
    offset, n = unit_offsets(block, u, num_units, cols, tile_rows, tile_cols, FLAT)
    mask = u < n
    old = tl.load(base + offset, mask=mask, other=0).to(tl.uint32)
    fresh = tl.load(new + offset, mask=mask, other=0).to(tl.uint32)
    changed = mask & (old != fresh)
    before = tl.cumsum(changed.to(tl.int32), 0) - changed.to(tl.int32)
    slots = tile.to(tl.int64) * TILE + before
    d = magnitude(fresh, UNIT_BYTES) - magnitude(old, UNIT_BYTES)
    v = (tl.abs(d) - 1) & ((1 << (8 * UNIT_BYTES - 1)) - 1)
    record = u.to(tl.int64) | (v.to(tl.int64) << 20)
    flags = (d < 0).to(tl.int32) | (sign(old ^ fresh, UNIT_BYTES).to(tl.int32) << 1)
    flags = flags | (sign(old, UNIT_BYTES).to(tl.int32) << 2)
    if BY_CLASS:
        number = class_of(old, class_shift, class_base, UNIT_BYTES)
        flags = flags | (number << 3)
        tl.store(ranks + slots, class_ranks(number, mask), mask=changed)
        at = tile.to(tl.int64) * 16 + tl.arange(0, 16)
        tl.store(unit_counts + at, class_counts(number, mask))
        tl.store(change_counts + at, class_counts(number, changed))
    tl.store(records + slots, record | (flags.to(tl.int64) << 51), mask=changed)
    tl.store(counts + tile, tl.sum(changed.to(tl.int32), 0))


@triton.jit
def record_difference(record, UNIT_BYTES: tl.constexpr):
    """new - old of the unit that a record describes, int64."""
    half = tl.full((), 1 << (8 * UNIT_BYTES - 1), tl.int64)
    v = (record >> 20) & 0x7FFFFFFF
    size = tl.where(v == half - 1, 0, v + 1)
    d = tl.where(((record >> 51) & 1) != 0, -size, size)
    turned = tl.where(((record >> 53) & 1) != 0, -half, half)
    return d + tl.where(((record >> 52) & 1) != 0, turned, 0)


@triton.jit
def compact_kernel(
    records,
    ranks,
    counts,
    list_starts,
    class_starts,
    rank_starts,
    out,
    places,
    values,
    digests,
    column_keys,
    num_changed,
    first_block,
    tiles_per_block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    BY_CLASS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """The records of one tile in the order of positions and, behind those, in that of classes.

    places are positions or ranks within the class. Also what the tile adds to its block's digest.
    """
    tile = tl.program_id(0)
    block = first_block + (tile // tiles_per_block).to(tl.int64)
    count = tl.load(counts + tile)
    start = tl.load(list_starts + tile)
    wide_tile = tile.to(tl.int64)
    high = tl.zeros((STEP,), tl.uint64)
    low = tl.zeros((STEP,), tl.uint64)
    numbers = tl.arange(0, 16)
    seen = tl.zeros((16,), tl.int32)
    for done in range(0, count, STEP):
        i = done + tl.arange(0, STEP)
        mask = i < count
        record = tl.load(records + wide_tile * TILE + i, mask=mask, other=0)
        position = (record & 0xFFFFF).to(tl.int32)
        v = ((record >> 20) & 0x7FFFFFFF).to(tl.int32)
        tl.store(out + start + i, record, mask=mask)
        tl.store(places + start + i, position, mask=mask)
        tl.store(values + start + i, v, mask=mask)
        offset, _n = unit_offsets(block, position, num_units, cols, tile_rows, tile_cols, FLAT)
        difference = record_difference(record, UNIT_BYTES)
        high += digest_terms(offset, difference, mask, column_keys, 0, UNIT_BYTES)
        low += digest_terms(offset, difference, mask, column_keys, 1, UNIT_BYTES)
        if BY_CLASS:
            number = ((record >> 54) & 15).to(tl.int32)
            class_at = wide_tile * 16 + number
            rank = tl.load(ranks + wide_tile * TILE + i, mask=mask, other=0)
            rank += tl.load(rank_starts + class_at, mask=mask, other=0)
            is_mine = number[:, None] == numbers[None, :]
            earlier = tl.sum(tl.where(is_mine, seen[None, :], 0), 1)
            to = tl.load(class_starts + class_at, mask=mask, other=0) + num_changed
            to += earlier + class_ranks(number, mask)
            tl.store(out + to, record, mask=mask)
            tl.store(places + to, rank, mask=mask)
            tl.store(values + to, v, mask=mask)
            seen += class_counts(number, mask)
    tl.store(digests + wide_tile * 2, tl.sum(high, 0).to(tl.int64))
    tl.store(digests + wide_tile * 2 + 1, tl.sum(low, 0).to(tl.int64))


@triton.jit
def update_kernel(
    base,
    new,
    records,
    counts,
    list_starts,
    undo_offsets,
    undo_values,
    first_block,
    tiles_per_block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    FLAT: tl.constexpr,
    UPDATE: tl.constexpr,
    UNDO: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """The changed units of one tile: old ones to the undo lists, new ones into base."""
    tile = tl.program_id(0)
    block = first_block + (tile // tiles_per_block).to(tl.int64)
    count = tl.load(counts + tile)
    start = tl.load(list_starts + tile)
    for done in range(0, count, STEP):
        i = done + tl.arange(0, STEP)
        mask = i < count
        record = tl.load(records + tile.to(tl.int64) * TILE + i, mask=mask, other=0)
        position = (record & 0xFFFFF).to(tl.int32)
        offset, _n = unit_offsets(block, position, num_units, cols, tile_rows, tile_cols, FLAT)
        if UNDO:
            tl.store(undo_offsets + start + i, offset, mask=mask)
            old = tl.load(base + offset, mask=mask, other=0)
            tl.store(undo_values + start + i, old, mask=mask)
        if UPDATE:
            fresh = tl.load(new + offset, mask=mask, other=0)
            tl.store(base + offset, fresh, mask=mask)


@triton.jit
def scatter_kernel(data, offsets, values, count, STEP: tl.constexpr):
    """data[offsets] = values."""
    i = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    mask = i < count
    offset = tl.load(offsets + i, mask=mask, other=0)
    tl.store(data + offset, tl.load(values + i, mask=mask, other=0), mask=mask)


@triton.jit
def digest_rows_kernel(
    data,
    out,
    column_keys,
    first_block,
    parts_per_block,
    num_units,
    tile_cols,
    UNIT_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Part of the digest of a flat block: ROWS digest rows of 4096 bytes, row keys as scalars."""
    part = tl.program_id(0)
    block = first_block + (part // parts_per_block).to(tl.int64)
    UNITS: tl.constexpr = 4096 // UNIT_BYTES
    start = block * tile_cols
    end = tl.minimum(start + tile_cols, num_units)
    j = tl.arange(0, UNITS)
    column = (j * UNIT_BYTES) >> 2
    key_0 = tl.load(column_keys + column).to(tl.uint64)
    key_1 = tl.load(column_keys + 1024 + column).to(tl.uint64)
    shift = (((j * UNIT_BYTES) & 3) * 8).to(tl.uint64)
    high = tl.full((), 0, tl.uint64)
    low = tl.full((), 0, tl.uint64)
    for step in range(ROWS):
        row = start // UNITS + (part % parts_per_block).to(tl.int64) * ROWS + step
        offset = row * UNITS + j
        mask = (offset >= start) & (offset < end)
        word = tl.load(data + offset, mask=mask, other=0).to(tl.uint64) << shift
        high += tl.sum(word * key_0, 0) * row_key(row.to(tl.uint64), 0)
        low += tl.sum(word * key_1, 0) * row_key(row.to(tl.uint64), 1)
    tl.store(out + part.to(tl.int64) * 2, high.to(tl.int64))
    tl.store(out + part.to(tl.int64) * 2 + 1, low.to(tl.int64))


@triton.jit
def digest_tiles_kernel(
    data,
    out,
    column_keys,
    first_block,
    parts_per_block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    UNIT_BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Part of the digest of a block of any geometry: TILE of its units, keys unit by unit."""
    part = tl.program_id(0)
    block = first_block + (part // parts_per_block).to(tl.int64)
    u = (part % parts_per_block) * TILE + tl.arange(0, TILE)
    offset, n = unit_offsets(block, u, num_units, cols, tile_rows, tile_cols, False)
    mask = u < n
    value = tl.load(data + offset, mask=mask, other=0).to(tl.int64)
    high = tl.sum(digest_terms(offset, value, mask, column_keys, 0, UNIT_BYTES), 0)
    low = tl.sum(digest_terms(offset, value, mask, column_keys, 1, UNIT_BYTES), 0)
    tl.store(out + part.to(tl.int64) * 2, high.to(tl.int64))
    tl.store(out + part.to(tl.int64) * 2 + 1, low.to(tl.int64))


@triton.jit
def sample_kernel(
    base, fields, num_units, num_samples, UNIT_BYTES: tl.constexpr, STEP: tl.constexpr
):
    """The exponent fields of units floor(i * N / s): section 10, class_shift and class_base."""
    i = tl.arange(0, STEP).to(tl.int64)
    mask = i < num_samples
    whole = num_units // num_samples
    at = i * whole + i * (num_units - whole * num_samples) // num_samples
    unit = tl.load(base + at, mask=mask, other=0).to(tl.uint32)
    if UNIT_BYTES == 1:
        field = unit & 127
    else:
        field = (unit >> (8 * UNIT_BYTES - 9)) & 255
    tl.store(fields + i, field.to(tl.uint8), mask=mask)
