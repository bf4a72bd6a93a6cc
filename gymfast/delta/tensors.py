"""Tensors as the codec sees them: a dtype tag, a shape and bytes; from NumPy, torch or our own."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gymfast.delta import memory
from gymfast.delta.geometry import num_bytes_of
from gymfast.delta.memory import Data

Weights = Mapping[str, Any]
Identity = tuple[object, ...]
MAX_NAME_BYTES = 1024

_PLAIN = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "float64": "F64",
    "uint64": "U64",
    "int64": "I64",
    "complex64": "C64",
}
# Dtypes of torch, and of NumPy once ml_dtypes is loaded.
_SMALL_FLOATS = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_TAG_OF = _PLAIN | _SMALL_FLOATS
_NUMPY_OF = {tag: name for name, tag in _TAG_OF.items()}
_TORCH_FLOAT4 = "float4_e2m1fn_x2"


@dataclass(frozen=True, eq=False)
class Tensor:
    """Bytes of one tensor with its safetensors dtype tag; `data` is 1-D, contiguous, row-major.

    It is a NumPy array in CPU memory, and a torch.uint8 tensor in CUDA or pinned memory. `is_copy`
    says that data is not the memory of the object the tensor was made from, so that writing to
    data would not reach that object.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Data
    is_copy: bool = False

    def __post_init__(self) -> None:
        data = self.data
        if not memory.is_flat(data):
            shape = tuple(data.shape)
            raise ValueError(f"data is {data.dtype} {shape}, expected contiguous 1-D uint8")
        expected = num_bytes_of(self.dtype, self.shape)
        if self.num_bytes != expected:
            raise ValueError(
                f"{self.dtype} {self.shape} has {expected} bytes, data {self.num_bytes}"
            )

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return memory.size_of(self.data)

    @cached_property
    def address(self) -> int:
        """Where data begins in memory."""
        return memory.address_of(self.data)

    @cached_property
    def place(self) -> str:
        """Where data lies: "cpu", "pinned" or a device such as "cuda:0"."""
        return memory.place_of(self.data)

    def copy(self, place: str | None = None) -> Tensor:
        """The same tensor in memory of its own, at the same place if no other is given."""
        return Tensor(self.dtype, self.shape, memory.copy_to(self.data, place or self.place))

    def on_host(self) -> Tensor:
        """A tensor of pinned memory as one that the CPU works on, without a copy."""
        return Tensor(self.dtype, self.shape, memory.on_host(self.data))


def zeros(dtype: str, shape: tuple[int, ...], place: str = memory.CPU) -> Tensor:
    """A tensor of zero bytes; on the CPU large ones take no memory until they are written."""
    return Tensor(dtype, shape, memory.zeros(num_bytes_of(dtype, shape), place))


def as_tensor(value: Any, name: str = "value") -> Tensor:
    """The bytes of an array: without a copy where it is contiguous and little-endian.

    Takes a Tensor, a NumPy array or a torch tensor in CPU or CUDA memory; `name` is for errors.
    Raises TypeError for anything else, or if its dtype has no safetensors tag.
    """
    if isinstance(value, Tensor):
        return value
    dtype, shape = spec_of(value, name)
    if isinstance(value, np.ndarray):
        return _from_numpy(value, dtype, shape)
    return _from_torch(value, dtype, shape)


def spec_of(value: Any, name: str = "value") -> tuple[str, tuple[int, ...]]:
    """The dtype tag and shape of what as_tensor takes, without touching its bytes.

    Raises TypeError as as_tensor does.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    if isinstance(value, np.ndarray):
        return _numpy_spec(value, name)
    if _is_torch(value):
        return _torch_spec(value, name)
    raise TypeError(
        f"{name!r} is a {type(value).__module__}.{type(value).__qualname__}, expected a NumPy "
        "array, a torch tensor or a gymfast.delta.Tensor: leave it out or convert it"
    )


@lru_cache(maxsize=2**16)
def check_name(name: object) -> str:
    """The name itself, if a frame can carry it.

    Raises TypeError if it is no string, ValueError if it breaks rule R13 of the wire format.
    """
    if not isinstance(name, str):
        raise TypeError(f"tensor name {name!r} is a {type(name).__name__}, expected a string")
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"tensor name {name!r} is not valid Unicode: rename it") from error
    if not 1 <= num_bytes <= MAX_NAME_BYTES:
        raise ValueError(f"tensor name {name[:80]!r} has {num_bytes} bytes, expected 1..1024")
    if any(char < " " or char == "\x7f" for char in name):
        raise ValueError(f"tensor name {name!r} holds a control character: rename it")
    return name


def identity(value: Any) -> Identity | None:
    """What two names of the same memory have in common: address, dtype, shape and strides.

    None for a tensor without bytes. Comparable only while both objects are alive.
    """
    if isinstance(value, Tensor):
        strides: tuple[int, ...] = ()
        address, dtype, shape = value.address, value.dtype, value.shape
        num_bytes = value.num_bytes
    elif isinstance(value, np.ndarray):
        address, strides = value.__array_interface__["data"][0], value.strides
        dtype, shape, num_bytes = _numpy_tag(value.dtype), value.shape, value.size
        strides = () if value.flags.c_contiguous else strides
    elif _is_torch(value) and _has_own_memory(value):
        address, strides = value.data_ptr(), tuple(value.stride())
        dtype, shape, num_bytes = _torch_tag(value), tuple(value.shape), value.numel()
        strides = () if value.is_contiguous() else strides
        if value.is_conj() or value.is_neg():
            return None
    else:
        return None
    return (address, dtype, tuple(shape), strides) if num_bytes else None


def place_of_value(value: Any) -> str:
    """Where the bytes of what as_tensor takes lie: "cpu", "pinned" or a device such as "cuda:0"."""
    if isinstance(value, Tensor):
        return value.place
    return str(value.device) if _is_torch(value) else memory.CPU


def why_not_live(tensor: Tensor) -> str:
    """Why a tensor cannot be updated in place, or an empty text."""
    if tensor.num_bytes == 0:
        return ""
    if tensor.is_copy:
        return "is not contiguous (or not little-endian)"
    return "" if memory.is_writable(tensor.data) else "is read-only"


def overlapping(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Names of two tensors that share part of their memory, or None; give each tie once."""
    ranges = sorted(
        (t.address, t.address + t.num_bytes, name) for name, t in tensors if t.num_bytes
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
        if start < end:
            return first, second
    return None


def like(tensor: Tensor, sample: Any) -> Any:
    """The tensor as an object of the sort that sample is, sharing the bytes of the tensor.

    A Tensor comes back where sample is neither NumPy nor torch, or they have no such dtype.
    """
    if _is_torch(sample) or _is_torch(tensor.data):
        return _to_torch(tensor)
    if isinstance(sample, np.ndarray):
        return _to_numpy(tensor)
    return tensor


@cache
def _numpy_tag(dtype: np.dtype[Any]) -> str:
    return _TAG_OF.get(dtype.name, "")


def _numpy_spec(value: NDArray[Any], name: str) -> tuple[str, tuple[int, ...]]:
    tag = _numpy_tag(value.dtype)
    if not tag:
        raise TypeError(
            f"{name!r}: NumPy dtype {value.dtype} has no safetensors tag: convert it, or pass its "
            "bytes as .view(numpy.uint8)"
        )
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name!r} is a masked array: pass .data or .filled()")
    return tag, tuple(value.shape)


def _from_numpy(value: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> Tensor:
    plain = np.asarray(value)
    is_swapped = not plain.dtype.isnative
    if is_swapped:
        plain = plain.astype(plain.dtype.newbyteorder("<"))
    is_copy = is_swapped or not plain.flags.c_contiguous
    data = np.ascontiguousarray(plain).reshape(-1).view(np.uint8)
    return Tensor(dtype, shape, data, is_copy=is_copy)


def _to_numpy(tensor: Tensor) -> Any:
    name = _NUMPY_OF.get(tensor.dtype, "")
    if name in _SMALL_FLOATS:
        scalar = getattr(sys.modules.get("ml_dtypes"), name, None)
        return tensor if scalar is None else tensor.data.view(scalar).reshape(tensor.shape)
    return tensor.data.view(name).reshape(tensor.shape) if name else tensor


def _is_torch(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _torch_tag(value: Any) -> str:
    name = str(value.dtype).removeprefix("torch.")
    return "F4" if name == _TORCH_FLOAT4 else _TAG_OF.get(name, "")


def _torch_spec(value: Any, name: str) -> tuple[str, tuple[int, ...]]:
    tag = _torch_tag(value)
    if not tag or value.is_quantized:
        raise TypeError(
            f"{name!r}: {value.dtype} has no safetensors tag: convert it, or pass its bytes as "
            ".view(torch.uint8)"
        )
    if not _has_own_memory(value):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}, which has no memory of its own: of a "
            "DTensor pass the local part (.to_local()) or the whole (.full_tensor())"
        )
    if value.device.type not in (memory.CPU, memory.CUDA) or str(value.layout) != "torch.strided":
        raise TypeError(
            f"{name!r} is {value.layout} on {value.device}, expected torch.strided on cpu or cuda: "
            "pass .cpu() (or .to_dense())"
        )
    shape = tuple(value.shape)
    if tag == "F4":  # two elements to a byte, as safetensors counts them
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    return tag, shape


def _has_own_memory(value: Any) -> bool:
    """False for wrappers such as DTensor, whose address is that of no bytes, and for fakes."""
    torch: Any = sys.modules["torch"]
    return type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _from_torch(value: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    torch: Any = sys.modules["torch"]
    if value.numel() == 0:
        return zeros(dtype, shape, str(value.device))
    plain = value.detach()
    is_copy = bool(plain.is_conj() or plain.is_neg() or not plain.is_contiguous())
    if is_copy:
        plain = plain.resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8)
    if value.device.type == memory.CPU:
        data = data.numpy()
    return Tensor(dtype, shape, data, is_copy=is_copy)


def _to_torch(tensor: Tensor) -> Any:
    torch: Any = sys.modules["torch"]
    name = _TORCH_FLOAT4 if tensor.dtype == "F4" else _NUMPY_OF.get(tensor.dtype, "")
    dtype = getattr(torch, name, None) if name else None
    if dtype is None or (tensor.dtype == "F4" and (not tensor.shape or tensor.shape[-1] % 2)):
        return tensor
    shape = (*tensor.shape[:-1], tensor.shape[-1] // 2) if tensor.dtype == "F4" else tensor.shape
    if math.prod(shape) == 0:
        device = memory.CPU if tensor.place == memory.PINNED else tensor.place
        return torch.empty(shape, dtype=dtype, device=device)
    data = torch.from_numpy(tensor.data) if isinstance(tensor.data, np.ndarray) else tensor.data
    return data.view(dtype).reshape(shape)
