"""The payload of one block field by field: sections 5 and 6 of docs/wire-format.md."""

from __future__ import annotations

from gymfast.cli.delta.fields import FieldReader
from gymfast.delta.records import Mode

_VALUE_MODES = ("ones", "exceptions", "all", "?")
_NEEDS_BASE = "rest of the payload (only a base tells its arrays apart)"


def read_payload(
    reader: FieldReader, mode: int, size: int, *, num_units: int, unit_bytes: int
) -> None:
    """Read the payload of a block; what only a base can tell apart is one field."""
    end = reader.position + size
    if mode == Mode.RAW:
        reader.counted(size, "new units")
        return
    if mode == Mode.DENSE:
        _read_dense(reader, num_units, unit_bytes)
    else:
        sizes = _read_groups(reader, mode, num_units)
        if sizes is None:
            reader.counted(end - reader.position, _NEEDS_BASE)
            return
        low_bits, num_changed = sizes
        reader.counted(-(-low_bits // 8), "L (low bits)")
        reader.counted(-(-num_changed // 8), "S (signs of the steps)")
    reader.counted(end - reader.position, "U (unary)")


def _read_dense(reader: FieldReader, num_units: int, unit_bytes: int) -> None:
    reader.number(
        1, "dense flags", lambda flags: "against the base" if flags & 1 else "of the new values"
    )
    num_symbols = reader.number(1, "m - 1") + 1
    reader.counted(num_symbols, "symbols")
    low = reader.number(1, "l")
    reader.counted(-(-num_units * low // 8), "L (low bits)")
    reader.counted(num_units * (1 if unit_bytes == 2 else 3), "P (rests)")


def _read_groups(reader: FieldReader, mode: int, num_units: int) -> tuple[int, int] | None:
    """Bits of L and number of changes of a sparse header, or None where only a base tells."""
    if mode == Mode.SMALL:
        return _read_small(reader)
    num_changed, low_bits = _read_positions(reader, num_units)
    if mode == Mode.FAST:
        return low_bits + _read_values(reader, num_changed), num_changed
    for _ in _read_mask(reader):
        low_bits += _read_values(reader, reader.varint("k_c (changes of the class)"))
    return low_bits, num_changed


def _read_small(reader: FieldReader) -> tuple[int, int] | None:
    low_bits, total, is_known = 0, 0, True
    for _ in _read_mask(reader):
        num_changed, position_bits = _read_positions(reader, None)
        is_known = is_known and position_bits >= 0
        low_bits += position_bits + _read_values(reader, num_changed)
        total += num_changed
    return (low_bits, total) if is_known else None


def _read_mask(reader: FieldReader) -> list[int]:
    """The classes that have changes."""
    return _bits_of(reader.number(2, "class mask", lambda mask: f"classes {_bits_of(mask)}"))


def _read_positions(reader: FieldReader, num_units: int | None) -> tuple[int, int]:
    """Changes of a PosGroup and bits of its lows (-1: inverted, in a class of unknown size)."""
    num_changed = reader.varint("k (changes)")
    p = reader.number(1, "p", lambda p: f"l {p & 31}{', inverted' if p & 32 else ''}")
    if not p & 32:
        return num_changed, num_changed * (p & 31)
    return num_changed, -1 if num_units is None else max(0, num_units - num_changed) * (p & 31)


def _read_values(reader: FieldReader, num_changed: int) -> int:
    """Bits of the lows of a ValGroup."""
    q = reader.number(1, "q", _describe_values)
    value_mode, low = q >> 5 & 3, q & 31
    bits = 0
    if value_mode == 1:
        num_exceptions = reader.varint("e (exceptions)")
        bits += num_exceptions * (low + (reader.number(1, "g", _describe_gap) & 31))
    elif value_mode == 2:
        bits += num_changed * low
    if q & 128:
        num_flips = reader.varint("f (sign flips)")
        bits += num_flips * (reader.number(1, "h", _describe_gap) & 31)
    return bits


def _describe_values(q: int) -> str:
    return f"l {q & 31}, values {_VALUE_MODES[q >> 5 & 3]}{', flips' if q & 128 else ''}"


def _describe_gap(gap: int) -> str:
    return f"l {gap & 31}"


def _bits_of(mask: int) -> list[int]:
    return [i for i in range(16) if mask >> i & 1]
