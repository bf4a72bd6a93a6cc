"""Triton kernels that find the changed units of a base and write the new ones (section 5)."""

from __future__ import annotations

import triton
import triton.language as tl

from gymfast.delta.backends.triton_kernels_decode import COLUMNS, load_bits
from gymfast.delta.backends.triton_kernels_units import (
    class_counts,
    class_of,
    class_ranks,
    digest_terms,
    magnitude,
    unit_offsets,
)


@triton.jit
def unit_classes_kernel(
    data,
    blocks,
    counts,
    tiles_per_block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    class_shift,
    class_base,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Units of each class in one tile of a listed block, int32 [16]."""
    tile = tl.program_id(0)
    block = tl.load(blocks + tile // tiles_per_block)
    u = (tile % tiles_per_block) * TILE + tl.arange(0, TILE)
    offset, n = unit_offsets(block, u, num_units, cols, tile_rows, tile_cols, FLAT)
    mask = u < n
    old = tl.load(data + offset, mask=mask, other=0).to(tl.uint32)
    number = class_of(old, class_shift, class_base, UNIT_BYTES)
    tl.store(counts + tile * 16 + tl.arange(0, 16), class_counts(number, mask))


@triton.jit
def map_kernel(places, pieces, change_at, PIECE: tl.constexpr):
    """One more than the change at each rank of a class of a block.

    0: first change, 1: number, 2: where the ranks of the class start in change_at.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * COLUMNS
    lane = tl.arange(0, PIECE).to(tl.int64)
    mask = lane < tl.load(row + 1)
    change = tl.load(row) + lane
    rank = tl.load(places + change, mask=mask, other=0)
    tl.store(change_at + tl.load(row + 2) + rank, (change + 1).to(tl.int32), mask=mask)


@triton.jit
def rank_positions_kernel(
    data,
    blocks,
    rank_starts,
    change_at,
    positions,
    tiles_per_block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    class_shift,
    class_base,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Positions of the changes that are given by rank (mode small), one tile of a listed block."""
    tile = tl.program_id(0)
    block = tl.load(blocks + tile // tiles_per_block)
    u = (tile % tiles_per_block) * TILE + tl.arange(0, TILE)
    offset, n = unit_offsets(block, u, num_units, cols, tile_rows, tile_cols, FLAT)
    mask = u < n
    old = tl.load(data + offset, mask=mask, other=0).to(tl.uint32)
    number = class_of(old, class_shift, class_base, UNIT_BYTES)
    start = tl.load(rank_starts + tile.to(tl.int64) * 16 + number, mask=mask, other=0)
    change = tl.load(change_at + start + class_ranks(number, mask), mask=mask, other=0)
    tl.store(positions + change - 1, u, mask=mask & (change != 0))


@triton.jit
def change_classes_kernel(
    data,
    pieces,
    places,
    counts,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    class_shift,
    class_base,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Changed units of each class in a piece of positions (mode balanced), int32 [16].

    0: first place, 1: number, 2: block.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * COLUMNS
    lane = tl.arange(0, PIECE)
    mask = lane < tl.load(row + 1)
    u = tl.load(places + tl.load(row) + lane, mask=mask, other=0)
    offset, _n = unit_offsets(tl.load(row + 2), u, num_units, cols, tile_rows, tile_cols, FLAT)
    old = tl.load(data + offset, mask=mask, other=0).to(tl.uint32)
    number = class_of(old, class_shift, class_base, UNIT_BYTES)
    tl.store(counts + piece * 16 + tl.arange(0, 16), class_counts(number, mask))


@triton.jit
def sort_kernel(
    data,
    pieces,
    places,
    starts,
    positions,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    class_shift,
    class_base,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Positions sorted by class, then position; columns as in change_classes_kernel.

    starts [num_pieces, 16] is where the first change of each class of a piece goes.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * COLUMNS
    lane = tl.arange(0, PIECE)
    mask = lane < tl.load(row + 1)
    u = tl.load(places + tl.load(row) + lane, mask=mask, other=0)
    offset, _n = unit_offsets(tl.load(row + 2), u, num_units, cols, tile_rows, tile_cols, FLAT)
    old = tl.load(data + offset, mask=mask, other=0).to(tl.uint32)
    number = class_of(old, class_shift, class_base, UNIT_BYTES)
    start = tl.load(starts + piece * 16 + number, mask=mask, other=0)
    tl.store(positions + start + class_ranks(number, mask), u, mask=mask)


@triton.jit
def step_kernel(
    data,
    body,
    pieces,
    positions,
    v,
    flips,
    offsets,
    fresh,
    digests,
    counts,
    column_keys,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    PIECE: tl.constexpr,
):
    """New units of a piece of changes, what they add to the digest, and how many really differ.

    0: first change, 1: number, 2: block, 3: bit of the first neg.
    """
    piece = tl.program_id(0).to(tl.int64)
    row = pieces + piece * COLUMNS
    lane = tl.arange(0, PIECE).to(tl.int64)
    mask = lane < tl.load(row + 1)
    at = tl.load(row) + lane
    u = tl.load(positions + at, mask=mask, other=0)
    offset, _n = unit_offsets(tl.load(row + 2), u, num_units, cols, tile_rows, tile_cols, FLAT)
    old = tl.load(data + offset, mask=mask, other=0).to(tl.uint32)
    neg = load_bits(body, tl.load(row + 3) + lane, 1, mask) != 0
    size = tl.load(v + at, mask=mask, other=0).to(tl.int64) + 1
    half = tl.full((), 1 << (8 * UNIT_BYTES - 1), tl.int64)
    moved = magnitude(old, UNIT_BYTES).to(tl.int64) + tl.where(neg, -size, size)
    flip = tl.load(flips + at, mask=mask, other=0).to(tl.int64) & 1
    turned = (old.to(tl.int64) & half) ^ (flip * half)
    unit = turned | (moved & (half - 1))
    tl.store(offsets + at, offset, mask=mask)
    tl.store(fresh + at, unit.to(fresh.dtype.element_ty), mask=mask)
    difference = unit - old.to(tl.int64)
    high = tl.sum(digest_terms(offset, difference, mask, column_keys, 0, UNIT_BYTES), 0)
    low = tl.sum(digest_terms(offset, difference, mask, column_keys, 1, UNIT_BYTES), 0)
    tl.store(digests + piece * 2, high.to(tl.int64))
    tl.store(digests + piece * 2 + 1, low.to(tl.int64))
    tl.store(counts + piece, tl.sum((mask & (difference != 0)).to(tl.int64), 0))


@triton.jit
def compare_block_kernel(
    data,
    fresh,
    digests,
    counts,
    column_keys,
    block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """What the units of a dense or raw block change in the digest, and how many really differ."""
    tile = tl.program_id(0)
    u = tile * TILE + tl.arange(0, TILE)
    wide = tl.full((), 0, tl.int64) + block
    offset, n = unit_offsets(wide, u, num_units, cols, tile_rows, tile_cols, FLAT)
    mask = u < n
    old = tl.load(data + offset, mask=mask, other=0).to(tl.int64)
    difference = tl.load(fresh + u, mask=mask, other=0).to(tl.int64) - old
    high = tl.sum(digest_terms(offset, difference, mask, column_keys, 0, UNIT_BYTES), 0)
    low = tl.sum(digest_terms(offset, difference, mask, column_keys, 1, UNIT_BYTES), 0)
    tl.store(digests + tile * 2, high.to(tl.int64))
    tl.store(digests + tile * 2 + 1, low.to(tl.int64))
    tl.store(counts + tile, tl.sum((difference != 0).to(tl.int64), 0))


@triton.jit
def write_block_kernel(
    data,
    fresh,
    block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The units of a block from block order into the tensor."""
    u = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wide = tl.full((), 0, tl.int64) + block
    offset, n = unit_offsets(wide, u, num_units, cols, tile_rows, tile_cols, FLAT)
    mask = u < n
    tl.store(data + offset, tl.load(fresh + u, mask=mask, other=0), mask=mask)
