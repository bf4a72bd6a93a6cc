"""Triton kernels of mode dense: symbols, indices and rests (docs/wire-format.md section 6)."""

from __future__ import annotations

import triton
import triton.language as tl

from gymfast.delta.backends.triton_kernels_units import unit_offsets


@triton.jit
def symbol_of(x, UNIT_BYTES: tl.constexpr):
    """sym(x), int32; x is uint32."""
    SHIFT: tl.constexpr = 7 if UNIT_BYTES == 2 else 23
    return ((x >> SHIFT) & 255).to(tl.int32)


@triton.jit
def symbol_kernel(
    base,
    new,
    symbols,
    counts,
    block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    USE_BASE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Symbols of one tile of a block, int32, and how often each occurs in it, [256]."""
    tile = tl.program_id(0)
    u = tile * TILE + tl.arange(0, TILE)
    wide = tl.full((), 0, tl.int64) + block
    offset, n = unit_offsets(wide, u, num_units, cols, tile_rows, tile_cols, FLAT)
    mask = u < n
    symbol = symbol_of(tl.load(new + offset, mask=mask, other=0).to(tl.uint32), UNIT_BYTES)
    if USE_BASE:
        old = tl.load(base + offset, mask=mask, other=0).to(tl.uint32)
        symbol = (symbol - symbol_of(old, UNIT_BYTES)) & 255
    tl.store(symbols + u, symbol, mask=mask)
    tl.store(counts + tile * 256 + tl.arange(0, 256), tl.histogram(symbol, 256, mask=mask))


@triton.jit
def index_kernel(symbols, index_of, count, TILE: tl.constexpr):
    """Symbols replaced by their place in the list of symbols."""
    u = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = u < count
    symbol = tl.load(symbols + u, mask=mask, other=0)
    tl.store(symbols + u, tl.load(index_of + symbol, mask=mask, other=0), mask=mask)


@triton.jit
def rest_kernel(
    new,
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
    """rest(x) of one tile as bytes: part P of a dense payload."""
    u = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wide = tl.full((), 0, tl.int64) + block
    offset, n = unit_offsets(wide, u, num_units, cols, tile_rows, tile_cols, FLAT)
    mask = u < n
    x = tl.load(new + offset, mask=mask, other=0).to(tl.uint32)
    LOW: tl.constexpr = 7 if UNIT_BYTES == 2 else 23
    rest = ((x >> (8 * UNIT_BYTES - 1)) << LOW) | (x & ((1 << LOW) - 1))
    to = out + out_start + u.to(tl.int64) * (UNIT_BYTES - 1)
    for part in tl.static_range(UNIT_BYTES - 1):
        tl.store(to + part, ((rest >> (8 * part)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def join_kernel(
    base,
    indices,
    listed,
    rests,
    fresh,
    block,
    num_units,
    cols,
    tile_rows,
    tile_cols,
    UNIT_BYTES: tl.constexpr,
    FLAT: tl.constexpr,
    USE_BASE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The new units of one tile of a dense payload in block order, int64 indices below 256."""
    u = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wide = tl.full((), 0, tl.int64) + block
    offset, n = unit_offsets(wide, u, num_units, cols, tile_rows, tile_cols, FLAT)
    mask = u < n
    index = tl.load(indices + u, mask=mask, other=0) & 255
    symbol = tl.load(listed + index, mask=mask, other=0).to(tl.int32)
    if USE_BASE:
        old = tl.load(base + offset, mask=mask, other=0).to(tl.uint32)
        symbol = (symbol + symbol_of(old, UNIT_BYTES)) & 255
    LOW: tl.constexpr = 7 if UNIT_BYTES == 2 else 23
    rest = tl.zeros((TILE,), tl.uint32)
    for part in tl.static_range(UNIT_BYTES - 1):
        at = u.to(tl.int64) * (UNIT_BYTES - 1) + part
        rest = rest | (tl.load(rests + at, mask=mask, other=0).to(tl.uint32) << (8 * part))
    unit = ((rest >> LOW) << (8 * UNIT_BYTES - 1)) | (symbol.to(tl.uint32) << LOW)
    unit = unit | (rest & ((1 << LOW) - 1))
    tl.store(fresh + u, unit.to(fresh.dtype.element_ty), mask=mask)
