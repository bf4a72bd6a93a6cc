"""Every CPU target writes the bytes that the reference writes, and refuses what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import numpy as np
import pytest
from delta_cases import Case, cases, encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymfast import _core
from gymfast.delta.backends import Backend, EncodedBlocks, select
from gymfast.delta.geometry import Geometry
from gymfast.errors import FormatError

quick = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def reference() -> Backend:
    return select("reference")


@pytest.fixture(params=_core.cpu_targets())
def cpu(request: pytest.FixtureRequest) -> Iterator[Backend]:
    _core.force_cpu_target(request.param)
    yield select("cpu")
    _core.force_cpu_target(None)


@quick
@given(case=cases())
def test_class_params_and_digests_are_equal(reference, cpu, case: Case) -> None:
    unit_bytes = case.geometry.unit_bytes
    assert cpu.class_params(case.base, unit_bytes) == reference.class_params(case.base, unit_bytes)
    expected = reference.digest_blocks(case.base, case.geometry, 1)
    for threads in (1, 3):
        assert np.array_equal(cpu.digest_blocks(case.base, case.geometry, threads), expected)


@quick
@given(case=cases(), threads=st.sampled_from((1, 3)), update=st.booleans())
def test_encoded_bytes_are_equal(reference, cpu, case: Case, threads: int, update: bool) -> None:
    expected = encode(reference, case)
    digests = cpu.digest_blocks(case.base, case.geometry, 1)
    after = cpu.digest_blocks(case.new, case.geometry, 1)
    found = cpu.encode_blocks(
        case.base,
        case.new,
        case.geometry,
        case.params(cpu),
        digests,
        0,
        case.geometry.num_blocks,
        update=update,
        undo=update,
        threads=threads,
    )
    assert (found.body, found.num_changed) == (expected.body, expected.num_changed)
    assert np.array_equal(digests, after)


@cache
def large_case(unit_bytes: int, density: float, profile: int) -> tuple[Case, EncodedBlocks]:
    """Two blocks with this share of small steps, and what the reference makes of them."""
    rng = np.random.default_rng(unit_bytes)
    n = 150_001
    base = (rng.standard_normal(n) * 0.02).astype("<f4").view("<u4") >> (32 - 8 * unit_bytes)
    base = base.astype(f"<u{unit_bytes}")
    new = base.copy()
    where = rng.random(n) < density
    new[where] += rng.geometric(0.7, int(where.sum())).astype(base.dtype)
    geometry = Geometry(n, unit_bytes, n, 1, 2**17)
    case = Case(base.view(np.uint8), new.view(np.uint8), geometry, profile)
    return case, encode(select("reference"), case)


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
@pytest.mark.parametrize("density", [0.0005, 0.004, 0.05, 0.6])
@pytest.mark.parametrize("profile", [0, 1, 2])
def test_large_blocks_are_equal(cpu, unit_bytes: int, density: float, profile: int) -> None:
    case, expected = large_case(unit_bytes, density, profile)
    assert encode(cpu, case).body == expected.body
    data = case.base.copy()
    digests = cpu.digest_blocks(data, case.geometry, 2)
    args = (case.geometry, case.params(cpu), digests, 0, case.geometry.num_blocks, 2)
    assert cpu.apply_blocks(data, expected.body, *args) == expected.num_changed
    assert np.array_equal(data, case.new)


@cache
def changing_case(unit_bytes: int) -> tuple[Case, EncodedBlocks]:
    """Profile auto over blocks that need ranks (few changes), need none, or did not change."""
    rng = np.random.default_rng(unit_bytes)
    block = 8192
    counts = [3, 5, 900, 2, 0, 4, 3000, 0, 900, 700, 1]
    base = (rng.standard_normal(block * len(counts)) * 0.02).astype("<f4").view("<u4")
    base = (base >> (32 - 8 * unit_bytes)).astype(f"<u{unit_bytes}")
    new = base.copy()
    for i, count in enumerate(counts):
        new[i * block + rng.choice(block, count, replace=False)] += 1
    geometry = Geometry(base.size, unit_bytes, base.size, 1, block)
    case = Case(base.view(np.uint8), new.view(np.uint8), geometry, 0)
    return case, encode(select("reference"), case)


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("start", [0, 2])
def test_auto_does_not_depend_on_the_blocks_before(cpu, unit_bytes, update, start) -> None:
    case, expected = changing_case(unit_bytes)
    for first in (start, 0, start):  # scratch memory remembers what the last block was like
        base, digests = case.base.copy(), cpu.digest_blocks(case.base, case.geometry, 1)
        count = case.geometry.num_blocks - first
        args = (case.new, case.geometry, case.params(cpu), digests)
        found = cpu.encode_blocks(base, *args, first, count, update=update, undo=update, threads=1)
        if first == 0:
            assert found.body == expected.body
        begin = first * 8192 * unit_bytes
        assert np.array_equal(base[begin:], (case.new if update else case.base)[begin:])
        cpu.rollback_blocks(base, found.undo, case.geometry)
        assert np.array_equal(base, case.base)


def apply_outcome(backend: Backend, case: Case, body: bytes) -> bytes | None:
    """The resulting bytes, or None if the body was refused."""
    data = case.base.copy()
    digests = backend.digest_blocks(data, case.geometry, 1)
    args = (case.geometry, case.params(backend), digests, 0, case.geometry.num_blocks, 1)
    with suppress(FormatError):
        backend.apply_blocks(data, body, *args)
        return data.tobytes()
    return None


@quick
@given(case=cases(max_units=300), data=st.data())
def test_damaged_bodies_are_refused_by_both_or_by_none(reference, cpu, case, data) -> None:
    body = bytearray(encode(reference, case).body)
    if not body:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from((0, 0, 0, 1, 2)))
    damaged = bytes(body[: len(body) - cut])
    assert apply_outcome(cpu, case, damaged) == apply_outcome(reference, case, damaged)
