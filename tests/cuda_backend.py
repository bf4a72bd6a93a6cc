"""gymfast._cuda, or its shim, as a back end for tests: arrays go to its memory and come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from gymfast.delta.backends import BlockParams, EncodedBlocks, select
from gymfast.delta.geometry import Geometry
from gymfast.errors import ChecksumError, FormatError

RESULT_CHECK = 58
NO_ERROR = 2**64 - 1
STREAM = 0


def aligned(data: np.ndarray, alignment: int = 256) -> np.ndarray:
    """The bytes of data at an address that is a multiple of alignment."""
    memory = np.empty(data.nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    place = memory[start : start + data.nbytes]
    place[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return place


class InterfaceOnly:
    """An array that has __cuda_array_interface__ and nothing else."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.__cuda_array_interface__ = {
            "shape": data.shape,
            "typestr": data.dtype.str,
            "data": (data.ctypes.data, False),
            "version": 3,
        }


@dataclass(frozen=True)
class Memory:
    """How bytes get into arrays of one library, and out of them."""

    put: Callable[[np.ndarray], object]
    get: Callable[[object], np.ndarray]


def numpy_memory() -> Memory:
    return Memory(aligned, lambda array: array)


def interface_memory() -> Memory:
    return Memory(lambda data: InterfaceOnly(aligned(data)), lambda array: array.data)


def torch_memory(device: str) -> Memory:
    import torch

    if device == "cpu":
        return Memory(lambda data: torch.from_numpy(aligned(data)), lambda array: array.numpy())
    return Memory(
        lambda data: torch.from_numpy(aligned(data)).to(device), lambda array: array.cpu().numpy()
    )


def pinned_memory() -> Memory:
    """Host memory that the GPU reads and writes where it is."""
    import torch

    def get(array: torch.Tensor) -> np.ndarray:
        torch.cuda.synchronize()
        return array.numpy()

    return Memory(lambda data: torch.from_numpy(aligned(data)).pin_memory(), get)


def shape_of(geometry: Geometry) -> tuple[int, int, int, int, int]:
    """The five numbers that every operation takes."""
    g = geometry
    return g.num_units, g.unit_bytes, g.cols, g.tile_rows, g.tile_cols


@dataclass(frozen=True)
class CudaBackend:
    """A Backend on the operations of the module; undo is counts, index and before in one."""

    module: ModuleType
    memory: Memory
    snapshots: Memory | None = None  # of bases, where they are in other memory

    name = "cuda-module"

    def check64(self, *parts):
        return select("cpu").check64(*parts)

    @property
    def base_memory(self) -> Memory:
        return self.snapshots or self.memory

    def garbage(self, size_bytes: int) -> object:
        return self.memory.put(np.full(size_bytes, 0xA5, np.uint8))

    def class_params(self, base, unit_bytes):
        """As the format chooses them (section 10), from the samples of the device."""
        num_units = base.size // unit_bytes
        out = self.garbage(1024)
        data = self.base_memory.put(base)
        count = self.module.sample_classes(data, num_units, unit_bytes, out, STREAM)
        assert count == min(num_units, 1024)
        samples = self.memory.get(out)
        assert (samples[count:] == 0xA5).all()
        if not count:
            return 0, 0
        fields = np.sort(samples[:count])
        top, low = int(fields[count - 1 - count // 512]), int(fields[count // 64])
        shift = next(s for s in range(8) if (top >> s) - (low >> s) <= 12)
        return shift, max(0, (top >> shift) - 15)

    def digest_blocks(self, data, geometry, threads, first_block=0, num_blocks=None):
        count = geometry.num_blocks - first_block if num_blocks is None else num_blocks
        rows = self.garbage(16 * count)
        run = (*shape_of(geometry), first_block, count)
        self.module.digest_blocks(self.base_memory.put(data), *run, rows, STREAM)
        return self.memory.get(rows).view(np.uint64).reshape(-1, 2).copy()

    def encode_sections(
        self, base, new, geometry, params, digests, first, count, *, update, blocks_per_section
    ) -> tuple[bytes, np.ndarray, bytes]:
        """Body, sections [n, 5] and undo; base and rows of digests change in place."""
        module, shape = self.module, shape_of(geometry)
        num_sections = -(-count // blocks_per_section)
        body = self.garbage(module.encode_body_capacity(*shape, count))
        sections = self.garbage(40 * num_sections)
        scratch = self.garbage(module.encode_scratch_bytes(*shape, params.profile, count))
        old, rows = self.base_memory.put(base), self.memory.put(digests[first : first + count])
        module.encode_blocks(
            *(old, self.memory.put(new), *shape, *code_of(params), rows, first, count),
            *(blocks_per_section, update, body, sections, scratch, STREAM),
        )
        base[:] = self.base_memory.get(old)
        self._read_digests(rows, digests, first, count)
        table = self.memory.get(sections).view(np.uint64).reshape(-1, 5).copy()
        module.gather_undo(*shape, params.profile, count, scratch, STREAM)
        num_changed = int(table[:, 4].sum())
        sizes = (4 * count, 4 * num_changed, geometry.unit_bytes * num_changed)
        starts = module.undo_offsets(*shape, params.profile, count)
        memory = self.memory.get(scratch)
        undo = b"".join(
            memory[start : start + size].tobytes()
            for start, size in zip(starts, sizes, strict=True)
        )
        return self.memory.get(body).tobytes(), table, undo

    def encode_blocks(
        self,
        base,
        new,
        geometry,
        params,
        digests,
        first_block,
        num_blocks,
        *,
        update,
        undo,
        threads,
    ) -> EncodedBlocks:
        if num_blocks == 0:
            return EncodedBlocks(b"", 0)
        changed = base.copy()
        body, sections, log = self.encode_sections(
            *(changed, new, geometry, params, digests, first_block, num_blocks),
            update=update,
            blocks_per_section=num_blocks,
        )
        assert update or np.array_equal(changed, base)
        base[:] = changed
        _, _, offset, size, num_changed = map(int, sections[0])
        assert offset == 0
        return EncodedBlocks(body[:size], num_changed, log if undo else b"")

    def rollback(self, base, undo: bytes, geometry, first_block: int, num_blocks: int) -> None:
        """Puts back what encode_sections or encode_blocks of the same blocks changed in base."""
        num_changed = (len(undo) - 4 * num_blocks) // (4 + geometry.unit_bytes)
        log = np.frombuffer(undo, np.uint8)
        ends = (4 * num_blocks, 4 * num_blocks + 4 * num_changed)
        parts = [self.memory.put(part) for part in np.split(log, ends)]
        data = self.base_memory.put(base)
        run = (*shape_of(geometry), first_block, num_blocks)
        self.module.rollback_blocks(data, *run, *parts, STREAM)
        base[:] = self.base_memory.get(data)

    def rollback_blocks(self, base, undo, geometry) -> None:
        self.rollback(base, undo, geometry, 0, geometry.num_blocks)

    def apply_sections(self, data, body, geometry, params, digests, first, count, sections) -> int:
        """Units changed; sections are rows of first_block, num_blocks, offset, size, 0."""
        module, shape = self.module, shape_of(geometry)
        # A count of blocks that no tensor has is refused before its scratch is asked for.
        is_range = count <= geometry.num_blocks
        scratch = self.garbage(module.apply_scratch_bytes(*shape, count) if is_range else 0)
        tensor, rows = self.memory.put(data), self.memory.put(digests[first : first + count])
        table = self.memory.put(np.ascontiguousarray(sections, np.uint64))
        result, frame = self.garbage(16), self.memory.put(np.frombuffer(body, np.uint8))
        module.apply_blocks(
            *(tensor, frame, *shape, *code_of(params)[1:], rows, first, count),
            *(table, result, scratch, STREAM),
        )
        data[:] = self.memory.get(tensor)
        self._read_digests(rows, digests, first, count)
        first_error, num_changed = map(int, self.memory.get(result).view(np.uint64))
        if first_error != NO_ERROR:
            number = first_error & 255
            kind = ChecksumError if number == RESULT_CHECK else FormatError
            raise kind(f"block {first_error >> 8} (error {number})", number)
        return num_changed

    def apply_blocks(
        self, data, body, geometry, params, digests, first_block, num_blocks, threads
    ) -> int:
        section = [[first_block, num_blocks, 0, len(bytes(body)), 0]]
        run = (geometry, params, digests, first_block, num_blocks)
        return self.apply_sections(data, bytes(body), *run, section)

    def _read_digests(self, rows, digests: np.ndarray, first: int, count: int) -> None:
        found = self.memory.get(rows).view(np.uint64).reshape(-1, 2)
        digests[first : first + count] = found


def code_of(params: BlockParams) -> tuple[int, int, int, bool]:
    """Profile, class_shift, class_base and has_base, as the operations take them."""
    return params.profile, params.class_shift, params.class_base, params.has_base
