"""The Triton back end writes the bytes of CPU and reference, and refuses what they refuse."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from delta_cases import Case, apply, cases, encode
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gymfast.delta.backends import Backend, EncodedBlocks, select
from gymfast.delta.geometry import Geometry
from gymfast.errors import FormatError

# No shrinking: a kernel runs a thousand times slower here than on a device.
quick = settings(
    max_examples=18,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


@quick
@given(case=cases())
def test_class_params_and_digests_are_equal(reference, backend, case: Case) -> None:
    unit_bytes, geometry = case.geometry.unit_bytes, case.geometry
    expected = reference.class_params(case.base, unit_bytes)
    assert backend.class_params(case.base, unit_bytes) == expected
    digests = reference.digest_blocks(case.base, geometry, 1)
    assert np.array_equal(backend.digest_blocks(case.base, geometry, 1), digests)
    last = geometry.num_blocks - 1
    assert np.array_equal(backend.digest_blocks(case.base, geometry, 1, last, 1), digests[last:])


@quick
@given(case=cases(), update=st.booleans())
def test_encoded_bytes_are_equal(reference, cpu, backend, case: Case, update: bool) -> None:
    expected = encode(reference, case)
    assert encode(cpu, case).body == expected.body
    base, digests = case.base.copy(), cpu.digest_blocks(case.base, case.geometry, 1)
    args = (case.geometry, case.params(backend), digests, 0, case.geometry.num_blocks)
    found = backend.encode_blocks(base, case.new, *args, update=update, undo=update, threads=1)
    assert (found.body, found.num_changed) == (expected.body, expected.num_changed)
    assert np.array_equal(digests, cpu.digest_blocks(case.new, case.geometry, 1))
    assert np.array_equal(base, case.new if update else case.base)
    backend.rollback_blocks(base, found.undo, case.geometry)
    assert np.array_equal(base, case.base)


@quick
@given(case=cases())
def test_bodies_apply(cpu, backend, case: Case) -> None:
    expected = encode(cpu, case)
    if expected.body:
        data, num_changed = apply(backend, case, expected.body)
        assert np.array_equal(data, case.new)
        assert num_changed == expected.num_changed


@cache
def large_case(unit_bytes: int, density: float, profile: int) -> tuple[Case, EncodedBlocks]:
    """Two blocks with this share of small steps, and what the CPU makes of them."""
    rng = np.random.default_rng(unit_bytes)
    n = 12_001 if density < 0.5 else 6_001
    base = (rng.standard_normal(n) * 0.02).astype("<f4").view("<u4") >> (32 - 8 * unit_bytes)
    base = base.astype(f"<u{unit_bytes}")
    new = base.copy()
    where = rng.random(n) < density
    new[where] += rng.geometric(0.7, int(where.sum())).astype(base.dtype)
    geometry = Geometry(n, unit_bytes, n, 1, n - 2_001)
    case = Case(base.view(np.uint8), new.view(np.uint8), geometry, profile)
    return case, encode(select("cpu"), case)


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
@pytest.mark.parametrize("density", [0.0005, 0.004, 0.05, 0.6])
@pytest.mark.parametrize("profile", [0, 1, 2])
def test_large_blocks_are_equal(backend, unit_bytes: int, density: float, profile: int) -> None:
    case, expected = large_case(unit_bytes, density, profile)
    assert encode(backend, case).body == expected.body
    data, num_changed = apply(backend, case, expected.body)
    assert num_changed == expected.num_changed
    assert np.array_equal(data, case.new)


def apply_outcome(backend: Backend, case: Case, body: bytes) -> bytes | int:
    """The resulting bytes, or the number of the error; a refused body changes nothing."""
    data = case.base.copy()
    digests = select("cpu").digest_blocks(data, case.geometry, 1)
    before = digests.copy()
    args = (case.geometry, case.params(backend), digests, 0, case.geometry.num_blocks, 1)
    try:
        backend.apply_blocks(data, body, *args)
    except FormatError as error:
        assert np.array_equal(data, case.base)
        assert np.array_equal(digests, before)
        return error.number
    return data.tobytes()


@settings(quick, max_examples=40)
@given(case=cases(max_units=300), data=st.data())
def test_damaged_bodies_are_refused_by_both_or_by_none(reference, backend, case, data) -> None:
    body = bytearray(encode(reference, case).body)
    if not body:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from((0, 0, 0, 1, 2)))
    damaged = bytes(body[: len(body) - cut])
    found = apply_outcome(backend, case, damaged)
    expected = apply_outcome(reference, case, damaged)
    assert isinstance(found, int) == isinstance(expected, int)
    assert isinstance(found, int) or found == expected


@pytest.mark.parametrize("seed", range(6))
def test_one_damaged_byte_gets_the_number_that_the_reference_gives(
    reference, cpu, backend, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    numbers = set()
    for _ in range(25):
        unit_bytes, density = int(rng.choice((1, 2, 4))), rng.choice((0.02, 0.1, 0.4, 0.8))
        n = int(rng.integers(100, 200))
        base = rng.integers(0, 256**unit_bytes, n).astype(f"<u{unit_bytes}")
        new = np.where(rng.random(n) < density, base + base.dtype.type(1), base)
        case = Case(
            base.view(np.uint8),
            new.view(np.uint8),
            Geometry(n, unit_bytes, n, 1, n // 2 + 1),
            int(rng.integers(3)),
        )
        body = bytearray(encode(cpu, case).body)
        if not body:
            continue
        body[rng.integers(len(body))] ^= int(rng.integers(1, 256))
        found = apply_outcome(backend, case, bytes(body))
        assert found == apply_outcome(reference, case, bytes(body))
        numbers.add(found)
    assert len(numbers) > 2
