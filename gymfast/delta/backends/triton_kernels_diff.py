"""Triton kernels that stream over units: diff, compaction of its records, update, digest.

A record describes one changed unit in 64 bits: position in its block (bits 0-19), v (20-50), neg
(51), flip (52), sign of the base (53) and class of the base (54-57); docs/wire-format.md 5.2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gymfast.delta.backends.triton_kernels_units import (
    class_counts,
    class_of,
    class_ranks,
    digest_terms,
    magnitude,
    sign,
    unit_offsets,
)


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
    """New - old of the unit that a record describes, int64."""
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
