"""The CUDA back end: csrc/cuda on torch tensors in CUDA memory, the same bytes as the CPU's.

Kernels run on the current stream of torch. Frame bodies, digests and counts cross to the host.
A base may lie in pinned CPU memory, through which the kernels stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
Made = TypeVar("Made")
_SECTION_WORDS = 5  # first_block, num_blocks, offset, size, num_changed
_NUM_SAMPLES = 1024
_NO_ERROR = 2**64 - 1
_ALIGNMENT = 256
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
        device.run(_cuda.digest_blocks, data, *_flat(geometry), first_block, count, rows)
        return _host(rows).view(np.uint64).reshape(count, 2)

    def class_params(self, base: torch.Tensor, unit_bytes: int) -> tuple[int, int]:
        """class_shift and class_base of a base tensor."""
        device = _Device(base)
        out = device.empty(_NUM_SAMPLES)
        num_units = base.numel() // unit_bytes
        count = device.run(_cuda.sample_classes, base, num_units, unit_bytes, out)
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
    def place(self) -> str:
        place = memory.place_of(self.sample)
        return memory.CUDA if place == memory.PINNED else place

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.place).cuda_stream)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Fresh bytes on the device, freed in the order of the current stream.

        Raises BudgetError if there are not so many.
        """
        try:
            data: torch.Tensor = memory.empty(num_bytes, self.place)
        except MemoryError as error:
            raise BudgetError(
                f"a call of the codec needs {num_bytes} bytes of {self.place} memory, which are "
                f"not free ({error}): free memory of the device, or take back end 'cpu' with "
                "weights in CPU memory"
            ) from error
        return data

    def upload(self, array: NDArray[np.generic], out: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes of an array on the device, in the first bytes of `out` if it is given."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target = self.empty(flat.size) if out is None else out[: flat.size]
        memory.assign(target, flat)
        return target

    def run(self, operation: Callable[..., Made], *arguments: object) -> Made:
        """The result of an operation of gymfast._cuda on the current stream of the device."""
        with torch.cuda.device(self.place):  # a thread's own device may be another
            return operation(*arguments, self.stream)

    def wait(self) -> None:
        """Until the kernels given so far are done."""
        torch.cuda.current_stream(self.place).synchronize()


@dataclass(frozen=True)
class _Undo:
    """Old values of all changed units of some blocks, in order; index counts within a block.

    As bytes: where there are few changes the low 16 bits of each index, and how many there are in
    each 65,536 units; else a bit for each unit.
    """

    first_block: int
    block_units: int
    counts: NDArray[np.uint32]
    index: NDArray[np.uint32]
    before: memory.U8

    def write(self) -> bytes:
        num_blocks, num_changed = self.counts.size, self.index.size
        is_dense = 2 * num_changed > num_blocks * self.block_units // 8
        head = np.array([self.first_block, num_blocks, self.block_units, is_dense], np.uint64)
        parts = [head.tobytes(), self.counts.tobytes()]
        if is_dense:
            ends = np.cumsum(self.counts, dtype=np.int64)
            for end, count in zip(ends.tolist(), self.counts.tolist(), strict=True):
                bits = np.zeros(self.block_units, np.bool_)
                bits[self.index[end - count : end]] = True
                parts.append(np.packbits(bits).tobytes())
        else:
            parts += [self._pieces().tobytes(), self.index.astype(np.uint16).tobytes()]
        return b"".join([*parts, self.before.tobytes()])

    def _pieces(self) -> NDArray[np.uint32]:
        """Changes in each piece of 65,536 units, pieces of all blocks in order."""
        per_block = _pieces_of(self.block_units)
        block = np.repeat(np.arange(self.counts.size), self.counts)
        pieces = block * per_block + (self.index >> 16)
        return np.bincount(pieces, minlength=self.counts.size * per_block).astype(np.uint32)

    @classmethod
    def read(cls, blob: memory.U8) -> _Undo:
        first_block, num_blocks, block_units, is_dense = map(int, blob[:32].view(np.uint64))
        at = 32 + 4 * num_blocks
        counts = blob[32:at].view(np.uint32)
        num_changed = int(counts.sum(dtype=np.int64))
        if is_dense:
            size = -(-block_units // 8)
            bits = blob[at : at + num_blocks * size].reshape(num_blocks, size)
            rows = [np.flatnonzero(np.unpackbits(row)).astype(np.uint32) for row in bits]
            index, at = np.concatenate(rows), at + bits.size
        else:
            per_block = _pieces_of(block_units)
            end = at + 4 * num_blocks * per_block
            pieces = blob[at:end].view(np.uint32)
            high = np.tile(np.arange(per_block, dtype=np.uint32) << 16, num_blocks)
            index = np.repeat(high, pieces)
            at = end + 2 * num_changed
            index |= blob[end:at].view(np.uint16)
        return cls(first_block, block_units, counts, index, blob[at:])


def _pieces_of(block_units: int) -> int:
    return -(-block_units // 2**16)


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
            # In the scratch of the calls: there may be no other memory.
            for log in (section.undo for section in encoded if section.undo):
                rollback(self.base, log, self.geometry, buffers.scratch)
            self.digests[first_block : first_block + num_blocks] = saved
            raise
        return encoded

    def _allocate(self, num_blocks: int, step: int) -> tuple[int, _EncodeBuffers]:
        """Buffers for as many whole sections as there is memory for; one at least."""
        return _as_much_as_fits(
            lambda count: _EncodeBuffers.of(self, count, step), num_blocks, step
        )

    def _call(
        self, buffers: _EncodeBuffers, first_block: int, num_blocks: int, step: int, undo: bool
    ) -> list[EncodedBlocks]:
        device, flat, p = _Device(self.new), _flat(self.geometry), self.params
        rows = self.digests[first_block : first_block + num_blocks]
        digests = device.upload(rows)
        sections = buffers.sections[: 8 * _SECTION_WORDS * -(-num_blocks // step)]
        is_launched = False
        try:
            device.run(
                _cuda.encode_blocks,
                *(self.base, self.new, *flat, p.profile, p.class_shift, p.class_base, p.has_base),
                *(digests, first_block, num_blocks, step, self.update),
                *(buffers.body, sections, buffers.scratch),
            )
            is_launched = True
            table = _host(sections).view(np.uint64).reshape(-1, _SECTION_WORDS)
            end = int((table[:, 2] + table[:, 3]).max())
            body = _host(buffers.body[:end])
            new_rows = _host(digests).view(np.uint64).reshape(num_blocks, 2)
            log = self._undo(buffers, first_block, num_blocks, table) if undo else b""
            encoded = [
                EncodedBlocks(body[offset : offset + size].tobytes(), changed)
                for _, _, offset, size, changed in table.tolist()
            ]
        except BaseException:
            if is_launched and self.update:
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
            self._block_units,
            _host(counts).view(np.uint32),
            _host(index[: 4 * num_changed]).view(np.uint32),
            _host(before[: unit_bytes * num_changed]),
        )
        return log.write()

    def _take_back(self, buffers: _EncodeBuffers, first_block: int, num_blocks: int) -> None:
        """Puts base back from scratch alone: nothing is allocated, nothing is copied."""
        device = _Device(self.new)
        columns = self._gather(buffers, num_blocks)
        flat = _flat(self.geometry)
        device.run(_cuda.rollback_blocks, self.base, *flat, first_block, num_blocks, *columns)
        device.wait()

    def _gather(
        self, buffers: _EncodeBuffers, num_blocks: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts, indices and old units of all changes, as parts of scratch with room for all."""
        shape = (*_flat(self.geometry), self.params.profile, num_blocks)
        _Device(self.new).run(_cuda.gather_undo, *shape, buffers.scratch)
        most = num_blocks * self._block_units
        sizes = (4 * num_blocks, 4 * most, self.geometry.unit_bytes * most)
        counts, index, before = (
            buffers.scratch[at : at + size]
            for at, size in zip(_cuda.undo_offsets(*shape), sizes, strict=True)
        )
        return counts, index, before

    @property
    def _block_units(self) -> int:
        return self.geometry.tile_rows * self.geometry.tile_cols


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


def _as_much_as_fits(make: Callable[[int], Made], most: int, step: int) -> tuple[int, Made]:
    """A number up to `most` and what `make` makes of it: halved, in steps, while memory is short.

    Raises the BudgetError of the last try.
    """
    count = most
    while True:
        try:
            return count, make(count)
        except BudgetError:
            if count <= step:
                raise
            count = max(step, count // step // 2 * step)


def rollback(
    base: torch.Tensor,
    undo: bytes | memoryview,
    geometry: Geometry,
    scratch: torch.Tensor | None = None,
) -> None:
    """Puts back the old values of an undo blob, by way of `scratch` if it is given.

    Its size has to be that of an encode of the same blocks.
    """
    log = _Undo.read(np.frombuffer(undo, np.uint8))
    device, columns = _Device(base if scratch is None else scratch), []
    at = 0
    for column in (log.counts, log.index, log.before):
        place = None if scratch is None else scratch[at:]
        columns.append(device.upload(column, place))
        at += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
    blocks = (log.first_block, log.counts.size)
    device.run(_cuda.rollback_blocks, base, *_flat(geometry), *blocks, *columns)
    device.wait()


def _apply(
    data: torch.Tensor,
    sections: Sequence[BlocksRecord],
    geometry: Geometry,
    params: BlockParams,
    digests: Rows,
) -> int:
    """Units changed by sections whose blocks follow each other; by several calls if need be."""
    device, flat = _Device(data), _flat(geometry)

    def scratch_for(count: int) -> torch.Tensor:
        runs = (sections[at : at + count] for at in range(0, len(sections), count))
        most = max(sum(section.num_blocks for section in run) for run in runs)
        return device.empty(_cuda.apply_scratch_bytes(*flat, most))

    per_call, scratch = _as_much_as_fits(scratch_for, len(sections), 1)
    runs = (sections[at : at + per_call] for at in range(0, len(sections), per_call))
    return sum(_apply_run(data, run, geometry, params, digests, scratch) for run in runs)


def _apply_run(
    data: torch.Tensor,
    sections: Sequence[BlocksRecord],
    geometry: Geometry,
    params: BlockParams,
    digests: Rows,
    scratch: torch.Tensor,
) -> int:
    """Units changed by one call."""
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
    device = _Device(data)
    body = device.upload(np.frombuffer(bytearray().join(bodies), np.uint8))
    device_rows, result = device.upload(rows), device.empty(16)
    device.run(
        _cuda.apply_blocks,
        *(data, body, *_flat(geometry)),
        *(params.class_shift, params.class_base, params.has_base, device_rows, first, count),
        *(device.upload(table), result, scratch),
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
    out: torch.Tensor = memory.empty(data.numel(), memory.PINNED)
    out.copy_(data, non_blocking=True)
    _Device(data).wait()
    pinned: memory.U8 = out.numpy()
    return pinned
