"""Section 2 of docs/wire-format.md: the digest, against plain integers and against itself."""

from __future__ import annotations

import numpy as np
import pytest
from delta_cases import cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymfast import _core
from gymfast.delta.backends import Backend
from gymfast.delta.backends.reference_digest import digest_bytes, fold32, fold64
from gymfast.delta.geometry import Geometry

MASK = 2**64 - 1
quick = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def plain_digest(data: bytes) -> tuple[int, int]:
    """The formula of section 2, word by word."""
    data += bytes(-len(data) % 4)
    lanes = [0, 0]
    for i in range(len(data) // 4):
        word = int.from_bytes(data[4 * i : 4 * i + 4], "little")
        for lane in (0, 1):
            column = splitmix64(1024 * lane + (i & 1023)) >> 32 | 1
            row = splitmix64(2**63 + 2 * (i >> 10) + lane) | 1
            lanes[lane] = (lanes[lane] + row * column * word) & MASK
    return lanes[0], lanes[1]


def flat(num_bytes: int, unit_bytes: int, tile_cols: int) -> Geometry:
    n = num_bytes // unit_bytes
    return Geometry(n, unit_bytes, n, 1, min(n, tile_cols))


@quick
@given(data=st.binary(max_size=9000))
def test_digest_of_bytes_is_the_formula(data: bytes) -> None:
    assert digest_bytes(np.frombuffer(data, np.uint8)) == plain_digest(data)


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
def test_digest_of_blocks_sums_to_the_formula(backend: Backend, unit_bytes: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 12000, dtype=np.uint8)
    for tile_cols in (7, 1000, 2**20):
        geometry = flat(data.size, unit_bytes, tile_cols)
        digests = backend.digest_blocks(data, geometry, 1)
        assert digests.shape == (geometry.num_blocks, 2)
        assert tuple(map(int, digests.sum(axis=0))) == plain_digest(data.tobytes())


@quick
@given(case=cases())
def test_digest_of_a_tensor_does_not_depend_on_its_blocks(backend: Backend, case) -> None:
    whole = digest_bytes(case.base)
    digests = backend.digest_blocks(case.base, case.geometry, 1)
    assert tuple(map(int, digests.sum(axis=0, dtype=np.uint64))) == whole


@quick
@given(case=cases(max_units=500), data=st.data())
def test_a_range_of_blocks_has_the_digests_of_the_whole(backend: Backend, case, data) -> None:
    geometry = case.geometry
    first = data.draw(st.integers(0, geometry.num_blocks - 1))
    count = data.draw(st.integers(0, geometry.num_blocks - first))
    digests = backend.digest_blocks(case.base, geometry, 1)
    part = backend.digest_blocks(case.base, geometry, 1, first, count)
    assert np.array_equal(part, digests[first : first + count])


@pytest.mark.parametrize(
    ("first", "count"), [(0, 3), (1, 2), (3, 0), (0, 2**40), (2, 2**62), (2**62, 1), (2**63, -1)]
)
def test_a_range_that_the_tensor_does_not_have_is_refused_before_any_memory_is_asked_for(
    first: int, count: int
) -> None:
    with pytest.raises(ValueError, match=f"{first} of a tensor of 2"):
        _core.digest_blocks(np.zeros(8, np.uint8), 8, 1, 8, 1, 4, 1, first, count)


@quick
@given(parts=st.lists(st.binary(max_size=40), max_size=6))
def test_check64_is_that_of_the_concatenation(backend: Backend, parts: list[bytes]) -> None:
    assert backend.check64(*parts) == fold64(*plain_digest(b"".join(parts)))


def test_check64_takes_any_buffer_and_long_ones(backend: Backend) -> None:
    data = np.random.default_rng(2).integers(0, 256, 5_000_001, dtype=np.uint8)
    raw = data.tobytes()
    expected = fold64(*digest_bytes(data))
    assert backend.check64(raw) == expected
    assert backend.check64(memoryview(raw)[:3], bytearray(raw[3:])) == expected


def test_every_bit_of_a_word_counts_and_so_does_its_place(backend: Backend) -> None:
    seen = {backend.check64(bytes(8192))}
    assert seen == {0}
    for at in (0, 1, 2, 3, 4095, 4096, 8191):
        for bit in range(8):
            data = bytearray(8192)
            data[at] = 1 << bit
            seen.add(backend.check64(data))
    assert len(seen) == 57


def test_folds_of_known_digests() -> None:
    assert fold64(1, 0) == 1
    assert fold64(0, 1) == 2**32
    assert fold64(0, 2**32) == 1
    assert fold32(2**32, 0) == 1
    assert fold32(0xFFFFFFFF00000000, 0) == 0xFFFFFFFF
