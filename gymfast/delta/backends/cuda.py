"""The CUDA back end: csrc/cuda on torch tensors in CUDA memory, the same bytes as the CPU's.

Kernels run on the current stream of torch. Frame bodies, digests and counts cross to the host.
A base may lie in pinned CPU memory, through which the kernels stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gymfast import _cuda
from gymfast.delta import memory
from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks
from gymfast.delta.backends.class_samples import class_params_of
from gymfast.delta.geometry import Geometry
from gymfast.delta.records import BlocksRecord
from gymfast.errors import BudgetError, ChecksumError, FormatError

Rows = NDArray[np.uint64]
_SECTION_WORDS = 5  # first_block, num_blocks, offset, size, num_changed
_NUM_SAMPLES = 1024
_NO_ERROR = 2**64 - 1
_PINNED_BYTES = 1 << 16  # from here on a copy through pinned memory is worth its allocation
_RESULT_CHECK = 58


class CudaBackend(Backend):
    """The back end that `select("cuda")` returns; tensors are 1-D uint8 on a CUDA device.

    A call allocates device memory for its time, about `scratch_bytes` at most, from the allocator
    of torch: 18 to 40 bytes for each unit that it works on (docs/gpu.md), so 2 GiB let it work on
    some 60 million units at once.
    """

    name = "cuda"
    kinds = (memory.CUDA, memory.PINNED)
    scratch_bytes = 2 << 30

    def check64(self, *parts: bytes | bytearray | memoryview) -> int:
        """fold64 of the digest of the concatenation of parts, which are on the host."""
        from gymfast import _core

        return _core.check64(*parts)

    def digest_blocks(
        self,
        data: torch.Tensor,
        geometry: Geometry,
        threads: int,  # noqa: ARG002
        first_block: int = 0,
        num_blocks: int | None = None,
    ) -> Rows:
        """Partial digests of all blocks or of a range, [num_blocks, 2]."""
        count = geometry.num_blocks - first_block if num_blocks is None else num_blocks
        device = _Device(data)
        rows = device.empty(16 * count)
        _cuda.digest_blocks(data, *_flat(geometry), first_block, count, rows, device.stream)
        return _host(rows).view(np.uint64).reshape(count, 2)

    def class_params(self, base: torch.Tensor, unit_bytes: int) -> tuple[int, int]:
        """class_shift and class_base of a base tensor."""
        device = _Device(base)
        out = device.empty(_NUM_SAMPLES)
        num_units = base.numel() // unit_bytes
        count = _cuda.sample_classes(base, num_units, unit_bytes, out, device.stream)
        return class_params_of(_host(out)[:count])

    def encode_blocks(
        self,
        base: torch.Tensor,
        new: torch.Tensor,
        geometry: Geometry,
        params: BlockParams,
        digests: Rows,
        first_block: int,
        num_blocks: int,
        *,
        update: bool,
        undo: bool,
        threads: int,  # noqa: ARG002
    ) -> EncodedBlocks:
        """See Backend."""
        call = _Encode(base, new, geometry, params, digests, update)
        encoded = call.run(first_block, num_blocks, num_blocks, undo=undo)
        return encoded[0] if encoded else EncodedBlocks(b"", 0)

    def rollback_blocks(
        self, base: torch.Tensor, undo: bytes | memoryview, geometry: Geometry
    ) -> None:
        """Puts back the old values of an undo blob of this back end."""
        rollback(base, undo, geometry)

    def apply_blocks(
        self,
        data: torch.Tensor,
        body: bytes | memoryview,
        geometry: Geometry,
        params: BlockParams,
        digests: Rows,
        first_block: int,
        num_blocks: int,
        threads: int,
    ) -> int:
        """See Backend."""
        section = BlocksRecord(0, first_block, num_blocks, memoryview(body).cast("B"), {}, 0)
        return self.apply_sections(data, [section], geometry, params, digests, threads)

    def sections_per_call(
        self,
        data: torch.Tensor,  # noqa: ARG002
        geometry: Geometry,
        params: BlockParams,
    ) -> int:
        """As many as scratch_bytes allow, and one at least."""
        flat, blocks = _flat(geometry), min(geometry.section_blocks(), geometry.num_blocks)
        if not blocks:
            return 1
        encode = _cuda.encode_scratch_bytes(*flat, params.profile, blocks)
        encode += _cuda.encode_body_capacity(*flat, blocks)
        return max(1, self.scratch_bytes // max(encode, _cuda.apply_scratch_bytes(*flat, blocks)))

    def encode_sections(
        self,
        base: torch.Tensor,
        new: torch.Tensor,
        geometry: Geometry,
        params: BlockParams,
        digests: Rows,
        first_block: int,
        num_blocks: int,
        *,
        update: bool,
        undo: bool,
        threads: int,  # noqa: ARG002
    ) -> list[EncodedBlocks]:
        """See Backend; all sections in one call, or in several where memory is short."""
        call = _Encode(base, new, geometry, params, digests, update)
        return call.run(first_block, num_blocks, geometry.section_blocks(), undo=undo)

    def apply_sections(
        self,
        data: torch.Tensor,
        sections: Sequence[BlocksRecord],
        geometry: Geometry,
        params: BlockParams,
        digests: Rows,
        threads: int,  # noqa: ARG002
    ) -> int:
        """See Backend; each block is checked before it is written, on one stream."""
        return sum(_apply(data, run, geometry, params, digests) for run in _consecutive(sections))


@dataclass(frozen=True)
class _Device:
    """Where the kernels for a tensor run; for pinned memory on the current device of torch."""

    sample: torch.Tensor

    @property
    def is_host(self) -> bool:
        return bool(self.sample.device.type == memory.CPU)

    @property
    def stream(self) -> int:
        device = None if self.is_host else self.sample.device
        return int(torch.cuda.current_stream(device).cuda_stream)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Fresh bytes on the device, freed in the order of the current stream.

        Raises BudgetError if there are not so many.
        """
        try:
            if self.is_host:
                data: torch.Tensor = memory.zeros(num_bytes, memory.CUDA)
                return data
            return self.sample.new_empty(num_bytes, dtype=torch.uint8)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise BudgetError(
                f"a call needs {num_bytes} bytes of CUDA memory, which are not free ({error}): "
                "free memory, or keep smaller blocks (block_units)"
            ) from error

    def upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        """The bytes of an array on the device."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out = self.empty(flat.size)
        out.copy_(torch.from_numpy(flat if flat.flags.writeable else flat.copy()))
        return out

    def wait(self) -> None:
        """Until the kernels given so far are done: what they read may be freed on any stream."""
        torch.cuda.current_stream(None if self.is_host else self.sample.device).synchronize()


@dataclass(frozen=True)
class _Undo:
    """Old values of all changed units of some blocks, in order; index counts within a block."""

    first_block: int
    num_blocks: int
    counts: NDArray[np.uint32]
    index: NDArray[np.uint32]
    before: memory.U8

    def write(self) -> bytes:
        head = np.array([self.first_block, self.num_blocks], np.uint64)
        parts = (head, self.counts, self.index, self.before)
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def read(cls, blob: memory.U8, unit_bytes: int) -> _Undo:
        first_block, num_blocks = map(int, blob[:16].view(np.uint64))
        counts_end = 16 + 4 * num_blocks
        counts = blob[16:counts_end].view(np.uint32)
        index_end = counts_end + 4 * int(counts.sum(dtype=np.int64))
        index = blob[counts_end:index_end].view(np.uint32)
        assert blob.size == index_end + unit_bytes * index.size
        return cls(first_block, num_blocks, counts, index, blob[index_end:])


@dataclass(frozen=True)
class _Encode:
    """Encode calls on one tensor; without `update` base is not written."""

    base: torch.Tensor
    new: torch.Tensor
    geometry: Geometry
    params: BlockParams
    digests: Rows
    update: bool

    def run(
        self, first_block: int, num_blocks: int, step: int, *, undo: bool
    ) -> list[EncodedBlocks]:
        """The sections of some blocks, of `step` blocks each; if it raises, none were coded."""
        if not num_blocks:
            return []
        per_call, buffers = self._allocate(num_blocks, step)
        keeps_log = undo or (self.update and per_call < num_blocks)
        saved = self.digests[first_block : first_block + num_blocks].copy()
        encoded: list[EncodedBlocks] = []
        try:
            for first in range(first_block, first_block + num_blocks, per_call):
                count = min(per_call, first_block + num_blocks - first)
                encoded += self._call(buffers, first, count, step, keeps_log)
        except BaseException:
            for log in (section.undo for section in encoded if section.undo):
                rollback(self.base, log, self.geometry)
            self.digests[first_block : first_block + num_blocks] = saved
            raise
        return encoded

    def _allocate(self, num_blocks: int, step: int) -> tuple[int, _EncodeBuffers]:
        """Buffers for as many whole sections as there is memory for; one at least."""
        per_call = num_blocks
        while True:
            try:
                return per_call, _EncodeBuffers.of(self, per_call, step)
            except BudgetError:
                if per_call <= step:
                    raise
                per_call = max(step, per_call // step // 2 * step)

    def _call(
        self, buffers: _EncodeBuffers, first_block: int, num_blocks: int, step: int, undo: bool
    ) -> list[EncodedBlocks]:
        device, flat, p = _Device(self.new), _flat(self.geometry), self.params
        rows = self.digests[first_block : first_block + num_blocks]
        digests = device.upload(rows)
        _cuda.encode_blocks(
            *(self.base, self.new, *flat, p.profile, p.class_shift, p.class_base, p.has_base),
            *(digests, first_block, num_blocks, step, self.update),
            *(buffers.body, buffers.sections, buffers.scratch, device.stream),
        )
        try:
            sections = _host(buffers.sections).view(np.uint64).reshape(-1, _SECTION_WORDS)
            end = int((sections[:, 2] + sections[:, 3]).max())
            body = _host(buffers.body[:end])
            new_rows = _host(digests).view(np.uint64).reshape(num_blocks, 2)
            log = self._undo(buffers, first_block, num_blocks, sections) if undo else b""
            encoded = [
                EncodedBlocks(body[offset : offset + size].tobytes(), changed)
                for _, _, offset, size, changed in sections.tolist()
            ]
        except BaseException:
            if self.update:
                self._take_back(buffers, first_block, num_blocks)
            raise
        encoded[0] = EncodedBlocks(encoded[0].body, encoded[0].num_changed, log)
        rows[:] = new_rows
        return encoded

    def _undo(
        self, buffers: _EncodeBuffers, first_block: int, num_blocks: int, sections: Rows
    ) -> bytes:
        num_changed = int(sections[:, 4].sum())
        if not num_changed:
            return b""
        counts, index, before = self._gather(buffers, num_blocks)
        unit_bytes = self.geometry.unit_bytes
        log = _Undo(
            first_block,
            num_blocks,
            _host(counts).view(np.uint32),
            _host(index[: 4 * num_changed]).view(np.uint32),
            _host(before[: unit_bytes * num_changed]),
        )
        return log.write()

    def _take_back(self, buffers: _EncodeBuffers, first_block: int, num_blocks: int) -> None:
        """Puts base back from scratch alone: nothing is allocated, nothing is copied."""
        device = _Device(self.new)
        columns = self._gather(buffers, num_blocks)
        _cuda.rollback_blocks(
            *(self.base, *_flat(self.geometry), first_block, num_blocks, *columns, device.stream)
        )
        device.wait()

    def _gather(
        self, buffers: _EncodeBuffers, num_blocks: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts, indices and old units of all changes, as parts of scratch with room for all."""
        shape = (*_flat(self.geometry), self.params.profile, num_blocks)
        _cuda.gather_undo(*shape, buffers.scratch, _Device(self.new).stream)
        most = num_blocks * self.geometry.tile_rows * self.geometry.tile_cols
        sizes = (4 * num_blocks, 4 * most, self.geometry.unit_bytes * most)
        counts, index, before = (
            buffers.scratch[at : at + size]
            for at, size in zip(_cuda.undo_offsets(*shape), sizes, strict=True)
        )
        return counts, index, before


@dataclass(frozen=True)
class _EncodeBuffers:
    """Device memory of one encode call."""

    body: torch.Tensor
    sections: torch.Tensor
    scratch: torch.Tensor

    @classmethod
    def of(cls, call: _Encode, num_blocks: int, step: int) -> _EncodeBuffers:
        device, flat = _Device(call.new), _flat(call.geometry)
        return cls(
            device.empty(_cuda.encode_body_capacity(*flat, num_blocks)),
            device.empty(8 * _SECTION_WORDS * -(-num_blocks // step)),
            device.empty(_cuda.encode_scratch_bytes(*flat, call.params.profile, num_blocks)),
        )


def rollback(base: torch.Tensor, undo: bytes | memoryview, geometry: Geometry) -> None:
    """Puts back the old values of an undo blob."""
    log = _Undo.read(np.frombuffer(undo, np.uint8), geometry.unit_bytes)
    device = _Device(base)
    columns = [device.upload(column) for column in (log.counts, log.index, log.before)]
    _cuda.rollback_blocks(
        *(base, *_flat(geometry), log.first_block, log.num_blocks, *columns, device.stream)
    )
    device.wait()


def _apply(
    data: torch.Tensor,
    sections: Sequence[BlocksRecord],
    geometry: Geometry,
    params: BlockParams,
    digests: Rows,
) -> int:
    """Units changed by sections whose blocks follow each other."""
    bodies = [section.body for section in sections]
    sizes = [len(body) for body in bodies]
    offsets = itertools.accumulate(sizes, initial=0)
    table = np.array(
        [
            (section.first_block, section.num_blocks, offset, size, 0)
            for section, offset, size in zip(sections, offsets, sizes, strict=False)
        ],
        np.uint64,
    )
    first, count = sections[0].first_block, sum(section.num_blocks for section in sections)
    rows = digests[first : first + count]
    device, flat = _Device(data), _flat(geometry)
    scratch = device.empty(_cuda.apply_scratch_bytes(*flat, count))
    body = device.upload(np.frombuffer(bytearray().join(bodies), np.uint8))
    device_rows, result = device.upload(rows), device.empty(16)
    _cuda.apply_blocks(
        *(data, body, *flat, params.class_shift, params.class_base, params.has_base),
        *(device_rows, first, count, device.upload(table), result, scratch, device.stream),
    )
    first_error, num_changed = map(int, _host(result).view(np.uint64))
    # Also after an error: blocks that were good are written, and these are their digests.
    rows[:] = _host(device_rows).view(np.uint64).reshape(count, 2)
    if first_error != _NO_ERROR:
        block, number = first_error >> 8, first_error & 255
        kind = ChecksumError if number == _RESULT_CHECK else FormatError
        raise kind(f"block {block}: {_cuda.error_text(number)} (error {number})", number)
    return num_changed


def _consecutive(sections: Sequence[BlocksRecord]) -> Iterator[list[BlocksRecord]]:
    """Sections in groups whose blocks follow each other: unchanged sections are left out."""
    group: list[BlocksRecord] = []
    for section in sections:
        if group and group[-1].first_block + group[-1].num_blocks != section.first_block:
            yield group
            group = []
        group.append(section)
    if group:
        yield group


def _flat(geometry: Geometry) -> tuple[int, int, int, int, int]:
    g = geometry
    return g.num_units, g.unit_bytes, g.cols, g.tile_rows, g.tile_cols


def _host(data: torch.Tensor) -> memory.U8:
    """Bytes of a device as an array; waits for what the current stream does to them."""
    if data.numel() < _PINNED_BYTES:
        array: memory.U8 = data.cpu().numpy()
        return array
    out: torch.Tensor = memory.empty_pinned(data.numel())
    out.copy_(data, non_blocking=True)
    _Device(data).wait()
    pinned: memory.U8 = out.numpy()
    return pinned
