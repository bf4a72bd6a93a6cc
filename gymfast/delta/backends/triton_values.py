"""The values of all split-Rice arrays of a section, selected in parallel from L and U."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gymfast.delta.backends.triton_arrays import PIECE, piece_rows, upload
from gymfast.delta.backends.triton_headers import STREAM, Header, PosGroup, Streams
from gymfast.delta.backends.triton_kernels_decode import (
    COLUMNS,
    count_ones_kernel,
    select_kernel,
    values_kernel,
)
from gymfast.delta.records import Mode
from gymfast.errors import FormatError

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Coded:
    """A sparse or dense payload: index of its block in the section, header, where it starts."""

    index: int
    header: Header
    at: int
    streams: Streams


def cut(rows: list[tuple[int, ...]], moving: dict[int, int] | None = None) -> I64:
    """Pieces of arrays: rows of (start, size, more), cut into runs of PIECE.

    `moving` maps a column to the column that holds how far it moves per value, or to -1 for one.
    """
    table = np.zeros((len(rows), COLUMNS.value), np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    pieces, owner = piece_rows(table[:, 0], table[:, 1])
    done = pieces[:, 0] - table[owner, 0]
    table = table[owner]
    table[:, :2] = pieces[:, :2]
    for column, step in (moving or {}).items():
        table[:, column] += done * (table[:, step] if step >= 0 else 1)
    return table


def read_values(body: torch.Tensor, payloads: list[Coded], errors: torch.Tensor) -> torch.Tensor:
    """The values of all arrays of all payloads in their order, int64.

    A value of 2^32 or more is noted in errors. Raises FormatError 55 if a U does not hold just as
    many ones as there are values (R25).
    """
    unary = [
        (payload.at + payload.streams.unary, payload.streams.end - payload.streams.unary, i)
        for i, payload in enumerate(payloads)
    ]
    pieces = cut([(start, size, start, 0, i) for start, size, i in unary])
    counts = _count_ones(body, pieces)
    expected = np.array([sum(m for m, _ in payload.header.arrays) for payload in payloads])
    found = np.zeros(len(payloads), np.int64)
    np.add.at(found, pieces[:, 4], counts)
    for payload, ones, values in zip(payloads, found.tolist(), expected.tolist(), strict=True):
        if ones != values:
            raise FormatError(f"U of block {payload.index}: {ones} ones, {values} values", STREAM)
    total = int(expected.sum())
    ones_at = torch.empty(total, dtype=torch.int64, device=body.device)
    pieces[:, 3] = np.cumsum(counts) - counts
    values_of = torch.empty_like(ones_at)
    if total:
        select_kernel[(pieces.shape[0],)](body, upload(pieces, body.device), ones_at, PIECE)
        arrays = cut(_array_rows(payloads), {3: 4})
        rows = upload(arrays, body.device)
        values_kernel[(arrays.shape[0],)](body, rows, ones_at, values_of, errors, PIECE)
    return values_of


def _count_ones(body: torch.Tensor, pieces: I64) -> I64:
    counts = torch.empty(pieces.shape[0], dtype=torch.int64, device=body.device)
    if pieces.size:
        count_ones_kernel[(pieces.shape[0],)](body, upload(pieces, body.device), counts, PIECE)
    result: I64 = counts.cpu().numpy()
    return result


def _array_rows(payloads: list[Coded]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    value = 0
    for payload in payloads:
        first, bit = value, 8 * (payload.at + payload.streams.lows)
        for size, low_bits in payload.header.arrays:
            rows.append((value, size, first, bit, low_bits, payload.index))
            value += size
            bit += size * low_bits
    return rows


class ArrayRows:
    """Which arrays of the payloads hold places, exceptions, values and flips, as rows of pieces."""

    def __init__(self, coded: Sequence[Coded], change_starts: dict[int, int]) -> None:
        self.places: list[tuple[int, ...]] = []
        self.exceptions: list[tuple[int, ...]] = []
        self.plain: list[tuple[int, ...]] = []
        self.flips: list[tuple[int, ...]] = []
        self._value = 0
        for payload in coded:
            if payload.header.mode is Mode.DENSE:
                self._value += payload.header.dense_array[0]
                continue
            position_at = value_at = change_starts[payload.index]
            for group in payload.header.groups:
                if isinstance(group, PosGroup):
                    self._add_places(group, position_at, payload.index)
                    position_at += group.k
                    continue
                if group.exceptions:
                    count = group.exceptions[0]
                    self._add_list(self.exceptions, count, value_at, payload.index, group.k)
                    self._value += count
                elif group.value_mode == 2:
                    row = (self._value, group.k, 0, 0, value_at, payload.index)
                    self.plain.append(row)
                    self._value += group.k
                if group.flips:
                    self._add_list(self.flips, group.flips[0], value_at, payload.index, group.k)
                value_at += group.k

    def _add_places(self, group: PosGroup, start: int, index: int) -> None:
        size = group.arrays()[0][0]
        array = (start, self._value, size, index, group.num_places, int(group.is_inverted), start)
        self.places.append((start, group.k, *array))
        self._value += size

    def _add_list(
        self, rows: list[tuple[int, ...]], count: int, start: int, index: int, k: int
    ) -> None:
        rows.append((self._value, count, self._value, count, start, index, k))
        self._value += count
