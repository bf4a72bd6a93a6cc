"""The canonical encoder of one block: sections 5, 6 and 10 of docs/wire-format.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gymfast.delta.backends import BlockParams
from gymfast.delta.backends.reference_rice import (
    I64,
    Array,
    array_bits,
    best_parameter,
    pack_bits,
    pack_lows,
    pack_unary,
    to_gaps,
)
from gymfast.delta.backends.reference_values import (
    NUM_CLASSES,
    Steps,
    classes_of,
    dense_rests,
    dense_symbols,
    steps_between,
)
from gymfast.delta.records import PROFILES, Mode
from gymfast.delta.varint import encode_varint

_INVERTED = 1 << 5
_HAS_FLIPS = 1 << 7


@dataclass(frozen=True)
class _Group:
    """Header bytes and arrays of a PosGroup or ValGroup."""

    header: bytes
    arrays: list[Array]


@dataclass(frozen=True)
class _Changes:
    """The changed units of a block: positions [k], classes of all units [n], steps [k]."""

    positions: I64
    classes: I64
    steps: Steps

    def of_class(self, number: int) -> I64:
        """Indices of the changes whose base value is of this class."""
        return np.flatnonzero(self.classes[self.positions] == number)


def encode_block(base: I64, new: I64, unit_bytes: int, params: BlockParams) -> tuple[Mode, bytes]:
    """Mode and payload of a block; the smallest candidate of the profile, the earlier on a tie."""
    positions = np.flatnonzero(base != new)
    n, k = base.size, positions.size
    if k == 0:
        return Mode.UNCHANGED, b""
    classes = classes_of(base, unit_bytes, params.class_shift, params.class_base)
    steps = steps_between(base[positions], new[positions], unit_bytes)
    changes = _Changes(positions, classes, steps)
    candidates = [
        (mode, _encode_sparse(mode, changes))
        for mode in sparse_candidates(params.profile, n, k)
        if params.has_base or 8 * k < n
    ]
    if unit_bytes > 1 and 4 * k >= n:
        candidates.append((Mode.DENSE, _encode_dense(base, new, unit_bytes, params.has_base)))
    candidates.append((Mode.RAW, new.astype(f"<u{unit_bytes}").tobytes()))
    return min(candidates, key=lambda candidate: len(candidate[1]))


def sparse_candidates(profile: int, n: int, k: int) -> list[Mode]:
    """The sparse modes that the canonical encoder tries for k changes of n units."""
    name = PROFILES[profile]
    if name == "fast":
        return [Mode.FAST]
    by_class = Mode.BALANCED if name == "auto" and 512 * k >= n else Mode.SMALL
    return [by_class, Mode.FAST] if k <= 2048 else [by_class]


def _encode_sparse(mode: Mode, changes: _Changes) -> bytes:
    """Payload of mode 1, 2 or 3."""
    if mode is Mode.FAST:
        groups, order = _fast_groups(changes)
    elif mode is Mode.BALANCED:
        groups, order = _balanced_groups(changes)
    else:
        groups, order = _small_groups(changes)
    header = b"".join(group.header for group in groups)
    arrays = [array for group in groups for array in group.arrays]
    signs = pack_bits(changes.steps.neg[order].astype(np.uint8))
    return header + pack_lows(arrays) + signs + pack_unary(arrays)


def _fast_groups(changes: _Changes) -> tuple[list[_Group], I64]:
    groups = [_position_group(changes.positions, changes.classes.size), _value_group(changes.steps)]
    return groups, np.arange(changes.positions.size)


def _balanced_groups(changes: _Changes) -> tuple[list[_Group], I64]:
    by_class = _by_class(changes)
    groups = [
        _position_group(changes.positions, changes.classes.size),
        _Group(_class_mask(by_class), []),
    ]
    for index in by_class.values():
        groups.append(_Group(encode_varint(index.size), []))
        groups.append(_value_group(changes.steps.take(index)))
    return groups, np.concatenate(list(by_class.values()))


def _small_groups(changes: _Changes) -> tuple[list[_Group], I64]:
    by_class = _by_class(changes)
    groups = [_Group(_class_mask(by_class), [])]
    for number, index in by_class.items():
        is_member = changes.classes == number
        ranks = np.cumsum(is_member)[changes.positions[index]] - 1
        groups.append(_position_group(ranks, int(is_member.sum())))
        groups.append(_value_group(changes.steps.take(index)))
    return groups, np.concatenate(list(by_class.values()))


def _by_class(changes: _Changes) -> dict[int, I64]:
    """Indices of the changes of each class that has any, ascending."""
    all_classes = ((number, changes.of_class(number)) for number in range(NUM_CLASSES))
    return {number: index for number, index in all_classes if index.size}


def _class_mask(by_class: dict[int, I64]) -> bytes:
    return sum(1 << number for number in by_class).to_bytes(2, "little")


def _position_group(positions: I64, num_places: int) -> _Group:
    """PosGroup of section 5.3: changed places among num_places."""
    inverted = 2 * positions.size > num_places
    listed = np.setdiff1d(np.arange(num_places), positions) if inverted else positions
    gaps = to_gaps(listed)
    low_bits = best_parameter(gaps)
    header = encode_varint(positions.size) + bytes((low_bits | _INVERTED * inverted,))
    return _Group(header, [(gaps, low_bits)])


def _value_group(steps: Steps) -> _Group:
    """ValGroup of section 5.3."""
    value_mode, low_bits, header, arrays = _code_values(steps.v)
    q = low_bits | value_mode << 5
    flips = np.flatnonzero(steps.flip)
    if flips.size:
        q |= _HAS_FLIPS
        gaps = to_gaps(flips)
        arrays.append((gaps, best_parameter(gaps)))
        header += encode_varint(flips.size) + bytes((arrays[-1][1],))
    return _Group(bytes((q,)) + header, arrays)


def _code_values(v: I64) -> tuple[int, int, bytes, list[Array]]:
    """value_mode, l, the bytes behind q and the arrays of the values of a ValGroup."""
    exceptions = np.flatnonzero(v)
    if exceptions.size == 0:
        return 0, 0, b"", []
    low_bits = best_parameter(v)
    gaps, rest = to_gaps(exceptions), v[exceptions] - 1
    gap_bits, rest_bits = best_parameter(gaps), best_parameter(rest)
    count = encode_varint(exceptions.size)
    cost = array_bits(gaps, gap_bits) + array_bits(rest, rest_bits) + 8 + 8 * len(count)
    if cost <= array_bits(v, low_bits):
        return 1, rest_bits, count + bytes((gap_bits,)), [(gaps, gap_bits), (rest, rest_bits)]
    return 2, low_bits, b"", [(v, low_bits)]


def _encode_dense(base: I64, new: I64, unit_bytes: int, has_base: bool) -> bytes:
    """Payload of mode 4."""
    symbols = dense_symbols(new, unit_bytes)
    if has_base:
        symbols = (symbols - dense_symbols(base, unit_bytes)) % 256
    counts = np.bincount(symbols, minlength=256)
    listed = [s for s in sorted(range(256), key=lambda s: (-counts[s], s)) if counts[s]]
    index_of = np.zeros(256, np.int64)
    index_of[listed] = np.arange(len(listed))
    index = index_of[symbols]
    low_bits = min(range(8), key=lambda bits: (array_bits(index, bits), bits))
    header = bytes((int(has_base), len(listed) - 1, *listed, low_bits))
    arrays = [(index, low_bits)]
    rests = dense_rests(new, unit_bytes).tobytes()
    return header + pack_lows(arrays) + rests + pack_unary(arrays)
