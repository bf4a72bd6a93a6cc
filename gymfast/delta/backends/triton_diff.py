"""The changes of a section as lists of records on the device, and their counts on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gymfast.delta.backends import BlockParams
from gymfast.delta.backends.triton_arrays import PIECE, PIECE_FIELDS, piece_rows, upload
from gymfast.delta.backends.triton_kernels_diff import (
    compact_kernel,
    diff_kernel,
    scatter_kernel,
    update_kernel,
)
from gymfast.delta.backends.triton_kernels_pack import flag_kernel, invert_kernel, list_kernel
from gymfast.delta.backends.triton_section import Section, column_keys
from gymfast.delta.records import PROFILES

I64 = NDArray[np.int64]
STEP = 128
NUM_CLASSES = 16
# Units of a tile by bytes of a unit: 16 bytes a thread, few registers (tests/triton/resources.csv).
_TILES = {1: 2048, 2: 1024, 4: 512}
_CLASS_TILES = {1: 1024, 2: 1024, 4: 512}


@dataclass(frozen=True)
class Group:
    """Changes whose positions or values are coded together: k records from start of a list."""

    start: int
    k: int
    num_places: int

    @property
    def is_inverted(self) -> bool:
        """Whether the canonical encoder lists the places that did not change."""
        return 2 * self.k > self.num_places


class Diff:
    """What the streaming pass over base and new found in a section; only `update` writes.

    `records` holds all changes by position and, but for profile fast, once more by class.
    """

    def __init__(
        self,
        base: torch.Tensor,
        new: torch.Tensor,
        section: Section,
        params: BlockParams,
    ) -> None:
        by_class = PROFILES[params.profile] != "fast"
        self.section = section
        self._by_class = by_class
        self._tile = (_CLASS_TILES if by_class else _TILES)[section.geometry.unit_bytes]
        self._per_block = section.tiles_per_block(self._tile)
        self.base, self.new = base, new
        num_tiles = section.num_blocks * self._per_block
        device = base.device
        self._slots = torch.empty(num_tiles * self._tile, dtype=torch.int64, device=device)
        self._counts = torch.empty(num_tiles, dtype=torch.int32, device=device)
        class_tiles = num_tiles if by_class else 0
        self._ranks = torch.empty(class_tiles * self._tile, dtype=torch.int32, device=device)
        shape = (section.num_blocks, class_tiles // max(1, section.num_blocks), NUM_CLASSES)
        self._unit_counts = torch.empty(shape, dtype=torch.int32, device=device)
        self._change_counts = torch.empty_like(self._unit_counts)
        diff_kernel[(num_tiles,)](
            base,
            new,
            self._slots,
            self._ranks,
            self._counts,
            self._unit_counts,
            self._change_counts,
            section.first_block,
            self._per_block,
            *section.shape,
            params.class_shift,
            params.class_base,
            section.geometry.unit_bytes,
            section.is_flat,
            by_class,
            self._tile,
        )
        self._starts = torch.cumsum(self._counts, 0, dtype=torch.int64) - self._counts
        self._read_counts()

    def _read_counts(self) -> None:
        """The small table that crosses to the host: changes and units by block and class."""
        by_block = self._counts.view(self.section.num_blocks, -1).sum(1, keepdim=True)
        columns = [by_block]
        if self._by_class:
            columns += [self._change_counts.sum(1), self._unit_counts.sum(1)]
        counts = torch.cat(columns, 1).cpu().numpy()
        self.num_changed = int(counts[:, 0].sum())
        sizes = self.section.block_sizes()
        self.blocks = self._groups(counts[:, 0], np.array(sizes), 0)
        classes = counts[:, 1:17].ravel(), counts[:, 17:].ravel()
        flat = self._groups(*classes, self.num_changed) if self._by_class else []
        self.classes = [flat[i : i + NUM_CLASSES] for i in range(0, len(flat), NUM_CLASSES)]

    @staticmethod
    def _groups(ks: I64, num_places: I64, first: int) -> list[Group]:
        starts = np.cumsum(ks) - ks + first
        rows = zip(starts.tolist(), ks.tolist(), num_places.tolist(), strict=True)
        return [Group(*row) for row in rows]

    def compact(self) -> I64:
        """Fills records and x with places and v; what each block adds to its digest, [n, 2]."""
        device = self.base.device
        total = self.num_changed * (2 if self._by_class else 1)
        self.records = torch.empty(total, dtype=torch.int64, device=device)
        self._places_and_values = torch.empty((2, total), dtype=torch.int32, device=device)
        digests = torch.empty((self._counts.numel(), 2), dtype=torch.int64, device=device)
        tile_sums = self._change_counts.permute(0, 2, 1)
        flat = tile_sums.reshape(-1)
        ends = torch.cumsum(flat, 0, dtype=torch.int64)
        class_starts = (ends - flat).view(tile_sums.shape).permute(0, 2, 1).contiguous()
        rank_starts = torch.cumsum(self._unit_counts, 1, dtype=torch.int32) - self._unit_counts
        section = self.section
        compact_kernel[(self._counts.numel(),)](
            self._slots,
            self._ranks,
            self._counts,
            self._starts,
            class_starts,
            rank_starts,
            self.records,
            *self._places_and_values,
            digests,
            column_keys(device),
            self.num_changed,
            section.first_block,
            self._per_block,
            *section.shape,
            section.geometry.unit_bytes,
            section.is_flat,
            self._by_class,
            self._tile,
            STEP,
        )
        per_block: I64 = digests.view(section.num_blocks, -1, 2).sum(1).cpu().numpy()
        return per_block

    def list_values(self, inverted: list[Group]) -> None:
        """Sets x and where its regions start.

        x holds places, v, indices of exceptions, their v - 1, indices of flips, and the gaps of
        the groups given here.
        """
        total, device = self.records.numel(), self.records.device
        flags = torch.empty((2, total), dtype=torch.int64, device=device)
        grid = (-(-total // STEP),)
        flag_kernel[grid](self.records, flags, total, STEP)
        self._flag_sums = torch.cumsum(flags, 1)
        num_exceptions, num_flips = self._flag_sums[:, -1].cpu().tolist()
        gaps = np.array([group.num_places - group.k for group in inverted], np.int64)
        lists = (total, total, num_exceptions, num_exceptions, num_flips, int(gaps.sum()))
        self.x = torch.zeros(sum(lists), dtype=torch.int32, device=device)
        self.x[: 2 * total] = self._places_and_values.view(-1)
        self.region_starts = np.concatenate([[0], np.cumsum(lists)]).tolist()
        regions = torch.split(self.x, lists)
        list_kernel[grid](self.records, self._flag_sums, *regions[2:5], total, STEP)
        gap_starts = np.cumsum(gaps) - gaps + self.region_starts[5]
        self.gap_starts = dict(zip((g.start for g in inverted), gap_starts.tolist(), strict=True))
        self._invert(inverted, gap_starts, gaps)

    def _invert(self, groups: list[Group], gap_starts: I64, gaps: I64) -> None:
        starts = np.array([group.start for group in groups], np.int64)
        sizes = np.array([group.k for group in groups], np.int64)
        rows, owner = piece_rows(starts, sizes)
        assert rows.shape[1] == PIECE_FIELDS
        rows[:, 5], rows[:, 6] = gap_starts[owner], gaps[owner]
        if owner.size:
            invert_kernel[(owner.size,)](self.x, upload(rows, self.x.device), PIECE)

    def flag_counts(self, groups: list[Group]) -> tuple[I64, I64]:
        """Exceptions and flips before each group and in each group, [2, num_groups] each."""
        starts = np.array([group.start for group in groups], np.int64)
        ends = starts + np.array([group.k for group in groups], np.int64)
        padded = torch.nn.functional.pad(self._flag_sums, (1, 0))
        at = upload(np.stack([starts, ends]), padded.device)
        sums = padded[:, at].cpu().numpy()
        return sums[:, 0], sums[:, 1] - sums[:, 0]

    def update(self, *, update: bool, undo: bool) -> bytes:
        """Writes the changes into base; the undo blob if asked: offsets (i64), then old units."""
        blob = b""
        if undo:
            offsets, values = self._run_update(update=False, undo=True)
            blob = offsets.cpu().numpy().tobytes()
            blob += values.view(torch.uint8).cpu().numpy().tobytes()
        if update:  # the last thing that is done, so that nothing can fail after it
            self._run_update(update=True, undo=False)
        return blob

    def _run_update(self, *, update: bool, undo: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over the changes: into base, or their offsets and old units."""
        device, section = self.base.device, self.section
        kept = self.num_changed if undo else 0
        offsets = torch.empty(kept, dtype=torch.int64, device=device)
        values = torch.empty(kept, dtype=self.base.dtype, device=device)
        update_kernel[(self._counts.numel(),)](
            self.base,
            self.new,
            self._slots,
            self._counts,
            self._starts,
            offsets,
            values,
            section.first_block,
            self._per_block,
            *section.shape,
            section.is_flat,
            update,
            undo,
            self._tile,
            STEP,
        )
        return offsets, values


def rollback(base: torch.Tensor, undo: bytes | memoryview, unit_bytes: int) -> None:
    """Puts back the old units of an undo blob of Diff.update."""
    count = len(undo) // (8 + unit_bytes)
    if count:
        blob = torch.from_numpy(np.frombuffer(undo, np.uint8).copy()).to(base.device)
        offsets, values = blob[: 8 * count].view(torch.int64), blob[8 * count :].view(base.dtype)
        scatter_kernel[(-(-count // STEP),)](base, offsets, values, count, STEP)
