"""Where the bytes of a tensor lie: a NumPy array in CPU memory, a torch tensor anywhere else.

Places are "cpu", "pinned" (CPU memory that a GPU reaches) and devices as torch names them, such as
"cuda:0". Tensors of torch in pageable CPU memory are NumPy arrays here.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gymfast.errors import MissingDependencyError

U8 = NDArray[np.uint8]
Data: TypeAlias = Any  # U8, or a 1-D contiguous torch.uint8 tensor: torch is optional
CPU, PINNED, CUDA = "cpu", "pinned", "cuda"


def place_of(data: Data) -> str:
    """The place of some bytes."""
    if isinstance(data, np.ndarray):
        return CPU
    return PINNED if data.device.type == CPU else str(data.device)


def kind_of(place: str) -> str:
    """A place without the number of its device: "cpu", "pinned" or "cuda"."""
    return place.partition(":")[0]


def is_flat(data: Data) -> bool:
    """Whether data is what the codec works on: contiguous, 1-D, bytes."""
    if isinstance(data, np.ndarray):
        return data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous
    return bool(data.dtype == _torch().uint8 and data.dim() == 1 and data.is_contiguous())


def size_of(data: Data) -> int:
    """Number of bytes."""
    return data.size if isinstance(data, np.ndarray) else int(data.numel())


def address_of(data: Data) -> int:
    """Where the bytes begin."""
    if isinstance(data, np.ndarray):
        return int(data.__array_interface__["data"][0])
    return int(data.data_ptr())


def is_writable(data: Data) -> bool:
    """Whether the bytes may be changed in place."""
    return bool(data.flags.writeable) if isinstance(data, np.ndarray) else True


def zeros(num_bytes: int, place: str) -> Data:
    """Bytes of zero.

    Raises MemoryError if there is no room for them, MissingDependencyError if there is no GPU.
    """
    if place == CPU:
        return np.zeros(num_bytes, np.uint8)
    torch = _torch()
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            f"{place} memory is asked for, and torch {torch.__version__} finds no GPU: use "
            "backend='cpu' (or 'auto', which follows the tensors), or a CUDA build of torch"
        )
    try:
        if place == PINNED:
            return empty_pinned(num_bytes).zero_()
        return torch.zeros(num_bytes, dtype=torch.uint8, device=place)
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error


def empty_pinned(num_bytes: int) -> Data:
    """Pinned bytes of any value, from torch, which keeps what is freed for the next caller."""
    torch = _torch()
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def copy_to(data: Data, place: str) -> Data:
    """A copy of some bytes at a place, complete on return where the CPU may look at it."""
    if place == CPU:
        return data.copy() if isinstance(data, np.ndarray) else data.cpu().numpy().copy()
    if isinstance(data, np.ndarray):
        data = _torch().from_numpy(data)
    if place == PINNED:
        copied = empty_pinned(size_of(data))
        copied.copy_(data)
        return copied
    return data.to(place, copy=True)


def on_host(data: Data) -> U8:
    """Pinned bytes as an array on the same memory; bytes of the CPU as they are."""
    array: U8 = data if isinstance(data, np.ndarray) else data.numpy()
    return array


def count_different(data: Data, other: Data) -> int:
    """Bytes that differ."""
    if isinstance(data, np.ndarray) and isinstance(other, np.ndarray):
        return int(np.count_nonzero(data != other))
    return int((data != other).sum())


def _torch() -> Any:
    """torch; ImportError where it is not installed."""
    import torch

    return torch
