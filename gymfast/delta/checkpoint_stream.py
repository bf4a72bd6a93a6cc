"""Streams the tensors of a checkpoint through a window: digests, and the blocks of a frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gymfast.delta import memory
from gymfast.delta.apply_live import check_result, naming
from gymfast.delta.apply_plan import Spec, Step
from gymfast.delta.backends import Backend, require_kinds, select
from gymfast.delta.frame import ParsedFrame
from gymfast.delta.geometry import Geometry, plan_geometry
from gymfast.delta.memory import U8
from gymfast.delta.records import Digest
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.state import Rows, digest_of, num_threads
from gymfast.delta.window import Transfer, Window, block_span

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Meter:
    """Counts bytes of work and tells a progress function."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        """A meter at 0 of total bytes."""
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, num_bytes: int) -> None:
        """More bytes are done."""
        self._done += num_bytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


@dataclass(frozen=True)
class Codec:
    """A back end and its threads."""

    backend: Backend
    threads: int

    @classmethod
    def of(cls, backend: str, threads: int | None) -> Codec:
        """The codec for the options of a public function."""
        codec = cls(select(backend), num_threads(threads))
        require_kinds(codec.backend, memory.CPU, "a checkpoint that is read from files")
        return codec

    def digest(
        self, window: Window, geometry: Geometry, meter: Meter, flush: Transfer | None = None
    ) -> Rows:
        """Partial digests of the tensor that the window has just turned to."""
        rows = np.zeros((geometry.num_blocks, 2), np.uint64)
        step = geometry.section_blocks()
        for first in range(0, geometry.num_blocks, step):
            count = min(step, geometry.num_blocks - first)
            start, end = block_span(geometry, first, count)
            window.pass_to(start, flush)
            window.load_to(end)
            rows[first : first + count] = self.backend.digest_blocks(
                window.data, geometry, self.threads, first, count
            )
            meter.add(end - start)
        window.pass_to(window.data.size, flush)
        return rows

    def apply(self, window: Window, step: Step, rows: Rows, flush: Transfer) -> int:
        """Units changed; flush gets all bytes of the new tensor in order.

        Raises FormatError and ChecksumError for blocks that are damaged or do not fit.
        """
        geometry = step.record.geometry
        num_changed = 0
        with naming(step.name):
            for section in step.blocks:
                start, end = block_span(geometry, section.first_block, section.num_blocks)
                window.pass_to(start, flush)
                window.load_to(end)
                num_changed += self.backend.apply_blocks(
                    window.data,
                    section.body,
                    geometry,
                    step.params,
                    rows,
                    section.first_block,
                    section.num_blocks,
                    self.threads,
                )
            window.pass_to(window.data.size, flush)
            check_result(digest_of(rows), step)
        return num_changed


@dataclass
class CheckpointReceiver:
    """A checkpoint as an apply_plan.Receiver; keeps the partial digests it computed."""

    source: Checkpoint | None
    codec: Codec
    window: Window
    meter: Meter
    owns_memory: bool = False
    rows: dict[str, Rows] = field(default_factory=dict)

    def specs(self) -> dict[str, Spec]:
        """Dtype and shape of all tensors, by name."""
        source = self.source
        specs = [source.spec(name) for name in source.names] if source else []
        return {spec.name: (spec.dtype, spec.shape) for spec in specs}

    def digest(self, name: str, geometry: Geometry | None) -> Digest:
        """Digest of a tensor, read window by window."""
        assert self.source is not None
        spec = self.source.spec(name)
        geometry = geometry or plan_geometry(spec.dtype, spec.shape)
        self.window.begin(spec.num_bytes, reader(self.source, name))
        self.rows[name] = self.codec.digest(self.window, geometry, self.meter)
        return digest_of(self.rows[name])

    def memory(self, name: str) -> object:
        """The name: in files no two tensors share their bytes."""
        return name


def most_bytes(parsed: ParsedFrame, source: Checkpoint | None) -> int:
    """Size of the largest tensor of a frame and a checkpoint."""
    sizes = [record.num_bytes for record in parsed.tensors]
    if source is not None:
        sizes += [source.spec(name).num_bytes for name in source.names]
    return max(sizes, default=0)


def reader(source: Checkpoint, name: str) -> Transfer:
    """What a window needs to read a tensor."""

    def read(start: int, out: U8) -> None:
        source.read_into(name, start, out)

    return read
