"""The decoder of one block with its rules: sections 5 to 8 of docs/wire-format.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.backends import BlockParams
from gymfast.delta.backends.reference_rice import I64, from_gaps, unpack_arrays, unpack_bits
from gymfast.delta.backends.reference_values import (
    NUM_CLASSES,
    Steps,
    apply_steps,
    classes_of,
    dense_join,
    dense_symbols,
    half_range,
)
from gymfast.delta.records import Mode
from gymfast.delta.varint import decode_varint
from gymfast.errors import FormatError

_RESERVED, _MODE, _COUNT, _POSITION, _STREAM = 13, 51, 53, 54, 55


def decode_block(
    mode: Mode, payload: memoryview, base: I64, unit_bytes: int, params: BlockParams
) -> I64:
    """The new units of a block whose base units are given.

    Raises FormatError for R4, R21 and R23..R25.
    """
    if mode is Mode.UNCHANGED:
        return base
    if mode is Mode.RAW:
        if len(payload) != base.size * unit_bytes:
            raise FormatError(f"raw: {len(payload)} bytes for {base.size} units", _STREAM)
        return np.frombuffer(payload, f"<u{unit_bytes}").astype(np.int64)
    if mode is Mode.DENSE:
        return _decode_dense(payload, base, unit_bytes)
    classes = classes_of(base, unit_bytes, params.class_shift, params.class_base)
    positions, steps = _SparseDecoder(payload, classes, unit_bytes).decode(mode)
    new = base.copy()
    new[positions] = apply_steps(base[positions], steps, unit_bytes)
    return new


@dataclass(frozen=True)
class _PosGroup:
    """k changed places among num_places, coded as gaps of the changed or of the other places."""

    k: int
    num_places: int
    inverted: bool
    low_bits: int

    def sizes(self) -> list[tuple[int, int]]:
        """(m, l) of its array."""
        return [(self.num_places - self.k if self.inverted else self.k, self.low_bits)]

    def places(self, arrays: list[I64]) -> I64:
        """The changed places; takes its array off the front of the list."""
        listed = from_gaps(arrays.pop(0), self.num_places, "position")
        return np.setdiff1d(np.arange(self.num_places), listed) if self.inverted else listed


@dataclass(frozen=True)
class _ValGroup:
    """How the steps of k changes are coded."""

    k: int
    value_mode: int
    low_bits: int
    exceptions: tuple[int, int] | None
    flips: tuple[int, int] | None

    def sizes(self) -> list[tuple[int, int]]:
        """(m, l) of its arrays."""
        sizes = []
        if self.exceptions:
            sizes += [self.exceptions, (self.exceptions[0], self.low_bits)]
        elif self.value_mode == 2:
            sizes.append((self.k, self.low_bits))
        return sizes + ([self.flips] if self.flips else [])

    def values(self, arrays: list[I64], half: int) -> tuple[I64, NDArray[np.bool_]]:
        """Values v and flips of the changes; takes its arrays off the front of the list."""
        v = np.zeros(self.k, np.int64)
        if self.exceptions:
            index = from_gaps(arrays.pop(0), self.k, "index of an exception")
            v[index] = arrays.pop(0) + 1
        elif self.value_mode == 2:
            v = arrays.pop(0)
        if (v >= half).any():
            raise FormatError(f"value {int(v.max())}, expected below {half}", _POSITION)
        flip = np.zeros(self.k, np.bool_)
        if self.flips:
            flip[from_gaps(arrays.pop(0), self.k, "index of a flip")] = True
        return v, flip


class _SparseDecoder:
    """One pass over a payload of mode 1, 2 or 3."""

    def __init__(self, payload: memoryview, classes: I64, unit_bytes: int) -> None:
        self._payload = payload
        self._at = 0
        self._classes = classes
        self._half = half_range(unit_bytes)

    def decode(self, mode: Mode) -> tuple[I64, Steps]:
        """Positions of the changed units and their steps, in the order of the mode."""
        if mode is Mode.SMALL:
            return self._decode_small()
        position_group = self._position_group(self._classes.size)
        counts = {0: position_group.k} if mode is Mode.FAST else {}
        groups = []
        if mode is Mode.FAST:
            groups.append(self._value_group(position_group.k))
        else:
            for number in self._class_mask():
                counts[number] = self._count("k_c", position_group.k)
                groups.append(self._value_group(counts[number]))
            if sum(counts.values()) != position_group.k:
                raise FormatError(
                    f"k_c of all classes {sum(counts.values())}, k {position_group.k}", _COUNT
                )
        sizes = position_group.sizes() + [size for group in groups for size in group.sizes()]
        arrays, neg = self._streams(sizes, position_group.k)
        positions = position_group.places(arrays)
        if mode is Mode.BALANCED:
            positions = self._sort_by_class(positions, counts)
        return positions, self._steps(groups, arrays, neg)

    def _decode_small(self) -> tuple[I64, Steps]:
        members = [np.flatnonzero(self._classes == number) for number in self._class_mask()]
        position_groups, groups, sizes = [], [], []
        for places in members:
            position_groups.append(self._position_group(places.size))
            groups.append(self._value_group(position_groups[-1].k))
            sizes += position_groups[-1].sizes() + groups[-1].sizes()
        arrays, neg = self._streams(sizes, sum(group.k for group in groups))
        positions, steps = [], []
        for places, position_group, group in zip(members, position_groups, groups, strict=True):
            positions.append(places[position_group.places(arrays)])
            steps.append(group.values(arrays, self._half))
        v, flip = (np.concatenate(parts) for parts in zip(*steps, strict=True))
        return np.concatenate(positions), Steps(v, neg, flip)

    def _steps(self, groups: list[_ValGroup], arrays: list[I64], neg: NDArray[np.bool_]) -> Steps:
        parts = [group.values(arrays, self._half) for group in groups]
        v, flip = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Steps(v, neg, flip)

    def _sort_by_class(self, positions: I64, counts: dict[int, int]) -> I64:
        """Positions by class, then position, after a look at the counts that the header states."""
        classes = self._classes[positions]
        numbers, sizes = np.unique(classes, return_counts=True)
        found = dict(zip(numbers.tolist(), sizes.tolist(), strict=True))
        if found != counts:
            raise FormatError(f"changed units by class {found}, header says {counts}", _COUNT)
        return positions[np.argsort(classes, kind="stable")]

    def _streams(
        self, sizes: list[tuple[int, int]], num_changed: int
    ) -> tuple[list[I64], NDArray[np.bool_]]:
        """All arrays and the neg bits: L, S and U behind the header."""
        lows_bytes = (sum(m * low_bits for m, low_bits in sizes) + 7) // 8
        signs_at = self._at + lows_bytes
        unary_at = signs_at + (num_changed + 7) // 8
        if unary_at > len(self._payload):
            raise FormatError(
                f"payload of {len(self._payload)} bytes, L and S end at {unary_at}", _STREAM
            )
        lows = self._payload[self._at : signs_at]
        neg = unpack_bits(self._payload[signs_at:unary_at], num_changed, "S")
        return unpack_arrays(lows, self._payload[unary_at:], sizes), neg.astype(np.bool_)

    def _take(self, num_bytes: int) -> bytes:
        if self._at + num_bytes > len(self._payload):
            raise FormatError("a payload ends inside its header", _STREAM)
        self._at += num_bytes
        return bytes(self._payload[self._at - num_bytes : self._at])

    def _count(self, name: str, most: int) -> int:
        count, self._at = decode_varint(self._payload, self._at, what=name, number=_STREAM)
        if not 1 <= count <= most:
            raise FormatError(f"{name} {count}, expected 1..{most}", _COUNT)
        return count

    def _gap_parameter(self) -> int:
        (parameter,) = self._take(1)
        return _checked_parameter(parameter)

    def _class_mask(self) -> list[int]:
        """The classes of the mask, ascending."""
        mask = int.from_bytes(self._take(2), "little")
        if mask == 0:
            raise FormatError("class mask is 0", _COUNT)
        numbers = [number for number in range(NUM_CLASSES) if mask >> number & 1]
        empty = [number for number in numbers if not (self._classes == number).any()]
        if empty:
            raise FormatError(f"the block has no units of classes {empty} of the mask", _COUNT)
        return numbers

    def _position_group(self, num_places: int) -> _PosGroup:
        k = self._count("k", num_places)
        (p,) = self._take(1)
        if p >> 6:
            raise FormatError(f"PosGroup: reserved bits of {p:#04x} are not 0", _RESERVED)
        return _PosGroup(k, num_places, bool(p >> 5 & 1), p & 31)

    def _value_group(self, k: int) -> _ValGroup:
        (q,) = self._take(1)
        value_mode, low_bits = q >> 5 & 3, q & 31
        if value_mode == 3:
            raise FormatError("value_mode 3", _MODE)
        if value_mode == 0 and low_bits:
            raise FormatError("value_mode 0: q.l is not 0", _RESERVED)
        exceptions = flips = None
        if value_mode == 1:
            exceptions = (self._count("e", k), self._gap_parameter())
        if q >> 7:
            flips = (self._count("f", k), self._gap_parameter())
        return _ValGroup(k, value_mode, low_bits, exceptions, flips)


def _checked_parameter(parameter: int) -> int:
    if parameter >> 5:
        raise FormatError(f"gap parameter: reserved bits of {parameter:#04x}", _RESERVED)
    return parameter


def _decode_dense(payload: memoryview, base: I64, unit_bytes: int) -> I64:
    """The new units of a payload of mode 4."""
    if len(payload) < 2 or len(payload) < 2 + payload[1] + 1 + 1:
        raise FormatError("a dense payload ends inside its header", _STREAM)
    flags, num_symbols = payload[0], payload[1] + 1
    if flags >> 1:
        raise FormatError(f"dense: reserved flags of {flags:#04x}", _RESERVED)
    listed = np.frombuffer(payload[2 : 2 + num_symbols], np.uint8).astype(np.int64)
    if np.unique(listed).size != num_symbols:
        raise FormatError("dense: a symbol is listed twice", _POSITION)
    low_bits = payload[2 + num_symbols]
    if low_bits > 7:
        raise FormatError(f"dense: l {low_bits}, expected 0..7", _COUNT)
    lows_at = 3 + num_symbols
    rests_at = lows_at + (base.size * low_bits + 7) // 8
    unary_at = rests_at + base.size * (unit_bytes - 1)
    if unary_at > len(payload):
        raise FormatError(f"dense: {len(payload)} bytes, P ends at {unary_at}", _STREAM)
    sizes = [(base.size, low_bits)]
    (index,) = unpack_arrays(payload[lows_at:rests_at], payload[unary_at:], sizes)
    if (index >= num_symbols).any():
        raise FormatError(f"dense: index {int(index.max())} of {num_symbols} symbols", _POSITION)
    symbols = listed[index]
    if flags & 1:
        symbols = (symbols + dense_symbols(base, unit_bytes)) % 256
    rests = np.frombuffer(payload[rests_at:unary_at], np.uint8).reshape(-1, unit_bytes - 1)
    return dense_join(symbols, rests, unit_bytes)
