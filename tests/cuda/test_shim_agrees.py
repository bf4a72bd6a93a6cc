"""The CUDA kernels, on the CPU, write the bytes of the CPU codec and refuse what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_cases import PROFILES, ends_alike, large_case, many_blocks, outcome
from cuda_shim import ShimBackend
from delta_cases import Case, apply, case_of, cases, encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymfast.delta.backends import Backend, select
from gymfast.delta.geometry import Geometry
from gymfast.errors import FormatError

quick = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(params=[False, True], ids=["ascending", "descending"])
def any_order(request: pytest.FixtureRequest, shim: ShimBackend) -> ShimBackend:
    """The shim, whose threads take turns upwards or downwards."""
    shim.library.shim_set_descending(int(request.param))
    yield shim
    shim.library.shim_set_descending(0)


@pytest.fixture
def cpu() -> Backend:
    return select("cpu")


@quick
@given(case=cases(), shift=st.integers(0, 16))
def test_digests_are_equal(any_order, cpu, case: Case, shift: int) -> None:
    expected = cpu.digest_blocks(case.base, case.geometry, 1)
    shifted = any_order.shifted(shift)
    assert np.array_equal(shifted.digest_blocks(case.base, case.geometry, 1), expected)


@quick
@given(case=cases(), update=st.booleans(), shift=st.integers(0, 16))
def test_encoded_bytes_are_equal(any_order, cpu, case: Case, update: bool, shift: int) -> None:
    expected = encode(cpu, case)
    base, digests = case.base.copy(), cpu.digest_blocks(case.base, case.geometry, 1)
    found = any_order.shifted(shift).encode_blocks(
        base,
        case.new,
        case.geometry,
        case.params(cpu),
        digests,
        0,
        case.geometry.num_blocks,
        update=update,
        undo=False,
        threads=1,
    )
    assert (found.body, found.num_changed) == (expected.body, expected.num_changed)
    assert np.array_equal(digests, cpu.digest_blocks(case.new, case.geometry, 1))
    assert np.array_equal(base, case.new if update else case.base)


@quick
@given(case=cases(), shift=st.integers(0, 16))
def test_applied_tensors_are_equal(any_order, cpu, case: Case, shift: int) -> None:
    encoded = encode(cpu, case)
    if not encoded.body:
        return
    data, num_changed = apply(any_order.shifted(shift), case, encoded.body)
    assert np.array_equal(data, case.new)
    assert num_changed == case.num_changed()


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
def test_the_reference_writes_the_same_bytes_too(shim, unit_bytes: int) -> None:
    rng = np.random.default_rng(unit_bytes)
    base = (rng.standard_normal(5000) * 0.02).astype("<f4").view("<u4") >> (32 - 8 * unit_bytes)
    new = base + (rng.random(base.size) < 0.03)
    for profile in PROFILES.values():
        case = case_of(base, new, unit_bytes, profile=profile)
        assert encode(shim, case).body == encode(select("reference"), case).body


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
@pytest.mark.parametrize("density", [0.0005, 0.004, 0.05, 0.6])
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_large_blocks_are_equal(shim, cpu, unit_bytes: int, density: float, profile: int) -> None:
    case = large_case(unit_bytes, density, profile)
    expected = encode(cpu, case)
    assert encode(shim, case).body == expected.body
    assert np.array_equal(apply(shim, case, expected.body)[0], case.new)


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_new_tensors_have_no_base(shim, cpu, unit_bytes: int, profile: int) -> None:
    case = large_case(unit_bytes, 0.05, profile)
    geometry = Geometry(150_001, unit_bytes, 150_001, 1, 40_000)
    fields = {"base": np.zeros_like(case.base), "geometry": geometry, "has_base": False}
    case = replace(case, **fields)
    expected = encode(cpu, case)
    assert encode(shim, case).body == expected.body
    assert np.array_equal(apply(shim, case, expected.body)[0], case.new)


@pytest.mark.parametrize("per_section", [1, 3, 4, 40])
def test_many_sections_of_one_call_are_those_of_many_calls(shim, cpu, per_section: int) -> None:
    case = many_blocks()
    digests, params = cpu.digest_blocks(case.base, case.geometry, 1), case.params(cpu)
    first, count = 2, 37
    mine, theirs = digests.copy(), digests.copy()
    found = shim.encode_sections(
        case.base,
        case.new,
        case.geometry,
        params,
        mine,
        first,
        count,
        update=False,
        blocks_per_section=per_section,
    )
    at = 0
    for block, num_blocks, offset, size, num_changed in found.sections.astype(int):
        run = (case.base, case.new, case.geometry, params, theirs, block, num_blocks)
        one = cpu.encode_blocks(*run, update=False, undo=False, threads=1)
        assert offset == at
        assert found.body[offset : offset + size] == one.body
        assert num_changed == one.num_changed
        at += size
    assert np.array_equal(mine, theirs)
    data = case.base.copy()
    sections = found.sections[found.sections[:, 3] > 0]
    run = (case.geometry, params, digests, first, count)
    changed = shim.apply_sections(data, found.body, *run, sections)
    assert changed == found.sections[:, 4].sum()
    assert np.array_equal(data[4000:78000], case.new[4000:78000])
    assert np.array_equal(digests, theirs)


def test_a_section_with_a_bad_table_changes_nothing_but_the_others_do(shim, cpu) -> None:
    case = many_blocks()
    digests, params = cpu.digest_blocks(case.base, case.geometry, 1), case.params(cpu)
    run = (case.base, case.new, case.geometry, params, digests.copy(), 0, 16)
    found = shim.encode_sections(*run, update=False, blocks_per_section=8)
    body = bytearray(found.body)
    body[int(found.sections[0, 2])] = 6
    data, rows = case.base.copy(), digests.copy()
    with pytest.raises(FormatError) as caught:
        shim.apply_sections(data, bytes(body), case.geometry, params, rows, 0, 16, found.sections)
    assert caught.value.number == 51
    assert np.array_equal(data[:16000], case.base[:16000])
    assert np.array_equal(data[16000:32000], case.new[16000:32000])
    assert np.array_equal(rows[:8], digests[:8])


@settings(quick, max_examples=400)
@given(case=cases(max_units=300), data=st.data())
def test_damaged_bodies_end_alike(any_order, cpu, case, data) -> None:
    body = bytearray(encode(cpu, case).body)
    if not body:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from((0, 0, 0, 1, 2)))
    damaged = bytes(body[: len(body) - cut])
    assert ends_alike(outcome(any_order, case, damaged), outcome(cpu, case, damaged))


BAD = {
    "profile": {"profile": 3},
    "class_shift": {"class_shift": 8},
    "class_base": {"class_base": 256},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD)
def test_parameters_out_of_range_are_refused_before_any_launch(shim, cpu, fields) -> None:
    case = many_blocks()
    params = replace(case.params(cpu), **fields)
    digests = cpu.digest_blocks(case.base, case.geometry, 1)
    with pytest.raises(ValueError, match=r"profile is 0\.\.2"):
        shim.encode_blocks(
            case.base,
            case.new,
            case.geometry,
            params,
            digests,
            0,
            1,
            update=False,
            undo=False,
            threads=1,
        )


def test_tensors_off_their_units_are_refused(shim) -> None:
    case = many_blocks()
    crooked = replace(shim, shift=0.5)
    with pytest.raises(ValueError, match="not aligned to its units"):
        crooked.digest_blocks(case.base, case.geometry, 1)
