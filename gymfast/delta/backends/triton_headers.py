"""Headers of payloads, read on the host with their rules: sections 5.3, 5.4 and 6 of the format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gymfast.delta.records import Mode
from gymfast.delta.varint import decode_varint
from gymfast.errors import FormatError

RESERVED, MODE, COUNT, POSITION, STREAM = 13, 51, 53, 54, 55


@dataclass(frozen=True)
class PosGroup:
    """k changed places among num_places, coded as gaps of the changed or of the other places."""

    k: int
    num_places: int
    is_inverted: bool
    low_bits: int

    def arrays(self) -> list[tuple[int, int]]:
        """(m, l) of its array."""
        return [(self.num_places - self.k if self.is_inverted else self.k, self.low_bits)]


@dataclass(frozen=True)
class ValGroup:
    """How the steps of k changes are coded; exceptions and flips are (number, l of the gaps)."""

    k: int
    value_mode: int
    low_bits: int
    exceptions: tuple[int, int] | None
    flips: tuple[int, int] | None

    def arrays(self) -> list[tuple[int, int]]:
        """(m, l) of its arrays."""
        found = []
        if self.exceptions:
            found += [self.exceptions, (self.exceptions[0], self.low_bits)]
        elif self.value_mode == 2:
            found.append((self.k, self.low_bits))
        return found + ([self.flips] if self.flips else [])


@dataclass(frozen=True)
class Header:
    """What stands before L: groups in order, or the symbols of mode dense."""

    mode: Mode
    groups: list[PosGroup | ValGroup]
    classes: list[int]
    num_changes: int
    num_bytes: int
    symbols: bytes = b""
    uses_base: bool = False
    dense_array: tuple[int, int] = (0, 0)
    rest_bytes: int = 0
    arrays: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        arrays = [array for group in self.groups for array in group.arrays()]
        object.__setattr__(self, "arrays", arrays or [self.dense_array])


@dataclass(frozen=True)
class Streams:
    """Offsets in a payload of L, of S or P, of U, and of its end."""

    lows: int
    middle: int
    unary: int
    end: int


def find_streams(payload: memoryview, header: Header) -> Streams:
    """Where the streams behind a header are.

    Raises FormatError 55 if the payload is too short, padding of L or S is not 0, or U ends in a
    byte without a one (R25).
    """
    lows_bits = sum(m * low_bits for m, low_bits in header.arrays)
    middle = header.num_bytes + (lows_bits + 7) // 8
    unary = middle + (header.rest_bytes or (header.num_changes + 7) // 8)
    if unary > len(payload):
        raise FormatError(f"payload of {len(payload)} bytes, U would start at {unary}", STREAM)
    _check_padding(payload, middle, lows_bits, "L")
    if not header.rest_bytes:
        _check_padding(payload, unary, header.num_changes, "S")
    has_values = any(m for m, _ in header.arrays)
    if has_values != (unary < len(payload)) or (has_values and not payload[-1]):
        raise FormatError(f"U of {len(payload) - unary} bytes ends without a one", STREAM)
    return Streams(header.num_bytes, middle, unary, len(payload))


def _check_padding(payload: memoryview, end: int, num_bits: int, name: str) -> None:
    if num_bits % 8 and payload[end - 1] >> (num_bits % 8):
        raise FormatError(f"{name}: padding bits are not 0", STREAM)


def read_header(
    mode: Mode, payload: memoryview, num_units: int, unit_bytes: int, classes: Sequence[int]
) -> Header:
    """The header of a payload of mode 1 to 4; classes are the units of the block in each class.

    Raises FormatError for R4, R21 and R23..R25.
    """
    if mode is Mode.DENSE:
        return _read_dense(payload, num_units, unit_bytes)
    return _Reader(payload, num_units, classes).read(mode)


class _Reader:
    """A cursor over the header of mode 1, 2 or 3."""

    def __init__(self, payload: memoryview, num_units: int, classes: Sequence[int]) -> None:
        self._payload, self._at = payload, 0
        self._num_units, self._classes = num_units, classes

    def read(self, mode: Mode) -> Header:
        """The whole header."""
        groups: list[PosGroup | ValGroup] = []
        mask: list[int] = []
        if mode is Mode.SMALL:
            mask = self._class_mask()
            for number in mask:
                groups.append(self._position_group(self._classes[number]))
                groups.append(self._value_group(groups[-1].k))
            num_changes = sum(group.k for group in groups) // 2
            return Header(mode, groups, mask, num_changes, self._at)
        first = self._position_group(self._num_units)
        groups.append(first)
        if mode is Mode.FAST:
            groups.append(self._value_group(first.k))
        else:
            mask = self._class_mask()
            groups += [self._value_group(self._count("k_c", first.k)) for _ in mask]
            total = sum(group.k for group in groups[1:])
            if total != first.k:
                raise FormatError(f"k_c of all classes {total}, k {first.k}", COUNT)
        return Header(mode, groups, mask, first.k, self._at)

    def _take(self, num_bytes: int) -> bytes:
        if self._at + num_bytes > len(self._payload):
            raise FormatError("a payload ends inside its header", STREAM)
        self._at += num_bytes
        return bytes(self._payload[self._at - num_bytes : self._at])

    def _count(self, name: str, most: int) -> int:
        count, self._at = decode_varint(self._payload, self._at, what=name, number=STREAM)
        if not 1 <= count <= most:
            raise FormatError(f"{name} {count}, expected 1..{most}", COUNT)
        return count

    def _gap_parameter(self) -> int:
        (parameter,) = self._take(1)
        if parameter >> 5:
            raise FormatError(f"gap parameter: reserved bits of {parameter:#04x}", RESERVED)
        return parameter

    def _class_mask(self) -> list[int]:
        mask = int.from_bytes(self._take(2), "little")
        if mask == 0:
            raise FormatError("class mask is 0", COUNT)
        numbers = [number for number in range(16) if mask >> number & 1]
        empty = [number for number in numbers if not self._classes[number]]
        if empty:
            raise FormatError(f"the block has no units of classes {empty} of the mask", COUNT)
        return numbers

    def _position_group(self, num_places: int) -> PosGroup:
        k = self._count("k", num_places)
        (p,) = self._take(1)
        if p >> 6:
            raise FormatError(f"PosGroup: reserved bits of {p:#04x} are not 0", RESERVED)
        return PosGroup(k, num_places, bool(p >> 5 & 1), p & 31)

    def _value_group(self, k: int) -> ValGroup:
        (q,) = self._take(1)
        value_mode, low_bits = q >> 5 & 3, q & 31
        if value_mode == 3:
            raise FormatError("value_mode 3", MODE)
        if value_mode == 0 and low_bits:
            raise FormatError("value_mode 0: q.l is not 0", RESERVED)
        exceptions = flips = None
        if value_mode == 1:
            exceptions = (self._count("e", k), self._gap_parameter())
        if q >> 7:
            flips = (self._count("f", k), self._gap_parameter())
        return ValGroup(k, value_mode, low_bits, exceptions, flips)


def _read_dense(payload: memoryview, num_units: int, unit_bytes: int) -> Header:
    if len(payload) < 2 or len(payload) < payload[1] + 4:
        raise FormatError("a dense payload ends inside its header", STREAM)
    num_symbols = payload[1] + 1
    if payload[0] >> 1:
        raise FormatError(f"dense: reserved flags of {payload[0]:#04x}", RESERVED)
    symbols = bytes(payload[2 : 2 + num_symbols])
    if len(set(symbols)) != num_symbols:
        raise FormatError("dense: a symbol is listed twice", POSITION)
    low_bits = payload[2 + num_symbols]
    if low_bits > 7:
        raise FormatError(f"dense: l {low_bits}, expected 0..7", COUNT)
    return Header(
        Mode.DENSE,
        [],
        [],
        0,
        3 + num_symbols,
        symbols=symbols,
        uses_base=bool(payload[0] & 1),
        dense_array=(num_units, low_bits),
        rest_bytes=num_units * (unit_bytes - 1),
    )
