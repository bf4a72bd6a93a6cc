"""A CUDA device of ordinary memory: torch tensors that say "cuda:0", and kernels in the shim."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

import gymfast
from gymfast.delta import memory

ALIGNMENT = 512
DEVICE = torch.device("cuda", 0)


class FakeCuda(torch.Tensor):
    """A tensor in CPU memory whose device is cuda:0; what is made from it is one too."""

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    def plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def cpu(self) -> torch.Tensor:
        return self.plain().clone()

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def to(self, place, copy: bool = False) -> FakeCuda:
        assert place == str(DEVICE)
        assert copy
        return self.clone()

    def new_empty(self, size: int, *, dtype: torch.dtype) -> FakeCuda:
        """Garbage, aligned as CUDA aligns what it gives."""
        assert dtype is torch.uint8
        memory = torch.full((size + ALIGNMENT,), 0xA5, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + size].as_subclass(FakeCuda)

    def __dlpack_device__(self):
        return self.plain().__dlpack_device__()

    def __dlpack__(self, **options):
        return self.plain().__dlpack__(**options)


def to_device(value: torch.Tensor) -> FakeCuda:
    """A copy on the device; on the real one where there is a GPU."""
    return value.cuda() if torch.cuda.is_available() else value.clone().as_subclass(FakeCuda)


@dataclass
class Stream:
    cuda_stream: int = 0

    def synchronize(self) -> None:
        pass


def zeros(num_bytes: int, place: str):
    """As gymfast.delta.memory.zeros, on the device that is not there."""
    if memory.kind_of(place) == memory.CUDA:
        return torch.zeros(num_bytes, dtype=torch.uint8).as_subclass(FakeCuda)
    return real_zeros(num_bytes, place)


real_zeros = memory.zeros


def install(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Makes the shim the kernels of `backend="cuda"`."""
    patch.delitem(sys.modules, "gymfast.delta.backends.cuda", raising=False)
    patch.setitem(sys.modules, "gymfast._cuda", module)
    patch.setattr(gymfast, "_cuda", module, raising=False)
    patch.setattr(memory, "zeros", zeros)
    patch.setattr(memory, "empty_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
