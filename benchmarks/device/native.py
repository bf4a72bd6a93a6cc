"""The native module `gymfast._cuda`, or a shim with its functions, over torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.device.memory import Device
from gymfast.delta.backends import BlockParams
from gymfast.delta.geometry import Geometry

Grid = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Run:
    """Consecutive blocks that one native call takes, and how they are coded."""

    geometry: Geometry
    params: BlockParams
    first_block: int
    num_blocks: int
    section_blocks: int

    @property
    def grid(self) -> Grid:
        """The five numbers of the geometry."""
        return grid_of(self.geometry)

    @property
    def code(self) -> tuple[int, int, bool]:
        """What apply has to know of the parameters."""
        return self.params.class_shift, self.params.class_base, self.params.has_base

    @property
    def blocks(self) -> slice:
        """The rows of these blocks among those of the tensor."""
        return slice(self.first_block, self.first_block + self.num_blocks)

    @property
    def num_sections(self) -> int:
        return -(-self.num_blocks // self.section_blocks)


def grid_of(geometry: Geometry) -> Grid:
    """num_units, unit_bytes, cols, tile_rows, tile_cols."""
    return (
        *(geometry.num_units, geometry.unit_bytes),
        *(geometry.cols, geometry.tile_rows, geometry.tile_cols),
    )


@dataclass(frozen=True)
class Coded:
    """What encode leaves in device memory: bodies one behind the other, and their table [n, 5]."""

    body: torch.Tensor
    sections: torch.Tensor

    def table(self) -> NDArray[np.uint64]:
        """first_block, num_blocks, offset, size and num_changed of each section."""
        return self.sections.cpu().numpy().view(np.uint64)


def runs_of(
    geometry: Geometry, params: BlockParams, call_sections: int, section_blocks: int | None = None
) -> Iterator[Run]:
    """All blocks of a tensor, as calls of so many sections; as the canonical encoder cuts them."""
    section_blocks = section_blocks or geometry.section_blocks()
    step = call_sections * section_blocks
    for first in range(0, geometry.num_blocks, step):
        count = min(step, geometry.num_blocks - first)
        yield Run(geometry, params, first, count, section_blocks)


def changed_parts(run: Run, coded: Coded) -> Iterator[tuple[Run, Coded]]:
    """Runs of sections in which something changed: apply takes no empty ones. Waits."""
    sizes = coded.table()[:, 3]
    for first, last in _spans(sizes > 0):
        start = first * run.section_blocks
        count = min(last * run.section_blocks, run.num_blocks) - start
        part = replace(run, first_block=run.first_block + start, num_blocks=count)
        yield part, Coded(coded.body, coded.sections[first:last])


def _spans(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """First and end of each run of true flags."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


@dataclass(frozen=True)
class Undo:
    """Old values of the changed units of a run: counts by block, positions in it, values."""

    counts: torch.Tensor
    index: torch.Tensor
    before: torch.Tensor


class NativeCodec:
    """The functions of the module on tensors of one device; every call only queues work."""

    def __init__(self, module: ModuleType, device: Device) -> None:
        self.module = module
        self.device = device

    def digest(self, run: Run, data: torch.Tensor, rows: torch.Tensor) -> None:
        """Digests of the blocks of a run into their rows of those of the tensor."""
        self.module.digest_blocks(
            *(data, *run.grid, run.first_block, run.num_blocks),
            *(rows[run.blocks], self.device.stream),
        )

    def coded(self, run: Run) -> Coded:
        """Room for what encode makes of a run."""
        capacity = self.module.encode_body_capacity(*run.grid, run.num_blocks)
        return Coded(self.device.bytes(capacity), self.device.words(run.num_sections, 5))

    def encode_scratch(self, run: Run) -> torch.Tensor:
        profile = run.params.profile
        return self.device.bytes(
            self.module.encode_scratch_bytes(*run.grid, profile, run.num_blocks)
        )

    def apply_scratch(self, run: Run) -> torch.Tensor:
        return self.device.bytes(self.module.apply_scratch_bytes(*run.grid, run.num_blocks))

    def encode(
        self,
        run: Run,
        pair: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        coded: Coded,
        scratch: torch.Tensor,
        *,
        update: bool = True,
    ) -> None:
        """Codes the step of a pair (base, new); rows become those of new, base with `update`."""
        self.module.encode_blocks(
            *(*pair, *run.grid, run.params.profile, *run.code),
            *(rows[run.blocks], run.first_block, run.num_blocks),
            *(run.section_blocks, update, coded.body, coded.sections),
            *(scratch, self.device.stream),
        )

    def undo(self, run: Run, coded: Coded, scratch: torch.Tensor) -> Undo:
        """A copy of the old values that an encode left in its scratch; waits for the device."""
        what = (*run.grid, run.params.profile, run.num_blocks)
        self.module.gather_undo(*what, scratch, self.device.stream)
        num_changed = int(coded.table()[:, 4].sum())
        sizes = (4 * run.num_blocks, 4 * num_changed, run.geometry.unit_bytes * num_changed)
        starts = self.module.undo_offsets(*what)
        parts = [scratch[at : at + size] for at, size in zip(starts, sizes, strict=True)]
        copies = [self.device.bytes(part.numel()).copy_(part) for part in parts]
        return Undo(*copies)

    def rollback(self, run: Run, data: torch.Tensor, undo: Undo) -> None:
        self.module.rollback_blocks(
            *(data, *run.grid, run.first_block, run.num_blocks),
            *(undo.counts, undo.index, undo.before, self.device.stream),
        )

    def apply(
        self,
        run: Run,
        data: torch.Tensor,
        rows: torch.Tensor,
        coded: Coded,
        result: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Applies the sections of a run; result [2] gets the first error and the units changed."""
        self.module.apply_blocks(
            *(data, coded.body, *run.grid, *run.code),
            *(rows[run.blocks], run.first_block, run.num_blocks, coded.sections),
            *(result, scratch, self.device.stream),
        )
