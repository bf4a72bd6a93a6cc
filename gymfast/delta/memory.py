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
    return bool(str(data.dtype) == "torch.uint8" and data.dim() == 1 and data.is_contiguous())


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
    """Bytes of zero; raises as `empty` does."""
    return np.zeros(num_bytes, np.uint8) if place == CPU else empty(num_bytes, place).zero_()


def empty(num_bytes: int, place: str) -> Data:
    """Bytes of any value in pinned or CUDA memory, from the allocators of torch.

    Raises MemoryError if there is no room for them, MissingDependencyError if there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise MissingDependencyError(
            f"{place} memory is asked for, and torch {torch.__version__} finds no GPU: use "
            "backend='cpu' (or 'auto', which follows the tensors), or a CUDA build of torch"
        )
    where: dict[str, Any] = {"pin_memory": True} if place == PINNED else {"device": place}
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, **where)
    except RuntimeError as error:  # OutOfMemoryError, and what CUDA says of pinned memory
        raise MemoryError(str(error)) from error


def allocated_bytes(num_bytes: int, place: str) -> int:
    """What memory of that size takes: torch rounds pinned memory up to a power of two."""
    is_rounded = place == PINNED and num_bytes > 0
    return 1 << (num_bytes - 1).bit_length() if is_rounded else num_bytes


def copy_to(data: Data, place: str) -> Data:
    """A copy of some bytes at a place; raises as `empty` does."""
    if place == CPU:
        return data.copy() if isinstance(data, np.ndarray) else data.cpu().numpy().copy()
    copied = empty(size_of(data), place)
    assign(copied, data)
    return copied


def assign(data: Data, other: Data) -> None:
    """Makes data the bytes of other, wherever both lie; complete where the CPU may look at it."""
    if isinstance(data, np.ndarray):
        data[:] = other if isinstance(other, np.ndarray) else other.cpu().numpy()
        return
    if isinstance(other, np.ndarray):
        import torch

        other = torch.from_numpy(other if other.flags.writeable else other.copy())
    data.copy_(other)


def on_host(data: Data) -> U8:
    """Pinned bytes as an array on the same memory; bytes of the CPU as they are."""
    array: U8 = data if isinstance(data, np.ndarray) else data.numpy()
    return array


def count_different(data: Data, other: Data) -> int:
    """Bytes that differ."""
    if isinstance(data, np.ndarray) and isinstance(other, np.ndarray):
        return int(np.count_nonzero(data != other))
    if place_of(data) != place_of(other):
        return count_different(copy_to(data, CPU), copy_to(other, CPU))
    return int((data != other).sum())
