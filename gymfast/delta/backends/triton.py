"""The Triton back end: the codec on torch tensors in CUDA memory, the same bytes as the CPU's.

Data stays on the device; frame bodies, digests and counts cross to the host. Kernels run on the
current stream of torch. Under TRITON_INTERPRET=1 the tensors live in CPU memory instead.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from gymfast.delta import memory
from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks
from gymfast.delta.backends.class_samples import class_params_of
from gymfast.delta.backends.triton_decode import apply_section
from gymfast.delta.backends.triton_diff import Diff, rollback
from gymfast.delta.backends.triton_encode import SectionEncoder
from gymfast.delta.backends.triton_kernels_digest import sample_kernel
from gymfast.delta.backends.triton_section import UNIT_DTYPES, Section, digest_section, fold32
from gymfast.delta.geometry import Geometry
from gymfast.errors import FormatError

_NUM_SAMPLES = 1024
_BAD_BLOCK_INDEX = 50
U64 = NDArray[np.uint64]


class TritonBackend(Backend):
    """The back end that `select("triton")` returns; tensors are 1-D uint8 on a CUDA device."""

    name = "triton"
    kinds = (memory.CUDA,)

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
    ) -> U64:
        """Partial digests of all blocks or of a range, [num_blocks, 2]."""
        units = _units(data, geometry, "data")
        count = geometry.num_blocks - first_block if num_blocks is None else num_blocks
        with _current(data):
            return digest_section(units, _section(geometry, first_block, count))

    def class_params(self, base: torch.Tensor, unit_bytes: int) -> tuple[int, int]:
        """class_shift and class_base of a base tensor."""
        num_units = base.numel() // unit_bytes
        units = _units(base, Geometry(num_units, unit_bytes, num_units, 1, num_units), "base")
        num_samples = min(num_units, _NUM_SAMPLES)
        if not num_samples:
            return 0, 0
        out = torch.empty(num_samples, dtype=torch.uint8, device=base.device)
        with _current(base):
            sample_kernel[(1,)](units, out, num_units, num_samples, unit_bytes, _NUM_SAMPLES)
        return class_params_of(out.cpu().numpy())

    def encode_blocks(
        self,
        base: torch.Tensor,
        new: torch.Tensor,
        geometry: Geometry,
        params: BlockParams,
        digests: U64,
        first_block: int,
        num_blocks: int,
        *,
        update: bool,
        undo: bool,
        threads: int,  # noqa: ARG002
    ) -> EncodedBlocks:
        """See Backend; base is written last, after everything that can fail."""
        units, fresh = _units(base, geometry, "base"), _units(new, geometry, "new")
        _check_pair(base, new)
        section = _section(geometry, first_block, num_blocks)
        if not num_blocks:
            return EncodedBlocks(b"", 0)
        rows = digests[first_block : first_block + num_blocks]
        with _current(base):
            return _encode(Diff(units, fresh, section, params), params, rows, update, undo)

    def rollback_blocks(
        self, base: torch.Tensor, undo: bytes | memoryview, geometry: Geometry
    ) -> None:
        """Puts back the old values of an undo blob of this back end."""
        units = _units(base, geometry, "base")
        with _current(base):
            rollback(units, undo, geometry.unit_bytes)

    def apply_blocks(
        self,
        data: torch.Tensor,
        body: bytes | memoryview,
        geometry: Geometry,
        params: BlockParams,
        digests: U64,
        first_block: int,
        num_blocks: int,
        threads: int,  # noqa: ARG002
    ) -> int:
        """See Backend; all blocks of the section are decoded and checked before the first write."""
        units = _units(data, geometry, "data")
        section = _section(geometry, first_block, num_blocks, least=1)
        with _current(data):
            return apply_section(units, body, section, params, digests)


def _encode(diff: Diff, params: BlockParams, rows: U64, update: bool, undo: bool) -> EncodedBlocks:
    """The section of a diff; rows are the digests of its blocks, and are brought up to date."""
    if not diff.num_changed:
        return EncodedBlocks(b"", 0)
    new_rows = rows + diff.compact().view(np.uint64)
    encoder = SectionEncoder(diff, params)
    body = encoder.write(encoder.choose(), [fold32(row) for row in new_rows])
    encoded = EncodedBlocks(body, diff.num_changed, diff.update(update=update, undo=undo))
    rows[:] = new_rows
    return encoded


def _current(data: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the device of a tensor the current one, where Triton launches."""
    context: AbstractContextManager[object] = nullcontext()
    return torch.cuda.device(data.device) if data.device.type == "cuda" else context


def _units(data: torch.Tensor, geometry: Geometry, name: str) -> torch.Tensor:
    """The units of a tensor, after a look at everything a kernel relies on."""
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{name} is {type(data).__name__}, expected a torch tensor: backend='cpu'")
    expected = "cpu" if triton.knobs.runtime.interpret else "cuda"
    if data.device.type != expected:
        raise ValueError(
            f"{name} is on {data.device}, expected {expected}: move it, or use backend='cpu'"
        )
    if data.dtype is not torch.uint8 or data.shape != (geometry.num_bytes,):
        raise ValueError(
            f"{name} is {data.dtype} of shape {tuple(data.shape)}, expected torch.uint8 of "
            f"({geometry.num_bytes},)"
        )
    if not data.is_contiguous():
        raise ValueError(f"{name} has stride {data.stride(0)}, expected 1: pass a contiguous copy")
    if data.data_ptr() % geometry.unit_bytes or data.storage_offset() % geometry.unit_bytes:
        raise ValueError(
            f"{name} starts at byte {data.data_ptr():#x}, expected a multiple of its units of "
            f"{geometry.unit_bytes} bytes"
        )
    return data.view(UNIT_DTYPES[geometry.unit_bytes])


def _check_pair(base: torch.Tensor, new: torch.Tensor) -> None:
    if base.device != new.device:
        raise ValueError(f"base is on {base.device}, new on {new.device}: expected one device")
    start, other, size = base.data_ptr(), new.data_ptr(), base.numel()
    if size and start < other + size and other < start + size:
        raise ValueError("base and new overlap: expected two tensors with memory of their own")


def _section(geometry: Geometry, first_block: int, num_blocks: int, least: int = 0) -> Section:
    if first_block < 0 or num_blocks < least or first_block + num_blocks > geometry.num_blocks:
        raise FormatError(
            f"{num_blocks} blocks from {first_block}, the tensor has {geometry.num_blocks}",
            _BAD_BLOCK_INDEX,
        )
    return Section(geometry, first_block, num_blocks)
