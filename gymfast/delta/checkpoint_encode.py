"""One pass over two checkpoints: the sections of the frame between them."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np

from gymfast.delta.backends import BlockParams
from gymfast.delta.checkpoint_stream import Codec, Meter, Progress, reader
from gymfast.delta.encode_pass import EncodeStats
from gymfast.delta.frame import FAST, EndEntry, FrameWriter, Kind, Status, TensorRecord, root_of
from gymfast.delta.geometry import Geometry, plan_geometry
from gymfast.delta.memory import U8
from gymfast.delta.records import Digest
from gymfast.delta.safetensors_files import Checkpoint, CheckpointTensor
from gymfast.delta.state import Rows, digest_of
from gymfast.delta.window import Window, block_span
from gymfast.errors import CoverageError

_SAMPLES = 1024  # docs/wire-format.md section 10, class_shift and class_base
Named = tuple[str, str, tuple[int, ...], Digest]


class CheckpointEncoder:
    """Encodes a checkpoint against another one (or none), window by window."""

    def __init__(
        self,
        old: Checkpoint | None,
        new: Checkpoint,
        codec: Codec,
        profile: int,
        *,
        tiled: bool,
        key: bytes | None = None,
    ) -> None:
        """An encoder for open checkpoints; profile is the number in HEADER."""
        self._old = old
        self._old_names = dict.fromkeys(old.names if old else ())
        self._new = new
        self._codec = codec
        self._profile = profile
        self._tiled = tiled
        self._writer = FrameWriter(codec.backend.check64, key)
        sizes = [source.spec(n).num_bytes for source in (old, new) if source for n in source.names]
        most = max(sizes, default=0)
        self._total = sum(sizes)
        self._base_window, self._new_window = Window(most), Window(most)
        self._meter = Meter(None, 0)
        self._base_entries: list[Named] = []
        self._new_entries: list[Named] = []
        self.stats = EncodeStats(0, 0, 0, 0, 0.0)

    def sections(self, progress: Progress | None) -> Iterator[bytes]:
        """The bytes of the frame, a section at a time; `stats` is complete at the end.

        Raises CoverageError if the new checkpoint has no tensors.
        """
        start_s = time.perf_counter()
        self._meter = Meter(progress, self._total)
        num_bytes = 0
        for section in self._sections():
            num_bytes += len(section)
            yield section
        seconds = time.perf_counter() - start_s
        self.stats = replace(self.stats, frame_bytes=num_bytes, seconds=seconds)

    def _sections(self) -> Iterator[bytes]:
        names = self._new.names
        if not names:
            raise CoverageError(
                f"{self._new.path} has no tensors: a version without tensors is refused", 62
            )
        new_names = set(names)
        removed = [name for name in self._old_names if name not in new_names]
        yield self._writer.header(self._profile, len(names) + len(removed))
        ends = []
        for ordinal, name in enumerate(names):
            ends.append((yield from self._tensor(ordinal, self._new.spec(name))))
        for name in removed:
            spec = self._spec_of_base(name)
            geometry = self._plan(spec)
            digest, params, _ = self._scan(spec, geometry)
            yield self._writer.tensor(_record(Kind.REMOVED, spec, geometry, params))
            ends.append(EndEntry(Status.REMOVED, digest))
        yield self._writer.end(root_of(self._base_entries), root_of(self._new_entries), ends)

    def _tensor(self, ordinal: int, spec: CheckpointTensor) -> Generator[bytes, None, EndEntry]:
        """TENSOR and BLOCKS sections; returns what END says of the tensor."""
        geometry = self._plan(spec)
        kind, base_digest = Kind.ADDED, None
        rows = np.zeros((geometry.num_blocks, 2), np.uint64)
        params = BlockParams(self._profile, 0, 0, has_base=False)
        if spec.name in self._old_names:
            base = self._spec_of_base(spec.name)
            is_same = (base.dtype, base.shape) == (spec.dtype, spec.shape)
            kind = Kind.DELTA if is_same else Kind.REPLACED
            scan = self._scan(base, geometry if is_same else self._plan(base))
            base_digest, params, rows = scan if is_same else (scan[0], params, rows)
        if kind is not Kind.DELTA:
            self._base_window.begin(spec.num_bytes, None)
        yield self._writer.tensor(_record(kind, spec, geometry, params))
        num_changed = 0
        for first, body, changed in self._blocks(spec, geometry, params, rows):
            num_changed += changed
            if body:
                count = min(geometry.section_blocks(), geometry.num_blocks - first)
                yield self._writer.blocks(ordinal, first, count, body)
        self._count(spec, geometry, num_changed)
        return self._end_of(spec, kind, base_digest, digest_of(rows), num_changed)

    def _blocks(
        self, spec: CheckpointTensor, geometry: Geometry, params: BlockParams, rows: Rows
    ) -> Iterator[tuple[int, bytes, int]]:
        """First block, body and units changed of each section, also of those without changes."""
        base, new = self._base_window, self._new_window
        new.begin(spec.num_bytes, reader(self._new, spec.name))
        step = geometry.section_blocks()
        for first in range(0, geometry.num_blocks, step):
            count = min(step, geometry.num_blocks - first)
            start, end = block_span(geometry, first, count)
            for window in (base, new):
                window.pass_to(start)
                window.load_to(end)
            encoded = self._codec.backend.encode_blocks(
                base.data,
                new.data,
                geometry,
                params,
                rows,
                first,
                count,
                update=False,
                undo=False,
                threads=self._codec.threads,
            )
            self._meter.add(end - start)
            yield first, encoded.body, encoded.num_changed

    def _scan(self, spec: CheckpointTensor, geometry: Geometry) -> tuple[Digest, BlockParams, Rows]:
        """Digest, class parameters and partial digests of a base tensor; its window is rewound."""
        assert self._old is not None
        window, sampler = self._base_window, _Sampler(geometry)
        window.begin(spec.num_bytes, reader(self._old, spec.name))
        rows = self._codec.digest(window, geometry, self._meter, sampler.take)
        window.rewind()
        shift = base = 0
        if geometry.num_units and self._profile != FAST:
            units = sampler.units.reshape(-1)
            shift, base = self._codec.backend.class_params(units, geometry.unit_bytes)
        digest = digest_of(rows)
        self._base_entries.append((spec.name, spec.dtype, spec.shape, digest))
        return digest, BlockParams(self._profile, shift, base, has_base=True), rows

    def _end_of(
        self,
        spec: CheckpointTensor,
        kind: Kind,
        base: Digest | None,
        new: Digest,
        num_changed: int,
    ) -> EndEntry:
        self._new_entries.append((spec.name, spec.dtype, spec.shape, new))
        if kind is Kind.DELTA:
            if num_changed == 0:
                return EndEntry(Status.UNCHANGED, base)
            return EndEntry(Status.CHANGED, base, new)
        return EndEntry(Status.ADDED if kind is Kind.ADDED else Status.REPLACED, base, new)

    def _count(self, spec: CheckpointTensor, geometry: Geometry, num_changed: int) -> None:
        old = self.stats
        self.stats = replace(
            old,
            raw_bytes=old.raw_bytes + spec.num_bytes,
            num_changed=old.num_changed + num_changed,
            num_units=old.num_units + geometry.num_units,
        )

    def _plan(self, spec: CheckpointTensor) -> Geometry:
        return plan_geometry(spec.dtype, spec.shape, tiled=self._tiled)

    def _spec_of_base(self, name: str) -> CheckpointTensor:
        assert self._old is not None
        return self._old.spec(name)


class _Sampler:
    """Collects the units from which class_shift and class_base follow, as the tensor passes."""

    def __init__(self, geometry: Geometry) -> None:
        num = min(geometry.num_units, _SAMPLES)
        units = np.arange(num, dtype=np.int64) * geometry.num_units // max(1, num)
        self._starts = units * geometry.unit_bytes
        self.units: U8 = np.zeros((num, geometry.unit_bytes), np.uint8)

    def take(self, start: int, data: U8) -> None:
        """Samples from data, which starts at an offset of the tensor and ends with a unit."""
        first, last = np.searchsorted(self._starts, (start, start + data.size))
        starts = self._starts[first:last] - start
        for i in range(self.units.shape[1]):
            self.units[first:last, i] = data[starts + i]


def _record(
    kind: Kind, spec: CheckpointTensor, geometry: Geometry, params: BlockParams
) -> TensorRecord:
    shift, base = params.class_shift, params.class_base
    return TensorRecord(kind, spec.name, spec.dtype, spec.shape, geometry, shift, base)
