"""Triton kernels that read a whole tensor: partial digests, samples for the class parameters."""

from __future__ import annotations

import triton
import triton.language as tl

from gymfast.delta.backends.triton_kernels_units import digest_terms, row_key, unit_offsets


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
