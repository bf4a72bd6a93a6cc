"""Apply on the device: everything is decoded and checked before the first unit is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gymfast.delta.backends import BlockParams
from gymfast.delta.backends.triton_arrays import PIECE, upload
from gymfast.delta.backends.triton_headers import (
    POSITION,
    STREAM,
    find_streams,
    read_header,
)
from gymfast.delta.backends.triton_kernels_apply import (
    compare_block_kernel,
    step_kernel,
    write_block_kernel,
)
from gymfast.delta.backends.triton_kernels_decode import (
    exceptions_kernel,
    places_kernel,
    plain_values_kernel,
)
from gymfast.delta.backends.triton_kernels_dense import join_kernel
from gymfast.delta.backends.triton_kernels_diff import scatter_kernel
from gymfast.delta.backends.triton_positions import ClassCounts
from gymfast.delta.backends.triton_section import Section, column_keys, fold32
from gymfast.delta.backends.triton_values import ArrayRows, Coded, cut, read_values
from gymfast.delta.frame_fields import BlockTable, read_block_table
from gymfast.delta.records import Mode
from gymfast.errors import ChecksumError, FormatError

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
STEP = 128
_TILE = 1024
_RESULT_CHECK = 58


@dataclass
class _Result:
    """What a section changes: digest differences and changed units by block, and the writes."""

    digests: I64
    counts: I64
    whole: list[tuple[int, torch.Tensor]]
    scattered: tuple[torch.Tensor, torch.Tensor] | None = None


def apply_section(
    units: torch.Tensor,
    body: bytes | memoryview,
    section: Section,
    params: BlockParams,
    digests: U64,
) -> int:
    """Units changed; see Backend.apply_blocks."""
    decoder = _Decoder(units, body, section, params)
    result = decoder.decode()
    first = section.first_block
    rows = digests[first : first + section.num_blocks].copy()
    rows += result.digests.view(np.uint64)
    decoder.check_results(rows)
    decoder.write(result)
    digests[first : first + section.num_blocks] = rows
    return int(result.counts.sum())


class _Decoder:
    def __init__(
        self, units: torch.Tensor, body: bytes | memoryview, section: Section, params: BlockParams
    ) -> None:
        geometry = section.geometry
        self._units, self._section, self._params = units, section, params
        self._unit_bytes = geometry.unit_bytes
        where = f"blocks from {section.first_block}"
        self._table: BlockTable = read_block_table(
            body, section.num_blocks, geometry.unit_bytes, where=where
        )
        self._sizes = section.block_sizes()
        self._data = np.frombuffer(body, np.uint8)
        self._payloads = memoryview(self._table.payloads)
        ends = np.cumsum(self._table.payload_bytes)
        self._starts = (ends - self._table.payload_bytes).tolist()

    def decode(self) -> _Result:
        """All new units, not yet written."""
        by_class = [i for i, m in enumerate(self._table.modes) if m in (Mode.BALANCED, Mode.SMALL)]
        self._classes = ClassCounts(self._units, self._section, self._params, by_class)
        coded = self._read_headers()
        self._check_raw()
        table_bytes = self._data.size - len(self._payloads)
        payloads = np.array(self._data[table_bytes:])
        self._body = torch.from_numpy(payloads).to(self._units.device)
        device = self._units.device
        errors = torch.zeros(self._section.num_blocks, dtype=torch.int32, device=device)
        values = read_values(self._body, coded, errors)
        num_blocks = self._section.num_blocks
        result = _Result(np.zeros((num_blocks, 2), np.int64), np.zeros(num_blocks, np.int64), [])
        sparse = [payload for payload in coded if payload.header.mode is not Mode.DENSE]
        self._decode_sparse(coded, sparse, values, errors, result)
        self._decode_dense(coded, values, result)
        for i, mode in enumerate(self._table.modes):
            if mode is Mode.RAW:
                part = self._body[self._starts[i] :][: self._table.payload_bytes[i]].clone()
                self._compare(i, part.view(self._units.dtype), result)
        return result

    def _read_headers(self) -> list[Coded]:
        coded = []
        for i, mode in enumerate(self._table.modes):
            if mode in (Mode.UNCHANGED, Mode.RAW):
                continue
            at = self._starts[i]
            payload = self._payloads[at : at + self._table.payload_bytes[i]]
            classes = self._classes.by_block.get(i, [])
            header = read_header(mode, payload, self._sizes[i], self._unit_bytes, classes)
            coded.append(Coded(i, header, at, find_streams(payload, header)))
        return coded

    def _check_raw(self) -> None:
        for mode, size, found in zip(
            self._table.modes, self._sizes, self._table.payload_bytes, strict=True
        ):
            if mode is Mode.RAW and found != size * self._unit_bytes:
                raise FormatError(f"raw: {found} bytes for {size} units", STREAM)

    def _decode_sparse(
        self,
        coded: Sequence[Coded],
        sparse: Sequence[Coded],
        values: torch.Tensor,
        errors: torch.Tensor,
        result: _Result,
    ) -> None:
        device = values.device
        sums = torch.nn.functional.pad(torch.cumsum(values + 1, 0), (1, 0))
        sizes = [payload.header.num_changes for payload in sparse]
        starts = (np.cumsum(sizes, dtype=np.int64) - sizes).tolist()
        total = sum(sizes)
        places = torch.zeros(total, dtype=torch.int32, device=device)
        v = torch.zeros_like(places)
        flips = torch.zeros(total, dtype=torch.int8, device=device)
        rows = ArrayRows(coded, dict(zip((p.index for p in sparse), starts, strict=True)))
        half = 1 << (8 * self._unit_bytes - 1)
        for is_flip, listed in ((False, rows.exceptions), (True, rows.flips)):
            pieces = cut(listed)
            if pieces.size:
                exceptions_kernel[(pieces.shape[0],)](
                    values, sums, upload(pieces, device), v, flips, errors, half, is_flip, PIECE
                )
        pieces = cut(rows.plain, {4: -1})
        if pieces.size:
            plain_values_kernel[(pieces.shape[0],)](
                values, upload(pieces, device), v, errors, half, PIECE
            )
        pieces = cut(rows.places)
        if pieces.size:
            places_kernel[(pieces.shape[0],)](sums, upload(pieces, device), places, errors, PIECE)
        _raise_first(errors)
        self._classes.resolve_ranks(sparse, starts, places)
        self._classes.sort_by_class(sparse, starts, places)
        if total:
            self._step(sparse, starts, (places, v, flips), result)

    def _step(
        self,
        sparse: Sequence[Coded],
        starts: Sequence[int],
        changes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        result: _Result,
    ) -> None:
        """New units of all changes, and what they do to the digests."""
        section, device = self._section, self._units.device
        pieces = cut(
            [
                (
                    start,
                    payload.header.num_changes,
                    section.first_block + payload.index,
                    8 * (payload.at + payload.streams.middle),
                    payload.index,
                )
                for payload, start in zip(sparse, starts, strict=True)
            ],
            {3: -1},
        )
        offsets = torch.empty(changes[0].numel(), dtype=torch.int64, device=device)
        fresh = torch.empty(changes[0].numel(), dtype=self._units.dtype, device=device)
        digests = torch.empty((pieces.shape[0], 2), dtype=torch.int64, device=device)
        counts = torch.empty(pieces.shape[0], dtype=torch.int64, device=device)
        step_kernel[(pieces.shape[0],)](
            self._units,
            self._body,
            upload(pieces, device),
            *changes,
            offsets,
            fresh,
            digests,
            counts,
            column_keys(device),
            *section.shape,
            self._unit_bytes,
            section.is_flat,
            PIECE,
        )
        np.add.at(result.digests, pieces[:, 4], digests.cpu().numpy())
        np.add.at(result.counts, pieces[:, 4], counts.cpu().numpy())
        result.scattered = offsets, fresh

    def _decode_dense(self, coded: Sequence[Coded], values: torch.Tensor, result: _Result) -> None:
        section, at = self._section, 0
        for payload in coded:
            header, size = payload.header, sum(m for m, _ in payload.header.arrays)
            index, at = values[at : at + size], at + size
            if header.mode is not Mode.DENSE:
                continue
            most = int(index.max())
            if most >= len(header.symbols):
                raise FormatError(f"dense: index {most} of {len(header.symbols)} symbols", POSITION)
            listed = np.zeros(256, np.uint8)
            listed[: len(header.symbols)] = np.frombuffer(header.symbols, np.uint8)
            fresh = torch.empty(size, dtype=self._units.dtype, device=values.device)
            join_kernel[(section.tiles_per_block(_TILE),)](
                self._units,
                index,
                upload(listed, values.device),
                self._body[payload.at + payload.streams.middle :],
                fresh,
                section.first_block + payload.index,
                *section.shape,
                self._unit_bytes,
                section.is_flat,
                header.uses_base,
                _TILE,
            )
            self._compare(payload.index, fresh, result)

    def _compare(self, i: int, fresh: torch.Tensor, result: _Result) -> None:
        """Notes a block whose units are all given."""
        section, device = self._section, fresh.device
        num_tiles = section.tiles_per_block(_TILE)
        digests = torch.empty((num_tiles, 2), dtype=torch.int64, device=device)
        counts = torch.empty(num_tiles, dtype=torch.int64, device=device)
        compare_block_kernel[(num_tiles,)](
            self._units,
            fresh,
            digests,
            counts,
            column_keys(device),
            section.first_block + i,
            *section.shape,
            self._unit_bytes,
            section.is_flat,
            _TILE,
        )
        result.digests[i] = digests.sum(0).cpu().numpy()
        result.counts[i] = int(counts.sum())
        result.whole.append((i, fresh))

    def check_results(self, rows: U64) -> None:
        """Raises ChecksumError 58 if a block does not become what the frame says (R26)."""
        for i, mode in enumerate(self._table.modes):
            found, stated = fold32(rows[i]), self._table.checks[i]
            if mode is not Mode.UNCHANGED and found != stated:
                raise ChecksumError(
                    f"block {self._section.first_block + i}: the result has digest {found:08x}, "
                    f"the frame says {stated:08x}: damaged frame, or a base whose bytes are not "
                    "those of its digest",
                    _RESULT_CHECK,
                )

    def write(self, result: _Result) -> None:
        """Writes what was decoded and checked."""
        section = self._section
        if result.scattered is not None:
            offsets, fresh = result.scattered
            count = offsets.numel()
            scatter_kernel[(-(-count // STEP),)](self._units, offsets, fresh, count, STEP)
        for i, fresh in result.whole:
            write_block_kernel[(section.tiles_per_block(_TILE),)](
                self._units,
                fresh,
                section.first_block + i,
                *section.shape,
                section.is_flat,
                _TILE,
            )


def _raise_first(errors: torch.Tensor) -> None:
    number = int(errors.max())
    if number:
        block = int(errors.argmax())
        raise FormatError(
            f"block {block} of the section: a position or value is out of range", number
        )
