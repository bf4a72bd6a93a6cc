"""What a back end encodes, it applies exactly: any bits, density, unit size, profile and block."""

from __future__ import annotations

import itertools
from contextlib import suppress

import numpy as np
import pytest
from delta_cases import Case, apply, case_of, cases, encode
from hypothesis import HealthCheck, given, settings

from gymfast.delta.backends import Backend
from gymfast.delta.frame_fields import read_block_table
from gymfast.delta.geometry import Geometry
from gymfast.delta.records import Mode
from gymfast.errors import FormatError

WORDS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7F800000, 0x7F800001)
WORDS += (0x7FC00000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFF800000, 0xFFFFFFFE, 0xFFFFFFFF)
quick = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def modes_of(case: Case, body: bytes) -> list[Mode]:
    geometry = case.geometry
    return read_block_table(body, geometry.num_blocks, geometry.unit_bytes, where="test").modes


def assert_round_trip(backend: Backend, case: Case) -> None:
    encoded = encode(backend, case)
    assert encoded.num_changed == case.num_changed()
    if encoded.num_changed == 0:
        assert encoded.body == b""
        return
    data, num_changed = apply(backend, case, encoded.body)
    assert np.array_equal(data, case.new)
    assert num_changed == encoded.num_changed


@quick
@given(case=cases())
def test_what_was_encoded_is_applied_exactly(backend: Backend, case: Case) -> None:
    assert_round_trip(backend, case)


@quick
@given(case=cases())
def test_a_body_is_never_much_larger_than_the_raw_blocks(backend: Backend, case: Case) -> None:
    table_bytes = 10 * case.geometry.num_blocks
    assert len(encode(backend, case).body) <= case.geometry.num_bytes + table_bytes


@quick
@given(case=cases())
def test_update_and_rollback_are_exact_inverses(backend: Backend, case: Case) -> None:
    before, digests = case.base.copy(), backend.digest_blocks(case.base, case.geometry, 1)
    encoded = backend.encode_blocks(
        case.base,
        case.new,
        case.geometry,
        case.params(backend),
        digests,
        0,
        case.geometry.num_blocks,
        update=True,
        undo=True,
        threads=1,
    )
    assert np.array_equal(case.base, case.new)
    assert np.array_equal(digests, backend.digest_blocks(case.new, case.geometry, 1))
    backend.rollback_blocks(case.base, encoded.undo, case.geometry)
    assert np.array_equal(case.base, before)


@quick
@given(case=cases(max_units=400))
def test_sections_of_single_blocks_hold_what_one_section_holds(
    backend: Backend, case: Case
) -> None:
    digests = backend.digest_blocks(case.base, case.geometry, 1)
    receiver, receiver_digests = case.base.copy(), digests.copy()
    params, parts = case.params(backend), []
    for block in range(case.geometry.num_blocks):
        encoded = backend.encode_blocks(
            case.base,
            case.new,
            case.geometry,
            params,
            digests,
            block,
            1,
            update=False,
            undo=False,
            threads=1,
        )
        parts.append(encoded)
        if encoded.body:
            backend.apply_blocks(
                receiver, encoded.body, case.geometry, params, receiver_digests, block, 1, 1
            )
    assert np.array_equal(receiver, case.new)
    assert np.array_equal(receiver_digests, digests)
    whole = encode(backend, case)
    assert whole.num_changed == sum(part.num_changed for part in parts)
    if whole.num_changed:
        tables = [
            read_block_table(part.body, 1, case.geometry.unit_bytes, where="test")
            for part in parts
            if part.body
        ]
        payloads = b"".join(bytes(table.payloads) for table in tables)
        assert whole.body.endswith(payloads)


@pytest.mark.parametrize("profile", [0, 1, 2])
def test_every_byte_becomes_every_byte(backend: Backend, profile: int) -> None:
    base, new = np.divmod(np.arange(65536), 256)
    assert_round_trip(backend, case_of(base, new, 1, profile=profile))


@pytest.mark.parametrize("profile", [0, 1, 2])
def test_every_16_bit_pattern_survives(backend: Backend, profile: int) -> None:
    patterns = np.arange(65536)
    for base in (patterns[::-1], np.roll(patterns, 1), np.full(65536, 0x3F80)):
        assert_round_trip(backend, case_of(base, patterns, 2, profile=profile))


@pytest.mark.parametrize("profile", [0, 1, 2])
def test_edge_patterns_of_32_bits_survive(backend: Backend, profile: int) -> None:
    base, new = zip(*itertools.product(WORDS, WORDS), strict=True)
    assert_round_trip(backend, case_of(base, new, 4, profile=profile))


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
@pytest.mark.parametrize("profile", [0, 1, 2])
def test_single_changes_at_block_edges_survive(
    backend: Backend, unit_bytes: int, profile: int
) -> None:
    geometry = Geometry(24 * 30, unit_bytes, 30, 7, 8)
    for block in range(geometry.num_blocks):
        row, row_end, col, col_end = geometry.block_span(block)
        base = np.full((24, 30), 0x35, f"<u{unit_bytes}")
        new = base.copy()
        for at in {(row, col), (row, col_end - 1), (row_end - 1, col), (row_end - 1, col_end - 1)}:
            new[at] += 1
        flat = (base.ravel().view(np.uint8), new.ravel().view(np.uint8))
        case = Case(*flat, geometry, profile)
        assert_round_trip(backend, case)
        changed = [
            mode is not Mode.UNCHANGED for mode in modes_of(case, encode(backend, case).body)
        ]
        assert changed == [i == block for i in range(geometry.num_blocks)]


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
@pytest.mark.parametrize("num_units", [1, 2, 3, 7, 8, 9, 1023, 1024, 1025, 4097])
def test_all_units_changed_and_one_unit_changed(
    backend: Backend, unit_bytes: int, num_units: int
) -> None:
    base = np.arange(num_units) % 100 + 20
    for new in (base + 1, base ^ 128, np.where(np.arange(num_units) == num_units - 1, 5, base)):
        for profile in (0, 1, 2):
            assert_round_trip(backend, case_of(base, new, unit_bytes, profile=profile))


def test_a_tensor_without_base_is_coded_against_zeros(backend: Backend) -> None:
    rng = np.random.default_rng(7)
    new = rng.integers(0, 3, 5000) * 0x3C01
    case = case_of(np.zeros(5000), new, 2, has_base=False)
    assert_round_trip(backend, case)


def mode_cases() -> dict[Mode, Case]:
    """A case whose block the canonical encoder codes in each mode."""
    rng = np.random.default_rng(3)
    weights = (rng.standard_normal(40000) * 0.02).astype("<f4").view("<u4") >> 16
    small_weights = weights & 0x7FFF
    sparse, many = weights.copy(), weights.copy()
    sparse[::991] += 1
    often = np.flatnonzero((small_weights < 0x3C00) & (rng.random(weights.size) < 0.6))
    many[often] += 1
    noise = (weights & 0x7F80) | (rng.integers(0, 65536, weights.size) & 0x807F)
    return {
        Mode.FAST: case_of(weights, sparse, 2, profile=1),
        Mode.BALANCED: case_of(weights, many, 2, profile=0),
        Mode.SMALL: case_of(weights, many, 2, profile=2),
        Mode.DENSE: case_of(weights, noise, 2, profile=1),
        Mode.RAW: case_of(weights, rng.integers(0, 65536, weights.size), 2),
    }


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.UNCHANGED])
def test_every_mode_is_chosen_where_it_is_smallest(backend: Backend, mode: Mode) -> None:
    case = mode_cases()[mode]
    assert_round_trip(backend, case)
    assert modes_of(case, encode(backend, case).body) == [mode]


@quick
@given(case=cases(max_units=600))
def test_a_second_application_is_refused_or_changes_nothing(backend: Backend, case: Case) -> None:
    encoded = encode(backend, case)
    if not encoded.body:
        return
    data = case.new.copy()
    digests = backend.digest_blocks(data, case.geometry, 1)
    args = (case.geometry, case.params(backend), digests, 0, case.geometry.num_blocks, 1)
    with suppress(FormatError):
        backend.apply_blocks(data, encoded.body, *args)
    assert np.array_equal(data, case.new)
