"""The canonical encoder (docs/wire-format.md section 10) on the records that the device holds.

The device counts, sums and packs; the host sees counts and sums, chooses, and writes headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from gymfast.delta.backends import BlockParams
from gymfast.delta.backends.triton_arrays import PIECE, Array, Arrays, piece_rows, upload
from gymfast.delta.backends.triton_dense import DenseBlock, dense_block
from gymfast.delta.backends.triton_diff import Diff, Group
from gymfast.delta.backends.triton_kernels_pack import copy_block_kernel, pack_signs_kernel
from gymfast.delta.records import PROFILES, Mode
from gymfast.delta.varint import encode_varint

_INVERTED, _HAS_FLIPS = 1 << 5, 1 << 7
_COPY_TILE = 1024


@dataclass
class Payload:
    """A candidate: header, arrays of L and U in order, and the k signs or P between them."""

    mode: Mode
    header: bytes = b""
    arrays: list[Array] = field(default_factory=list)
    signs_start: int = 0
    num_signs: int = 0
    middle_bytes: int = 0
    raw_bytes: int = 0
    dense: DenseBlock | None = None

    @property
    def lows_bytes(self) -> int:
        """Bytes of L."""
        return (sum(array.size * array.low_bits for array in self.arrays) + 7) // 8

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload."""
        unary = (sum(array.unary_bits for array in self.arrays) + 7) // 8
        return len(self.header) + self.lows_bytes + self.middle_bytes + unary + self.raw_bytes


@dataclass(frozen=True)
class _Values:
    """The arrays that a ValGroup may be made of."""

    exceptions: Array
    sizes: Array
    all: Array
    flips: Array


def sparse_modes(profile: int, n: int, k: int) -> list[Mode]:
    """The sparse candidates of a block in their order (section 10)."""
    name = PROFILES[profile]
    if name == "fast":
        return [Mode.FAST]
    by_class = Mode.BALANCED if name == "auto" and 512 * k >= n else Mode.SMALL
    return [by_class, Mode.FAST] if k <= 2048 else [by_class]


class SectionEncoder:
    """Chooses and writes the payloads of one section."""

    def __init__(self, diff: Diff, params: BlockParams) -> None:
        old, new = diff.base, diff.new
        self._new, self._diff, self._section = new, diff, diff.section
        self._positions: dict[int, Array] = {}
        self._values: dict[int, _Values] = {}
        unit_bytes = self._section.geometry.unit_bytes
        self._modes: list[list[Mode]] = []
        dense: list[int] = []
        for i, block in enumerate(diff.blocks):
            modes = sparse_modes(params.profile, block.num_places, block.k) if block.k else []
            if not params.has_base and 8 * block.k >= block.num_places:
                modes = []
            self._modes.append(modes)
            if block.k and unit_bytes > 1 and 4 * block.k >= block.num_places:
                dense.append(i)
        self._dense = {i: dense_block(old, new, self._section, i, params.has_base) for i in dense}
        self._measure()

    def _measure(self) -> None:
        """Places all arrays that a candidate may need in x and finds their parameters."""
        by_position: dict[int, Group] = {}
        by_value: dict[int, Group] = {}
        for i, modes in enumerate(self._modes):
            block = self._diff.blocks[i]
            classes = self._diff.classes[i] if self._diff.classes else []
            classes = [group for group in classes if group.k]
            if Mode.FAST in modes or Mode.BALANCED in modes:
                by_position[block.start] = block
            if Mode.FAST in modes:
                by_value[block.start] = block
            if Mode.SMALL in modes:
                by_position |= {group.start: group for group in classes}
            if Mode.SMALL in modes or Mode.BALANCED in modes:
                by_value |= {group.start: group for group in classes}
        self._diff.list_values([g for g in by_position.values() if g.is_inverted])
        arrays = [self._position_array(group) for group in by_position.values()]
        for group, values in zip(by_value.values(), self._value_arrays(by_value), strict=True):
            self._values[group.start] = values
            arrays += [values.exceptions, values.sizes, values.all, values.flips]
        self._arrays = Arrays(self._diff.x, arrays)

    def _position_array(self, group: Group) -> Array:
        if group.is_inverted:
            array = Array(self._diff.gap_starts[group.start], group.num_places - group.k)
        else:
            array = Array(group.start, group.k, -1)
        self._positions[group.start] = array
        return array

    def _value_arrays(self, groups: dict[int, Group]) -> list[_Values]:
        before, counts = self._diff.flag_counts(list(groups.values()))
        _, v, exceptions, sizes, flips, *_ = self._diff.region_starts
        found = []
        for i, group in enumerate(groups.values()):
            num_exceptions, num_flips = (int(n) for n in counts[:, i])
            at, flips_at = (int(n) for n in before[:, i])
            found.append(
                _Values(
                    Array(exceptions + at, num_exceptions, group.start - 1),
                    Array(sizes + at, num_exceptions),
                    Array(v + group.start, group.k),
                    Array(flips + flips_at, num_flips, group.start - 1),
                )
            )
        return found

    def choose(self) -> list[Payload]:
        """The smallest candidate of every block, the earlier on a tie."""
        return [self._choose(i, block) for i, block in enumerate(self._diff.blocks)]

    def _choose(self, i: int, block: Group) -> Payload:
        if not block.k:
            return Payload(Mode.UNCHANGED)
        candidates = [self._candidate(mode, i, block) for mode in self._modes[i]]
        unit_bytes = self._section.geometry.unit_bytes
        if i in self._dense:
            dense = self._dense[i]
            rests = block.num_places * (unit_bytes - 1)
            candidates.append(
                Payload(Mode.DENSE, dense.header, [dense.array], middle_bytes=rests, dense=dense)
            )
        candidates.append(Payload(Mode.RAW, raw_bytes=block.num_places * unit_bytes))
        return min(candidates, key=lambda payload: payload.size_bytes)

    def _candidate(self, mode: Mode, i: int, block: Group) -> Payload:
        if mode is Mode.FAST:
            groups = [block]
            payload = Payload(mode, signs_start=block.start)
        else:
            groups = [group for group in self._diff.classes[i] if group.k]
            payload = Payload(mode, signs_start=groups[0].start)
        payload.num_signs = block.k
        payload.middle_bytes = (block.k + 7) // 8
        if mode is Mode.BALANCED:
            self._add_positions(payload, block)
        if mode is not Mode.FAST:
            classes = self._diff.classes[i]
            mask = sum(1 << number for number, group in enumerate(classes) if group.k)
            payload.header += mask.to_bytes(2, "little")
        for group in groups:
            if mode is Mode.BALANCED:
                payload.header += encode_varint(group.k)
            else:
                self._add_positions(payload, group)
            self._add_values(payload, self._values[group.start])
        return payload

    def _add_positions(self, payload: Payload, group: Group) -> None:
        array = self._positions[group.start]
        payload.header += encode_varint(group.k)
        payload.header += bytes((array.low_bits | _INVERTED * group.is_inverted,))
        payload.arrays.append(array)

    @staticmethod
    def _add_values(payload: Payload, values: _Values) -> None:
        q, header = 0, b""
        exceptions, sizes = values.exceptions, values.sizes
        if exceptions.size:
            count = encode_varint(exceptions.size)
            cost = exceptions.bits + sizes.bits + 8 + 8 * len(count)
            if cost <= values.all.bits:
                q = sizes.low_bits | 1 << 5
                header = count + bytes((exceptions.low_bits,))
                payload.arrays += [exceptions, sizes]
            else:
                q = values.all.low_bits | 2 << 5
                payload.arrays.append(values.all)
        if values.flips.size:
            q |= _HAS_FLIPS
            header += encode_varint(values.flips.size) + bytes((values.flips.low_bits,))
            payload.arrays.append(values.flips)
        payload.header += bytes((q,)) + header

    def write(self, payloads: Sequence[Payload], checks: Sequence[int]) -> bytes:
        """Block table and payloads of the section."""
        table = b""
        for payload, check in zip(payloads, checks, strict=True):
            table += bytes((payload.mode,))
            if payload.mode is not Mode.UNCHANGED:
                table += encode_varint(payload.size_bytes) + check.to_bytes(4, "little")
        total = len(table) + sum(payload.size_bytes for payload in payloads)
        words = torch.zeros(total // 4 + 3, dtype=torch.int32, device=self._new.device)
        starts = self._pack(words, payloads, len(table))
        body: NDArray[np.uint8] = words.view(torch.uint8)[:total].cpu().numpy()
        body[: len(table)] = np.frombuffer(table, np.uint8)
        for payload, start in zip(payloads, starts, strict=True):
            end = start + len(payload.header)
            body[start:end] = np.frombuffer(payload.header, np.uint8)
        return body.tobytes()

    def _pack(self, words: torch.Tensor, payloads: Sequence[Payload], at: int) -> list[int]:
        """Launches the writers of L, S, P, U and raw units; where each payload starts."""
        chosen: list[tuple[Array, int, int]] = []
        signs: list[tuple[int, int, int]] = []
        starts = []
        for i, payload in enumerate(payloads):
            starts.append(at)
            low_bit = 8 * (at + len(payload.header))
            middle = at + len(payload.header) + payload.lows_bytes
            unary_bit = 8 * (middle + payload.middle_bytes)
            placed = []
            for array in payload.arrays:
                placed.append((array, low_bit, unary_bit))
                low_bit += array.size * array.low_bits
                unary_bit += array.unary_bits
            if payload.dense is not None:
                payload.dense.write(self._new, self._section, i, words, placed, middle)
            else:
                chosen += placed
            if payload.num_signs:
                signs.append((payload.signs_start, payload.num_signs, 8 * middle))
            if payload.mode is Mode.RAW:
                self._copy(words, i, at)
            at += payload.size_bytes
        self._arrays.pack(words, chosen)
        self._pack_signs(words, signs)
        return starts

    def _pack_signs(self, words: torch.Tensor, signs: list[tuple[int, int, int]]) -> None:
        if not signs:
            return
        starts, sizes, bits = np.array(signs, np.int64).T
        rows, owner = piece_rows(starts, sizes)
        rows[:, 5] = bits[owner] + rows[:, 0] - starts[owner]
        pieces = upload(rows, words.device)
        pack_signs_kernel[(rows.shape[0],)](self._diff.records, pieces, words, PIECE)

    def _copy(self, words: torch.Tensor, i: int, at: int) -> None:
        section = self._section
        copy_block_kernel[(section.tiles_per_block(_COPY_TILE),)](
            self._new,
            words.view(torch.uint8),
            section.first_block + i,
            at,
            *section.shape,
            section.geometry.unit_bytes,
            section.is_flat,
            _COPY_TILE,
        )
