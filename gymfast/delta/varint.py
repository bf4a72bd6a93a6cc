"""Unsigned LEB128 in its shortest form: section 1 of docs/wire-format.md."""

from __future__ import annotations

from gymfast.errors import FormatError

Buffer = bytes | bytearray | memoryview
BAD_ENCODING = 25


def encode_varint(value: int) -> bytes:
    """The shortest LEB128 form of value.

    Raises ValueError if value is negative or above 2^64-1.
    """
    if not 0 <= value < 2**64:
        raise ValueError(f"varint of {value}, expected 0..2^64-1")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(
    data: Buffer, at: int, *, what: str, number: int = BAD_ENCODING
) -> tuple[int, int]:
    """The value at offset `at` and the offset behind it; `what` names the field in errors.

    Raises FormatError with this number if data ends, or the varint is longer than needed or
    above 2^64-1 (R10; in payloads R25).
    """
    value = 0
    for i in range(10):
        if at + i >= len(data):
            raise FormatError(f"{what}: varint at byte {at} is cut off", number)
        byte = data[at + i]
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if i and byte == 0:
                raise FormatError(f"{what}: varint at byte {at} is not the shortest", number)
            if value >= 2**64:
                break
            return value, at + i + 1
    raise FormatError(f"{what}: varint at byte {at} is too long", number)
