"""Section 4 of docs/wire-format.md: which blocks a writer cuts."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gymfast.delta.backends.reference_digest import block_units as units_of_block
from gymfast.delta.geometry import (
    DTYPE_BITS,
    MAX_BLOCK_UNITS,
    Geometry,
    num_bytes_of,
    plan_geometry,
    unit_bytes_of,
)

SHAPES = st.lists(st.integers(0, 70), max_size=4).map(tuple)


@given(
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
    shape=SHAPES,
    block_units=st.integers(1, 5000),
    tiled=st.booleans(),
)
def test_blocks_cover_every_unit_once(dtype, shape, block_units, tiled) -> None:
    geometry = plan_geometry(dtype, shape, block_units=block_units, tiled=tiled)
    assert geometry.num_bytes == num_bytes_of(dtype, shape)
    if geometry.num_units > 20_000 or geometry.num_blocks > 2000:
        return
    units = [u for b in range(geometry.num_blocks) for u in units_of_block(geometry, b).tolist()]
    assert sorted(units) == list(range(geometry.num_units))


SIZES = st.integers(1, 5000) | st.integers(1, 2**19) | st.integers(1, 2**15).map(lambda k: 16 * k)


@given(
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
    shape=st.lists(SIZES, max_size=3).map(tuple),
    block_units=st.just(2**19) | st.integers(1, 2**20),
    tiled=st.booleans(),
)
@example(dtype="BF16", shape=(16 * 1_000_003, 16), block_units=2**19, tiled=True)
@example(dtype="BF16", shape=(16 * 9491, 4096), block_units=2**19, tiled=True)
@example(dtype="U8", shape=(2**20, 16), block_units=2**19, tiled=True)
@example(dtype="U8", shape=(2**40 + 1,), block_units=1, tiled=False)
@example(dtype="F32", shape=(2**20, 1), block_units=1024, tiled=True)
def test_no_writer_cuts_more_blocks_than_a_reader_takes(dtype, shape, block_units, tiled) -> None:
    geometry = plan_geometry(dtype, shape, block_units=block_units, tiled=tiled)
    most = 4096 + geometry.num_units // 1024
    assert geometry.num_blocks <= most == geometry.max_blocks
    if not tiled and block_units >= 2**14:
        assert geometry.num_blocks <= most // 15


def test_tiles_too_small_for_their_number_become_flat_blocks() -> None:
    assert plan_geometry("BF16", (16 * 9491, 4096), tiled=True).tile_cols == 2**19
    assert plan_geometry("BF16", (16 * 9496, 4096), tiled=True).tile_cols == 256
    assert plan_geometry("U8", (10_000_000,), block_units=10).tile_cols == 722


def test_flat_is_the_default() -> None:
    assert plan_geometry("BF16", (1024, 4096)) == Geometry(2**22, 2, 2**22, 1, 2**19)
    assert plan_geometry("F32", ()) == Geometry(1, 4, 1, 1, 1)


def test_tiles_are_a_sixteenth_of_the_columns_and_divide_a_sixteenth_of_the_rows() -> None:
    assert plan_geometry("BF16", (1024, 4096), tiled=True) == Geometry(2**22, 2, 4096, 64, 256)
    geometry = plan_geometry("BF16", (16 * 6, 32), block_units=10, tiled=True)
    assert (geometry.cols, geometry.tile_rows, geometry.tile_cols) == (32, 3, 2)


def test_a_64_bit_element_is_two_units_of_a_row() -> None:
    assert plan_geometry("F64", (32, 16), tiled=True).cols == 32


def test_leading_dimensions_are_rows() -> None:
    assert plan_geometry("U8", (4, 8, 32), tiled=True).cols == 32


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("BF16", (32,)),
        ("BF16", (32, 17)),
        ("BF16", (17, 32)),
        ("F4", (32, 32)),
        ("F6_E2M3", (32, 32)),
        ("U8", (16, 16 * (2**20 + 1))),
    ],
)
def test_a_tensor_that_does_not_divide_is_flat(dtype, shape) -> None:
    geometry = plan_geometry(dtype, shape, tiled=True)
    assert geometry.cols == geometry.num_units
    assert geometry.tile_rows == 1


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 16, 16)])
def test_an_empty_tensor_has_no_blocks(shape) -> None:
    geometry = plan_geometry("F32", shape, tiled=True)
    assert geometry == Geometry(0, 4, 0, 0, 0)
    assert geometry.num_blocks == 0


@pytest.mark.parametrize(("dtype", "bits"), sorted(DTYPE_BITS.items()))
def test_units_are_1_2_or_4_bytes(dtype, bits) -> None:
    assert unit_bytes_of(dtype) == {4: 1, 6: 1, 8: 1, 16: 2, 32: 4, 64: 4}[bits]
    assert num_bytes_of(dtype, (3, 5)) == math.ceil(15 * bits / 8)


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype"):
        plan_geometry("BF17", (1,))
    with pytest.raises(ValueError, match="negative"):
        plan_geometry("BF16", (-1,))
    with pytest.raises(ValueError, match="2\\^62"):
        plan_geometry("U8", (2**62 + 1,))
    for size in (0, MAX_BLOCK_UNITS + 1):
        with pytest.raises(ValueError, match="block_units"):
            plan_geometry("BF16", (1,), block_units=size)
    with pytest.raises(ValueError, match="block 1"):
        Geometry(1, 1, 1, 1, 1).block_span(1)
