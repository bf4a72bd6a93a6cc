"""Sizes and offsets are 64-bit, and checked (I15)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from delta_frames import blocks, frame, header, row, tensor

from gymfast import _core
from gymfast.delta.backends import BlockParams, select
from gymfast.delta.backends.reference_digest import splitmix64
from gymfast.delta.geometry import MAX_BLOCK_UNITS, Geometry
from gymfast.errors import FormatError

ROOT = Path(__file__).parents[2]
EDGES = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**53 + 1, 2**58, 2**60]
EDGES += [2**10 * (2**31 - 1), 2**41, 2**42 - 2**10, 2**42, 2**42 + 2**10]  # of 2^10 a block


def geometries(n: int) -> Iterator[Geometry]:
    """Flat and tiled geometries of n units or a few less."""
    for tile_cols in (2**10, 1100, MAX_BLOCK_UNITS):
        yield Geometry(n, 1, n, 1, tile_cols)
    for cols, tile_rows, tile_cols in ((1, 2**10, 1), (2**10, 2**10, 2**10), (2**20, 1, 2**20 - 1)):
        yield Geometry(n // cols * cols, 1, cols, tile_rows, tile_cols)
    wide = n // 3
    yield Geometry(3 * wide, 1, wide, 2, 2**19)


@pytest.mark.parametrize("n", EDGES)
def test_I15_block_numbers_are_exact_at_every_width(parse, n: int) -> None:
    for g in geometries(n):
        last = g.num_blocks - 1
        tiles = (g.cols, g.tile_rows, g.tile_cols)
        for first, count, is_right in (
            (last, 1, True),
            (last + 1, 1, False),
            (last, 2, False),
            (1, last + 1, False),
            (last, 2**64 - last, False),
            (2**64 - 1, 1, False),
        ):
            parts = [
                header(),
                tensor("t", shape=(g.num_units,), num_bytes=g.num_units, tiles=tiles),
                blocks([(5, b"\1", 0)], first_block=first, num_blocks=count),
            ]
            data = frame(parts, [row(2, (0, 0))])
            if is_right:
                parse(data)
                continue
            with pytest.raises(FormatError) as caught:
                parse(data)
            assert caught.value.number == 50


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes", "number"),
    [
        ("U8", (2**61 - 1,), 2**61 - 1, 0),
        ("U8", (2**61,), 2**61, 31),  # 2^64 bits
        ("F64", (2**58 - 1,), 2**61 - 8, 0),
        ("F64", (2**58,), 2**61, 31),
        ("F4", (2**62 - 1,), 2**61, 0),
        ("F4", (2**62,), 2**61, 31),
        ("U8", (2**32, 2**32), 0, 31),
        ("U8", (2**31, 2**31), 2**62, 31),
        ("U8", (3, 5, 2**64 - 1), 0, 31),
        ("U8", (2**32, 2**29 - 1), 2**61 - 2**32, 0),
        ("U8", (8,), 8 + 2**32, 42),
        ("U8", (2**32 + 8,), 8, 42),
    ],
)
def test_I15_products_of_dims_are_checked_in_64_bits(parse, dtype, shape, num_bytes, number):
    unit_bytes = {"F64": 4}.get(dtype, 1)
    n = num_bytes // unit_bytes
    fields = {"dtype": dtype, "shape": shape, "num_bytes": num_bytes, "unit_bytes": unit_bytes}
    data = frame([header(), tensor("t", **fields, tiles=(n, 1, min(n, 2**20)))], [row(2, (0, 0))])
    if number == 0:
        parse(data)
        return
    with pytest.raises(FormatError) as caught:
        parse(data)
    assert caught.value.number == number


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 2**31, 2**32 + 1, 2**53, 2**63, 2**64 - 1])
@pytest.mark.parametrize("first_block", [0, 1, 3, 2**32, 2**63, 2**64 - 1])
def test_I15_block_ranges_of_native_calls_are_checked_without_a_wrap(
    first_block: int, num_blocks: int
) -> None:
    if first_block + num_blocks <= 2:
        return
    data, rows = np.zeros(8, np.uint8), np.zeros((2, 2), np.uint64)
    shape = (8, 1, 8, 1, 4)
    with pytest.raises(FormatError):
        _core.apply_blocks(
            data, b"\5\4\0\0\0\0abcd", *shape, 0, 0, True, rows, first_block, num_blocks, 1
        )
    span = (first_block, num_blocks, False, False, 1)
    with pytest.raises(FormatError):
        _core.encode_blocks(data, data + 1, *shape, 0, 0, 0, True, rows, *span)
    assert not data.any() and not rows.any()


LARGE = [
    Geometry(5 * 2**30 + 8, 1, 5 * 2**30 + 8, 1, 2**19),
    Geometry(2**32 + 2**20, 4, 2**32 + 2**20, 1, 2**20),  # unit numbers above 2^32 as well
    Geometry(3 * 2**31, 2, 2**16, 16, 2**12),
]


@pytest.mark.parametrize("geometry", LARGE, ids=["bytes", "units", "tiles"])
@pytest.mark.parametrize("profile", [0, 1, 2])
def test_I15_blocks_beyond_4_GiB_round_trip_and_have_the_digests_of_the_reference(
    geometry: Geometry, profile: int, tmp_path: Path
) -> None:
    old, new = (sparse(tmp_path / name, geometry.num_bytes) for name in ("old", "new"))
    far = geometry.num_blocks - 2
    assert first_byte(geometry, far) > 2**32
    rng = np.random.default_rng(profile)
    units = old.view(f"<u{geometry.unit_bytes}"), new.view(f"<u{geometry.unit_bytes}")
    span = spots(geometry, far, rng)
    values = rng.integers(1, 200, span.size).astype(units[0].dtype)
    units[0][span[::2]] = values[::2]
    units[1][span] = values
    cpu, reference = select("cpu"), select("reference")
    rows = {"old": cpu.digest_blocks(old, geometry, 2, far, 2)}
    rows["new"] = cpu.digest_blocks(new, geometry, 2, far, 2)
    for name, data in (("old", old), ("new", new)):
        assert np.array_equal(rows[name], reference.digest_blocks(data, geometry, 1, far, 2))
        assert sum(map(int, rows[name][:, 0])) % 2**64 == lane_of(data, span, geometry.unit_bytes)
    params = BlockParams(profile, 0, 3, True)
    bodies = []
    for backend in (cpu, reference):
        digests = np.zeros((geometry.num_blocks, 2), np.uint64)
        digests[far:] = rows["old"]
        coded = backend.encode_blocks(
            *(old, new, geometry, params, digests, far, 2), update=False, undo=False, threads=2
        )
        assert np.array_equal(digests[far:], rows["new"])
        assert coded.num_changed == np.unique(span[1::2]).size
        bodies.append(coded.body)
    assert bodies[0] == bodies[1]
    digests[far:] = rows["old"]
    assert cpu.apply_blocks(old, bodies[0], geometry, params, digests, far, 2, 2) > 0
    assert np.array_equal(digests[far:], rows["new"])
    assert np.array_equal(units[0][span], values)
    assert np.array_equal(cpu.digest_blocks(old, geometry, 2, far, 2), rows["new"])
    assert not digests[:far].any()


def sparse(path: Path, num_bytes: int) -> np.ndarray:
    """That many zeros in a file that takes no room."""
    with path.open("wb") as file:
        file.truncate(num_bytes)
    return np.memmap(path, np.uint8, "r+")


def first_byte(geometry: Geometry, block: int) -> int:
    row_start, _, col_start, _ = geometry.block_span(block)
    return (row_start * geometry.cols + col_start) * geometry.unit_bytes


def spots(geometry: Geometry, first: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct offsets of 400 units in the last two blocks, their corners among them."""
    found = []
    for block in (first, first + 1):
        row_start, row_end, col_start, col_end = geometry.block_span(block)
        at_row = [row_start, row_end - 1, *rng.integers(row_start, row_end, 200).tolist()]
        at_col = [col_start, col_end - 1, *rng.integers(col_start, col_end, 200).tolist()]
        found += [r * geometry.cols + c for r, c in zip(at_row, at_col, strict=True)]
    return np.unique(np.array(found, np.int64))


def lane_of(data: np.ndarray, units: np.ndarray, unit_bytes: int) -> int:
    """H[0] of a tensor whose other units are 0: section 2 of the format in Python's integers."""
    total = 0
    for word in {unit * unit_bytes // 4 for unit in units.tolist()}:
        value = int.from_bytes(data[4 * word : 4 * word + 4].tobytes(), "little")
        j, r = word & 1023, word >> 10
        key = int(splitmix64(np.array([j], np.uint64))[0]) >> 32 | 1
        row_key = int(splitmix64(np.array([2**63 + 2 * r], np.uint64))[0]) | 1
        total += key * row_key * value
    return total % 2**64


def test_I15_the_core_is_built_with_conversion_warnings_and_ci_makes_them_errors() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    core = re.search(r"foreach\(target ([^)]*)\)(.*?)endforeach", text, re.DOTALL)
    parts = [f"gymfast_{part}" for part in ("format", "cpu", "nccl", "shm", "sim")]
    assert core and core[1].split() == parts
    assert "-Wconversion" in core[2] and "gymfast_warnings" in core[2]
    assert re.search(r"gymfast_warnings .*WARNINGS_AS_ERRORS.*-Werror", text)
    assert "WARNINGS_AS_ERRORS=$(if $(CI),ON,OFF)" in (ROOT / "Makefile").read_text()
    listed = set(re.findall(r"csrc/\S+\.cpp", text))
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")}
    assert {file for file in files if "/format/" in file or "/cpu/" in file} <= listed


@pytest.mark.ci
@pytest.mark.parametrize(
    "file", [*sorted(path.name for path in (ROOT / "csrc/format").glob("*.cpp")), "codec.cpp"]
)
def test_I15_no_size_is_narrowed_without_a_word(file: str) -> None:
    path = next((ROOT / "csrc").rglob(file))
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
    command = ["c++", *flags, "-I", str(ROOT / "csrc"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
