"""Floating-point numbers of 8 and 16 bits as FP32 values, rounded as torch rounds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.memory import CPU
from gymfast.delta.tensors import Tensor

F32 = NDArray[np.float32]
FLOATS = ("BF16", "F16", "F32")
E4M3_MAX = 448.0  # OCP 8-bit floating point specification 1.0, E4M3: no infinities
_E4M3_SMALLEST_NORMAL = 2.0**-6
_E4M3_STEP = 2.0**-9  # between subnormal numbers


def values_of(tensor: Tensor, name: str) -> F32:
    """The numbers of a tensor, which may lie anywhere, as FP32 in its shape.

    Raises TypeError if they are no floats of 16 or 32 bits, ValueError if one is not finite.
    """
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name!r} is {tensor.dtype}, expected one of {FLOATS} to quantise")
    data = tensor.data if tensor.place == CPU else tensor.copy(CPU).data
    if tensor.dtype == "BF16":
        values = (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif tensor.dtype == "F16":
        values = data.view(np.float16).astype(np.float32)
    else:
        values = data.view(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{name!r} holds infinities or NaN, which no scale can represent")
    shaped: F32 = values.reshape(tensor.shape)
    return shaped


def rounded(values: F32, dtype: str) -> F32:
    """Finite values rounded to what the dtype can hold: to nearest, ties to even."""
    if dtype == "F32":
        return values
    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    return (_bf16_bits(values).astype(np.uint32) << np.uint32(16)).view(np.float32)


def tensor_of(values: F32, dtype: str) -> Tensor:
    """A tensor of the dtype that holds the values, which are rounded to it."""
    if dtype == "BF16":
        bits: NDArray[np.generic] = _bf16_bits(values)
    else:
        bits = values.astype(np.float16 if dtype == "F16" else np.float32)
    return Tensor(dtype, values.shape, np.ascontiguousarray(bits).reshape(-1).view(np.uint8))


def e4m3_codes(values: F32) -> NDArray[np.uint8]:
    """FP8 E4M3 of values in -448..448: to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Normal numbers: 20 of the 23 bits after the point go, the exponent gets another bias.
    odd = (magnitude >> np.uint32(20)) & np.uint32(1)
    normal = ((magnitude + odd + np.uint32(0x7FFFF)) >> np.uint32(20)) - np.uint32((127 - 7) << 3)
    absolute = magnitude.view(np.float32)
    small = np.rint(absolute / np.float32(_E4M3_STEP)).astype(np.uint32)
    sizes = np.where(absolute < _E4M3_SMALLEST_NORMAL, small, normal)
    codes: NDArray[np.uint8] = (sizes | bits >> np.uint32(24) & np.uint32(0x80)).astype(np.uint8)
    return codes


def e4m3_values(codes: NDArray[np.uint8]) -> F32:
    """The numbers that FP8 E4M3 codes stand for, NaN for the two that are none."""
    values: F32 = _E4M3_TABLE[codes]
    return values


def _bf16_bits(values: F32) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)).astype(np.uint16)


def _e4m3_table() -> F32:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    size = np.where(exponent == 0, fraction * _E4M3_STEP, normal)
    size[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -size, size).astype(np.float32)


_E4M3_TABLE = _e4m3_table()
