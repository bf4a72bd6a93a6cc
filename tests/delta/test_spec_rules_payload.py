"""Rules R4 and R20..R26 of docs/wire-format.md in payloads, each broken alone by hand."""

from __future__ import annotations

import numpy as np
import pytest
from delta_frames import bits, check_of, table, u16, unary, varint

from gymfast.delta.backends import Backend, BlockParams
from gymfast.delta.geometry import Geometry
from gymfast.errors import ChecksumError, FormatError

FAST, BALANCED, SMALL, DENSE, RAW = 1, 2, 3, 4, 5
HAS_FLIPS, INVERTED = 128, 32
ONES, EXCEPTIONS, ALL = 0, 32, 64
ZEROS = [0] * 8
# Position 3 becomes 1: k, p, q | S | U
STEP = bytes((1, 0, ONES)) + b"\0" + unary(3)
STEPPED = [0, 0, 0, 1, 0, 0, 0, 0]
# Two classes of bytes (field = magnitude, class_shift 6): 0..63 are class 0, 64..127 class 1.
TWO = BlockParams(0, 6, 0, True)
MIXED = [0, 64, 0, 64, 0, 0, 64, 0]


def run(
    backend: Backend,
    base: list[int],
    mode: int,
    payload: bytes,
    *,
    new: list[int] | None = None,
    check: int = 0,
    unit_bytes: int = 1,
    params: BlockParams = TWO,
) -> list[int]:
    """The units after one block was applied; they are the base's if the block was refused."""
    dtype = f"<u{unit_bytes}"
    data = np.array(base, dtype).view(np.uint8)
    n = len(base)
    geometry = Geometry(n, unit_bytes, n, 1, n)
    if new is not None:
        check = check_of(np.array(new, dtype).tobytes())
    digests = backend.digest_blocks(data, geometry, 1)
    before = digests.copy()
    body = table([(mode, payload, check)])
    try:
        backend.apply_blocks(data, body, geometry, params, digests, 0, 1, 1)
    except FormatError:
        assert data.view(dtype).tolist() == list(base)
        assert np.array_equal(digests, before)
        raise
    return data.view(dtype).tolist()


def assert_refused(backend: Backend, numbers: int | set[int], *args, **kwargs) -> None:
    with pytest.raises(FormatError) as caught:
        run(backend, *args, **kwargs)
    expected = numbers if isinstance(numbers, set) else {numbers}
    assert caught.value.number in expected, str(caught.value)


def test_the_payloads_that_the_tests_break_are_valid(backend) -> None:
    assert run(backend, ZEROS, FAST, STEP, new=STEPPED) == STEPPED


def test_all_fields_of_a_value_group(backend) -> None:
    payload = bytes((3, 1, EXCEPTIONS | HAS_FLIPS | 1, 1, 2, 2, 0))
    lows = bits((0, 1), (0, 1), (1, 1), (2, 2), (1, 1))
    payload += lows + bits((1, 1), (0, 1), (0, 1)) + unary(0, 1, 0, 0, 0, 0, 1)
    new = [9, 9, 9, 9, 9, 9, 9, 9]
    new[0], new[3], new[5] = 8 | 128, 10, (9 + 3) | 128
    assert run(backend, [9] * 8, FAST, payload, new=new) == new


def test_inverted_positions_list_what_did_not_change(backend) -> None:
    payload = bytes((7, INVERTED, ONES)) + bytes(1) + unary(2)
    new = [1, 1, 0, 1, 1, 1, 1, 1]
    assert run(backend, ZEROS, FAST, payload, new=new) == new
    everything = bytes((8, INVERTED, ONES)) + bytes(1)
    assert run(backend, ZEROS, FAST, everything, new=[1] * 8) == [1] * 8


def test_balanced_sorts_values_by_class(backend) -> None:
    payload = bytes((3, 0)) + u16(3) + bytes((1, ALL)) + bytes((2, ONES))
    payload += bits((0, 1), (0, 1), (1, 1)) + unary(1, 0, 0, 2)
    new = [0, 65, 3, 63, 0, 0, 64, 0]
    assert run(backend, MIXED, BALANCED, payload, new=new) == new


def test_small_counts_ranks_within_the_class(backend) -> None:
    payload = u16(3) + bytes((1, 0, ONES)) + bytes((1, 0, ONES)) + bytes(1) + unary(4, 1)
    new = [0, 64, 0, 65, 0, 0, 64, 1]
    assert run(backend, MIXED, SMALL, payload, new=new) == new


def test_a_step_of_zero_with_a_flip_changes_the_sign_alone(backend) -> None:
    payload = bytes((1, 0, ALL | HAS_FLIPS | 7, 1, 0)) + bits((127, 7)) + b"\0" + unary(3, 0, 0)
    new = [0, 0, 0, 128, 0, 0, 0, 0]
    assert run(backend, ZEROS, FAST, payload, new=new) == new


def test_magnitudes_wrap_around(backend) -> None:
    payload = bytes((1, 0, ONES)) + b"\1" + unary(3)
    new = [0, 0, 0, 127, 0, 0, 0, 0]
    assert run(backend, ZEROS, FAST, payload, new=new) == new


def dense(units: list[int], symbols: list[int], low_bits: int = 0, flags: int = 0) -> bytes:
    """Dense payload of 16-bit units whose symbols are listed."""
    index = [symbols.index(unit >> 7 & 255) for unit in units]
    lows = bits(*((i % 2**low_bits, low_bits) for i in index))
    rests = bytes(unit >> 15 << 7 | unit % 128 for unit in units)
    start = bytes((flags, len(symbols) - 1, *symbols, low_bits))
    return start + lows + rests + unary(*(i >> low_bits for i in index))


WORDS = [0x3F80, 0xBF81, 0x0000, 0xFFFF]


def test_dense_lists_symbols_and_rests(backend) -> None:
    payload = dense(WORDS, [0x7F, 0, 0xFF], low_bits=1)
    assert run(backend, [5] * 4, DENSE, payload, new=WORDS, unit_bytes=2) == WORDS


@pytest.mark.parametrize("high", [64, 128])
def test_R4_reserved_bits_of_p(backend, high: int) -> None:
    assert_refused(backend, 13, ZEROS, FAST, bytes((1, high)) + STEP[2:])


@pytest.mark.parametrize("high", [32, 64, 128])
def test_R4_reserved_bits_of_g_and_h(backend, high: int) -> None:
    payload = bytes((1, 0, EXCEPTIONS, 1, high)) + b"\0" + unary(3, 0, 0)
    assert_refused(backend, 13, ZEROS, FAST, payload)
    payload = bytes((1, 0, HAS_FLIPS, 1, high)) + b"\0" + unary(3, 0)
    assert_refused(backend, 13, ZEROS, FAST, payload)


def test_R4_reserved_flags_of_dense_and_l_of_ones(backend) -> None:
    for flags in (2, 128):
        payload = dense(WORDS, [0x7F, 0, 0xFF], flags=flags)
        assert_refused(backend, 13, [5] * 4, DENSE, payload, unit_bytes=2)
    assert_refused(backend, 13, ZEROS, FAST, bytes((1, 0, ONES | 1)) + STEP[3:])


def test_R25_varints_of_a_payload_have_one_form(backend) -> None:
    assert_refused(backend, 55, ZEROS, FAST, varint(1, 1) + STEP[1:])
    payload = bytes((1, 0, EXCEPTIONS)) + varint(1, 1) + b"\0\0" + unary(3, 0, 0)
    assert_refused(backend, 55, ZEROS, FAST, payload)
    payload = bytes((1, 0, HAS_FLIPS)) + varint(1, 1) + b"\0\0" + unary(3, 0)
    assert_refused(backend, 55, ZEROS, FAST, payload)


@pytest.mark.parametrize(("first", "count"), [(0, 2), (1, 1), (0, 0), (2**40, 1)])
def test_R20_blocks_that_the_tensor_does_not_have(backend, first: int, count: int) -> None:
    data, geometry = np.zeros(8, np.uint8), Geometry(8, 1, 8, 1, 8)
    digests = np.zeros((1, 2), np.uint64)
    body = table([(RAW, bytes(8), 0)] * count)
    with pytest.raises(FormatError) as caught:
        backend.apply_blocks(data, body, geometry, TWO, digests, first, count, 1)
    assert caught.value.number == 50


def test_R21_modes_and_value_modes_are_known(backend) -> None:
    assert_refused(backend, 51, ZEROS, 6, STEP)
    assert_refused(backend, 51, ZEROS, DENSE, STEP)
    assert_refused(backend, 51, ZEROS, FAST, bytes((1, 0, 96)) + STEP[3:])


def test_R22_payloads_fill_the_body(backend) -> None:
    data, geometry = np.zeros(8, np.uint8), Geometry(8, 1, 8, 1, 8)
    digests = np.zeros((1, 2), np.uint64)
    for size in (len(STEP) - 1, len(STEP) + 1, 2**63):
        body = table([(FAST, STEP, 0)], payload_bytes=[size])
        with pytest.raises(FormatError) as caught:
            backend.apply_blocks(data, body, geometry, TWO, digests, 0, 1, 1)
        assert caught.value.number == 52


@pytest.mark.parametrize("k", [0, 9, 2**20, 2**64 - 1])
def test_R23_k_is_at_least_1_and_at_most_the_units(backend, k: int) -> None:
    assert_refused(backend, 53, ZEROS, FAST, varint(k) + STEP[1:])


def test_R23_k_of_a_class_is_at_most_its_units(backend) -> None:
    payload = u16(2) + bytes((4, 0, ONES)) + b"\0" + unary(0, 0, 0, 0)
    assert_refused(backend, {53, 54}, MIXED, SMALL, payload)


@pytest.mark.parametrize("count", [0, 2, 2**63])
def test_R23_e_and_f_are_at_least_1_and_at_most_k(backend, count: int) -> None:
    payload = bytes((1, 0, EXCEPTIONS)) + varint(count) + b"\0\0" + unary(3, 0, 0)
    assert_refused(backend, 53, ZEROS, FAST, payload)
    payload = bytes((1, 0, HAS_FLIPS)) + varint(count) + b"\0\0" + unary(3, 0)
    assert_refused(backend, 53, ZEROS, FAST, payload)


@pytest.mark.parametrize("mask", [0, 4, 1 << 15, 7])
def test_R23_the_class_mask_names_classes_that_have_units(backend, mask: int) -> None:
    count = mask.bit_count()
    streams = b"\0" + unary(*[0] * count)
    payload = u16(mask) + bytes((1, 0, ONES)) * count + streams
    assert_refused(backend, {53, 54}, MIXED, SMALL, payload)
    payload = bytes((count or 1, 0)) + u16(mask) + bytes((1, ONES)) * count + streams
    assert_refused(backend, 53, MIXED, BALANCED, payload)


@pytest.mark.parametrize(("of_0", "of_1"), [(2, 1), (1, 1), (2, 2), (0, 3), (3, 0), (4, 1)])
def test_R23_balanced_counts_are_those_of_the_changed_units(backend, of_0, of_1) -> None:
    start = bytes((3, 0)) + u16(3)
    good = start + bytes((1, ONES, 2, ONES)) + b"\0" + unary(1, 0, 0)
    assert run(backend, MIXED, BALANCED, good, new=[0, 65, 1, 65, 0, 0, 64, 0])
    payload = start + bytes((of_0, ONES, of_1, ONES)) + b"\0" + unary(1, 0, 0)
    assert_refused(backend, 53, MIXED, BALANCED, payload)


def test_R23_balanced_mask_without_changes_of_a_class(backend) -> None:
    payload = bytes((2, 0)) + u16(3) + bytes((1, ONES, 1, ONES)) + b"\0" + unary(1, 1)
    assert_refused(backend, 53, MIXED, BALANCED, payload)


def test_R23_l_of_dense_is_at_most_7(backend) -> None:
    payload = bytearray(dense(WORDS, [0x7F, 0, 0xFF]))
    payload[5] = 8
    payload[6:6] = bytes(4)
    assert_refused(backend, 53, [5] * 4, DENSE, bytes(payload), unit_bytes=2)


def test_R24_positions_are_below_n(backend) -> None:
    assert_refused(backend, 54, ZEROS, FAST, STEP[:4] + unary(8))
    assert_refused(backend, 54, ZEROS, FAST, bytes((2, 0, ONES)) + b"\0" + unary(3, 4))
    wide = bytes((1, 31, ONES)) + (7).to_bytes(4, "little") + b"\0" + unary(1)
    assert_refused(backend, 54, ZEROS, FAST, wide)
    huge = bytes((1, 31, ONES)) + (7).to_bytes(4, "little") + b"\0" + unary(100_000)
    assert_refused(backend, 54, ZEROS, FAST, huge)
    inverted = bytes((7, INVERTED, ONES)) + b"\0" + unary(8)
    assert_refused(backend, 54, ZEROS, FAST, inverted)
    rank = u16(2) + bytes((1, 0, ONES)) + b"\0" + unary(3)
    assert_refused(backend, 54, MIXED, SMALL, rank)


def test_R24_indices_of_exceptions_and_flips_are_below_k(backend) -> None:
    payload = bytes((1, 0, EXCEPTIONS, 1, 0)) + b"\0" + unary(3, 1, 0)
    assert_refused(backend, 54, ZEROS, FAST, payload)
    payload = bytes((1, 0, HAS_FLIPS, 1, 0)) + b"\0" + unary(3, 1)
    assert_refused(backend, 54, ZEROS, FAST, payload)


@pytest.mark.parametrize(("unit_bytes", "half"), [(1, 2**7), (2, 2**15), (4, 2**31)])
def test_R24_values_are_below_M(backend, unit_bytes: int, half: int) -> None:
    low_bits = 8 * unit_bytes - 2
    for value, mode in ((half, ALL), (half - 1, EXCEPTIONS)):
        fields = (1, 0) if mode is EXCEPTIONS else ()
        lows = bits((value % 2**low_bits, low_bits))
        high = value >> low_bits
        counts = (3, 0, high) if mode is EXCEPTIONS else (3, high)
        start = bytes((1, 0, mode | low_bits, *fields))
        payload = start + lows + b"\0" + unary(*counts)
        assert_refused(backend, 54, ZEROS, FAST, payload, unit_bytes=unit_bytes)


def test_R24_symbols_are_listed_once_and_indices_below_m(backend) -> None:
    payload = bytearray(dense(WORDS, [0x7F, 0, 0xFF]))
    payload[3] = 0x7F
    assert_refused(backend, 54, [5] * 4, DENSE, bytes(payload), unit_bytes=2)
    payload = dense(WORDS, [0x7F, 0, 0xFF])[:-1] + unary(0, 0, 1, 3)
    assert_refused(backend, 54, [5] * 4, DENSE, payload, unit_bytes=2)


VALID = [
    (1, ZEROS, FAST, STEP),
    (1, ZEROS, FAST, bytes((1, 2, ALL | 3)) + bits((3, 2), (5, 3)) + b"\0" + unary(0, 0)),
    (1, MIXED, BALANCED, bytes((1, 0)) + u16(1) + bytes((1, ONES)) + b"\0" + unary(2)),
    (1, MIXED, SMALL, u16(2) + bytes((1, 0, ONES)) + b"\0" + unary(1)),
    (2, [5] * 4, DENSE, dense(WORDS, [0x7F, 0, 0xFF], low_bits=1)),
    (1, ZEROS, RAW, bytes(8)),
    (4, ZEROS, RAW, bytes(32)),
]


@pytest.mark.parametrize(("unit_bytes", "base", "mode", "payload"), VALID)
def test_R25_every_prefix_and_extension_of_a_payload(
    backend, unit_bytes: int, base: list[int], mode: int, payload: bytes
) -> None:
    for size in range(len(payload)):
        assert_refused(backend, 55, base, mode, payload[:size], unit_bytes=unit_bytes)
    for tail in (b"\0", b"\1", bytes(100)):
        assert_refused(backend, 55, base, mode, payload + tail, unit_bytes=unit_bytes)


def test_R25_padding_is_zero(backend) -> None:
    start = bytes((1, 2, ONES))
    assert run(backend, ZEROS, FAST, start + b"\3\0" + unary(0), new=STEPPED) == STEPPED
    assert_refused(backend, 55, ZEROS, FAST, start + b"\7\0" + unary(0))
    assert_refused(backend, 55, ZEROS, FAST, start + b"\3\2" + unary(0))
    assert_refused(backend, 55, ZEROS, FAST, start + b"\3\0\3")


def test_R25_unary_holds_as_many_ones_as_there_are_values(backend) -> None:
    assert_refused(backend, 55, ZEROS, FAST, STEP[:4] + b"\0")
    assert_refused(backend, 55, ZEROS, FAST, STEP[:4] + unary(1, 1))
    assert_refused(backend, 55, ZEROS, FAST, bytes((8, INVERTED, ONES)) + bytes(1) + b"\1")


def test_R26_the_result_has_the_stated_digest(backend) -> None:
    for new in (ZEROS, [0, 0, 0, 2, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]):
        assert_refused(backend, 58, ZEROS, FAST, STEP, new=new)
    assert_refused(backend, 58, [0, 0, 0, 0, 0, 0, 0, 1], FAST, STEP, new=STEPPED)
    assert_refused(backend, 58, ZEROS, RAW, bytes(STEPPED), new=ZEROS)
    with pytest.raises(ChecksumError):
        run(backend, ZEROS, FAST, STEP, new=ZEROS)
