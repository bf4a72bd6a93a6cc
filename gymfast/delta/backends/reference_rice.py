"""Split-Rice arrays and bit arrays in NumPy: section 5.1 of docs/wire-format.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gymfast.errors import FormatError

I64 = NDArray[np.int64]
Bits = NDArray[np.uint8]
Array = tuple[I64, int]
_POSITION_RANGE = 54
_STREAM_LENGTH = 55


def best_parameter(x: I64) -> int:
    """The l of the canonical encoder for SR(x): section 10."""
    if x.size == 0:
        return 0
    t = ((int(x.sum()) + x.size) * 11) // (16 * x.size)
    centre = t.bit_length() - 1 if t else 0
    candidates = range(max(0, centre - 1), min(31, centre + 1) + 1)
    return min(candidates, key=lambda low_bits: (array_bits(x, low_bits), low_bits))


def array_bits(x: I64, low_bits: int) -> int:
    """Bits that SR(x, low_bits) takes in L and U together."""
    return x.size * low_bits + int((x >> low_bits).sum()) + x.size


def pack_lows(arrays: Sequence[Array]) -> bytes:
    """L of a payload: the low bits of all arrays as one bit array, zero-padded to a byte."""
    parts = [
        ((x[:, None] >> np.arange(low_bits)) & 1).astype(np.uint8).ravel() for x, low_bits in arrays
    ]
    return pack_bits(np.concatenate([np.zeros(0, np.uint8), *parts]))


def pack_unary(arrays: Sequence[Array]) -> bytes:
    """U of a payload: x >> l zeros and a one for each x of all arrays, zero-padded to a byte."""
    highs = [x >> low_bits for x, low_bits in arrays]
    ones = np.cumsum(np.concatenate([np.zeros(0, np.int64), *highs]) + 1) - 1
    bits = np.zeros(int(ones[-1]) + 1 if ones.size else 0, np.uint8)
    bits[ones] = 1
    return pack_bits(bits)


def pack_bits(bits: Bits) -> bytes:
    """Bits from the least significant one of each byte upwards, zero-padded."""
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_bits(data: memoryview, num_bits: int, what: str) -> Bits:
    """The bits of a stream of exactly num_bits.

    Raises FormatError 55 if bits of the padding are set (R25); data has the right length.
    """
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[num_bits:].any():
        raise FormatError(f"{what}: padding bits are not 0", _STREAM_LENGTH)
    return bits[:num_bits]


def unpack_arrays(
    lows: memoryview, unary: memoryview, sizes: Sequence[tuple[int, int]]
) -> list[I64]:
    """The arrays whose (m, l) are given, from L (of the right length) and U.

    Raises FormatError 55 if U does not hold just these arrays or padding is set (R25), and 54 if a
    value is 2^32 or more, which is out of every range (R24).
    """
    low_bits = unpack_bits(lows, sum(m * width for m, width in sizes), "L")
    highs = _unpack_unary(unary, sum(m for m, _ in sizes))
    arrays = []
    bit_at = value_at = 0
    for m, width in sizes:
        high = highs[value_at : value_at + m]
        if (high >> (32 - width)).any():
            raise FormatError("a coded value is 2^32 or more", _POSITION_RANGE)
        fields = low_bits[bit_at : bit_at + m * width].reshape(m, width).astype(np.int64)
        arrays.append(high << width | (fields << np.arange(width)).sum(axis=1, dtype=np.int64))
        bit_at += m * width
        value_at += m
    return arrays


def _unpack_unary(unary: memoryview, num_values: int) -> I64:
    """Zeros before each of the num_values ones of U."""
    bits = np.unpackbits(np.frombuffer(unary, np.uint8), bitorder="little")
    ones = np.flatnonzero(bits).astype(np.int64)
    used_bytes = int(ones[-1]) // 8 + 1 if ones.size else 0
    if ones.size != num_values or used_bytes != len(unary):
        raise FormatError(
            f"U of {len(unary)} bytes holds {ones.size} values in {used_bytes} bytes, expected "
            f"{num_values} values",
            _STREAM_LENGTH,
        )
    return np.diff(ones, prepend=-1) - 1


def to_gaps(positions: I64) -> I64:
    """p[0], p[1] - p[0] - 1, ... of ascending positions."""
    return np.diff(positions, prepend=-1) - 1


def from_gaps(gaps: I64, end: int, what: str) -> I64:
    """The positions that these gaps code.

    Raises FormatError 54 if one is not below end (R24).
    """
    positions = np.cumsum(gaps + 1) - 1
    if positions.size and int(positions[-1]) >= end:
        raise FormatError(f"{what} {int(positions[-1])}, expected below {end}", _POSITION_RANGE)
    return positions
