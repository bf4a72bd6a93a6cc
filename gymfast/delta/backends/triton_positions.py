"""From places to positions: ranks within a class (mode small), sorting by class (balanced)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gymfast.delta.backends import BlockParams
from gymfast.delta.backends.triton_arrays import PIECE, upload
from gymfast.delta.backends.triton_headers import COUNT
from gymfast.delta.backends.triton_kernels_apply import (
    change_classes_kernel,
    map_kernel,
    rank_positions_kernel,
    sort_kernel,
    unit_classes_kernel,
)
from gymfast.delta.backends.triton_section import Section
from gymfast.delta.backends.triton_values import Coded, cut
from gymfast.delta.records import Mode
from gymfast.errors import FormatError

I64 = NDArray[np.int64]
_TILE = 1024


class ClassCounts:
    """Units of each class of the blocks that need them, by tile on the device."""

    def __init__(
        self, units: torch.Tensor, section: Section, params: BlockParams, indices: Sequence[int]
    ) -> None:
        self.indices = list(indices)
        self._section, self._units = section, units
        self._per_block = section.tiles_per_block(_TILE)
        self._params = (params.class_shift, params.class_base, section.geometry.unit_bytes)
        blocks = np.array(self.indices, np.int64) + section.first_block
        self._blocks = upload(blocks, units.device)
        shape = (len(self.indices), self._per_block, 16)
        self._counts = torch.empty(shape, dtype=torch.int32, device=units.device)
        if self.indices:
            unit_classes_kernel[(len(self.indices) * self._per_block,)](
                units,
                self._blocks,
                self._counts,
                self._per_block,
                *section.shape,
                *self._params,
                section.is_flat,
                _TILE,
            )
        totals = self._counts.sum(1).cpu().tolist()
        self.by_block: dict[int, list[int]] = dict(zip(self.indices, totals, strict=True))

    def resolve_ranks(
        self, payloads: Sequence[Coded], starts: Sequence[int], places: torch.Tensor
    ) -> None:
        """Writes positions over the ranks of the changes of payloads of mode small."""
        small = [(p, s) for p, s in zip(payloads, starts, strict=True) if _is(p, Mode.SMALL)]
        if not small:
            return
        device = places.device
        lists = self._counts.permute(0, 2, 1).reshape(-1)
        ends = torch.cumsum(lists, 0, dtype=torch.int64)
        rank_starts = (ends - lists).view(len(self.indices), 16, -1).permute(0, 2, 1).contiguous()
        list_starts = rank_starts[:, 0].cpu().numpy()
        rows: list[tuple[int, ...]] = []
        for payload, start in small:
            block = self.indices.index(payload.index)
            change = start
            for group, number in zip(
                payload.header.groups[::2], payload.header.classes, strict=True
            ):
                rows.append((change, group.k, int(list_starts[block, number])))
                change += group.k
        total = len(self.indices) * self._section.geometry.tile_rows
        total *= self._section.geometry.tile_cols
        change_at = torch.zeros(total, dtype=torch.int32, device=device)
        pieces = cut(rows)
        map_kernel[(pieces.shape[0],)](places, upload(pieces, device), change_at, PIECE)
        rank_positions_kernel[(len(self.indices) * self._per_block,)](
            self._units,
            self._blocks,
            rank_starts,
            change_at,
            places,
            self._per_block,
            *self._section.shape,
            *self._params,
            self._section.is_flat,
            _TILE,
        )

    def sort_by_class(
        self, payloads: Sequence[Coded], starts: Sequence[int], places: torch.Tensor
    ) -> None:
        """Sorts the positions of payloads of mode balanced by class.

        Raises FormatError 53 if the header counts other changes in a class (R23).
        """
        balanced = [(p, s) for p, s in zip(payloads, starts, strict=True) if _is(p, Mode.BALANCED)]
        if not balanced:
            return
        section, device = self._section, places.device
        pieces = cut(
            [
                (start, payload.header.num_changes, section.first_block + payload.index, i)
                for i, (payload, start) in enumerate(balanced)
            ]
        )
        rows, shape = upload(pieces, device), (*section.shape, *self._params, section.is_flat)
        counts_out = torch.empty((pieces.shape[0], 16), dtype=torch.int32, device=device)
        grid = (pieces.shape[0],)
        change_classes_kernel[grid](self._units, rows, places, counts_out, *shape, PIECE)
        counts = counts_out.cpu().numpy().astype(np.int64)
        targets = np.zeros_like(counts)
        for i, (payload, start) in enumerate(balanced):
            mine = pieces[:, 3] == i
            totals = counts[mine].sum(0)
            _check_counts(payload, totals)
            class_starts = start + np.cumsum(totals) - totals
            targets[mine] = class_starts + np.cumsum(counts[mine], 0) - counts[mine]
        source = places.clone()
        sort_kernel[grid](self._units, rows, source, upload(targets, device), places, *shape, PIECE)


def _is(payload: Coded, mode: Mode) -> bool:
    return payload.header.mode is mode


def _check_counts(payload: Coded, totals: I64) -> None:
    stated = np.zeros(16, np.int64)
    stated[payload.header.classes] = [group.k for group in payload.header.groups[1:]]
    if not np.array_equal(stated, totals):
        raise FormatError(
            f"changed units by class {totals.tolist()}, header says {stated.tolist()}", COUNT
        )
