"""CUDA devices of ordinary memory: torch tensors that say "cuda:0", and kernels in the shim."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

import gymfast
from gymfast.delta import memory

ALIGNMENT = 512
# Copies that a non-blocking copy has only announced.
_waiting: list[Callable[[], object]] = []


class FakeCuda(torch.Tensor):
    """A tensor in CPU memory whose device is cuda:0; what is made from it is one too."""

    index = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def is_cuda(self) -> bool:
        return True

    def plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def cpu(self) -> torch.Tensor:
        return self.plain().clone()

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __dlpack_device__(self):
        return self.plain().__dlpack_device__()

    def __dlpack__(self, **options):
        return self.plain().__dlpack__(**options)


class SecondFakeCuda(FakeCuda):
    """A tensor on cuda:1."""

    index = 1


class FakePinned(torch.Tensor):
    """A tensor in pinned memory: what is copied to it without waiting comes late."""

    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> FakePinned:
        target = self.as_subclass(torch.Tensor)
        if non_blocking:
            _waiting.append(lambda: target.copy_(other))
        else:
            target.copy_(other)
        return self


KINDS = {"cuda": FakeCuda, "cuda:0": FakeCuda, "cuda:1": SecondFakeCuda, "pinned": FakePinned}


def to_device(value: torch.Tensor, place: str = "cuda:0") -> torch.Tensor:
    """A copy on the device; on the real one where there is a GPU."""
    return value.to(place) if torch.cuda.is_available() else value.clone().as_subclass(KINDS[place])


@dataclass
class Stream:
    cuda_stream: int = 0

    def synchronize(self) -> None:
        while _waiting:
            _waiting.pop(0)()


def empty(num_bytes: int, place: str) -> torch.Tensor:
    """Garbage, aligned as CUDA aligns what it gives."""
    garbage = torch.full((num_bytes + ALIGNMENT,), 0xA5, dtype=torch.uint8)
    start = -garbage.data_ptr() % ALIGNMENT
    return garbage[start : start + num_bytes].as_subclass(KINDS[place])


def install(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Makes the shim the kernels of `backend="cuda"`."""
    patch.delitem(sys.modules, "gymfast.delta.backends.cuda", raising=False)
    patch.setitem(sys.modules, "gymfast._cuda", module)
    patch.setattr(gymfast, "_cuda", module, raising=False)
    patch.setattr(memory, "empty", empty)
    patch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
