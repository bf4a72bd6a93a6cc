"""INT4 weights with a scale for each group of a row: the layout "pack-quantized".

Source: compressed-tensors 0.20.1 (`calculate_qparams`, `quantize`, `pack_to_int32`), whose results
for BF16, F16 and F32 weights are these bit for bit: each operation rounds to the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.tensors import Tensor
from gymfast.errors import FormatError
from gymfast.quantised.floats import F32, rounded, tensor_of, values_of

PACKED, SCALE, ZERO_POINT, SHAPE = "_packed", "_scale", "_zero_point", "_shape"
_LOWEST, _HIGHEST = -8, 7
_CODES_PER_WORD = 8
_EPSILON = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}  # scales of groups of zeros

Codes = NDArray[np.int8]
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Int4Scheme:
    """One scale, in the dtype of the weights, for `group_size` weights of a row.

    Without `is_symmetric` a group has a zero point too.
    """

    group_size: int = 32
    is_symmetric: bool = True

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}, expected 1 or more")

    @property
    def scale_suffixes(self) -> tuple[str, ...]:
        """What follows ".weight" in the names of the tensors that give the scales."""
        return (SCALE,) if self.is_symmetric else (SCALE, ZERO_POINT)

    @property
    def rows_of_parts(self) -> dict[str, int]:
        """By suffix: how many rows of weights one row of the part belongs to."""
        return {PACKED: 1, SCALE: 1, ZERO_POINT: _CODES_PER_WORD}

    def check(self, shape: tuple[int, ...], name: str) -> None:
        """Raises ValueError for a shape that is no matrix of whole groups."""
        if len(shape) != 2 or shape[1] % self.group_size or 0 in shape:
            raise ValueError(
                f"{name!r} has shape {shape}, expected rows of whole groups of "
                f"{self.group_size}: leave it as it is, or choose another group size"
            )

    def quantise(self, weight: Tensor, name: str, scales: Mapping[str, Tensor] | None) -> Parts:
        """The tensors that replace a weight, by suffix; with the scales given, or new ones.

        Weights out of the range of their scale get its nearest end. Raises ValueError for a shape
        that has no whole groups or another one than that of the scales, and as `values_of` does.
        """
        groups = self._groups(values_of(weight, name), name)
        if scales is None:
            scale, zero = self._scales(groups, weight.dtype)
        else:
            scale, zero = self._read_scales(scales, groups, name)
        # A huge weight over a small scale; the clip follows.
        with np.errstate(over="ignore"):
            levels = rounded_or_infinite(groups / scale[..., None], weight.dtype)
        if zero is not None:
            levels = rounded_or_infinite(levels + zero[..., None], weight.dtype)
        codes = np.rint(np.clip(levels, _LOWEST, _HIGHEST)).astype(np.int8).reshape(weight.shape)
        parts = {
            PACKED: _words(pack_int4(codes)),
            SCALE: tensor_of(scale, weight.dtype) if scales is None else scales[SCALE],
            SHAPE: _tensor("I64", np.array(weight.shape, np.int64)),
        }
        if zero is not None:
            packed = np.ascontiguousarray(pack_int4(zero.astype(np.int8).T).T)
            parts[ZERO_POINT] = _words(packed)
        return parts

    def dequantise(self, parts: Mapping[str, Tensor], name: str) -> F32:
        """The weights that the tensors stand for. Raises FormatError if they do not fit."""
        codes = self.codes(parts, name)
        scale = values_of(parts[SCALE], name)
        groups = codes.reshape(*scale.shape, self.group_size).astype(np.float32)
        if not self.is_symmetric:
            groups -= self._zero_points(parts[ZERO_POINT], scale.shape)[..., None]
        return rounded(groups * scale[..., None], parts[SCALE].dtype).reshape(codes.shape)

    def codes(self, parts: Mapping[str, Tensor], name: str) -> Codes:
        """The numbers -8..7 of the packed weights. Raises FormatError if the parts do not fit."""
        rows, columns = (int(size) for size in parts[SHAPE].data.view(np.int64))
        packed = parts[PACKED]
        expected = (rows, -(-columns // _CODES_PER_WORD))
        groups = (rows, columns // self.group_size)
        if packed.shape != expected or parts[SCALE].shape != groups or columns % self.group_size:
            raise FormatError(
                f"{name!r} says it is {rows} x {columns}: expected {expected} words and {groups} "
                f"scales, found {packed.shape} and {parts[SCALE].shape}"
            )
        return unpack_int4(packed.data.view(np.int32).reshape(packed.shape), columns)

    def num_saturated(self, weight: Tensor, name: str, scales: Mapping[str, Tensor]) -> int:
        """How many weights lie more than a step out of the range of their scale."""
        groups = self._groups(values_of(weight, name), name)
        scale, zero = self._read_scales(scales, groups, name)
        levels = groups / scale[..., None]
        if zero is not None:
            levels = levels + zero[..., None]
        return int(np.count_nonzero((levels < _LOWEST - 1) | (levels > _HIGHEST + 1)))

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """The "quantization_config" of a model whose other linear modules are quantised so."""
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": self.is_symmetric,
            "strategy": "group",
            "group_size": self.group_size,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ignore,
        }

    def _groups(self, values: F32, name: str) -> F32:
        self.check(values.shape, name)
        return values.reshape(len(values), -1, self.group_size)

    def _scales(self, groups: F32, dtype: str) -> tuple[F32, F32 | None]:
        lowest = np.minimum(groups.min(axis=-1), np.float32(0))
        highest = np.maximum(groups.max(axis=-1), np.float32(0))
        epsilon = np.float32(_EPSILON[dtype])
        if self.is_symmetric:
            scale = rounded(np.maximum(-lowest, highest) / np.float32(7.5), dtype)
            return np.where(scale == 0, epsilon, scale), None
        span = rounded(highest - lowest, dtype)
        scale = rounded(span / np.float32(15), dtype)
        ratio = np.divide(lowest, scale, out=np.full_like(scale, _LOWEST), where=scale != 0)
        zero = rounded(np.float32(_LOWEST) - rounded(ratio, dtype), dtype)
        zero = np.rint(np.clip(zero, _LOWEST, _HIGHEST))
        return np.where(scale == 0, epsilon, scale), zero

    def _read_scales(
        self, scales: Mapping[str, Tensor], groups: F32, name: str
    ) -> tuple[F32, F32 | None]:
        shape = groups.shape[:-1]
        scale = values_of(scales[SCALE], name)
        if scale.shape != shape or not (scale > 0).all():
            raise ValueError(
                f"{name!r} has {shape} groups, the scales given for it are {scale.shape} and have "
                "to be above zero"
            )
        return scale, None if self.is_symmetric else self._zero_points(scales[ZERO_POINT], shape)

    def _zero_points(self, packed: Tensor, shape: tuple[int, ...]) -> F32:
        words = packed.data.view(np.int32).reshape(packed.shape)
        return unpack_int4(np.ascontiguousarray(words.T), shape[0]).T.astype(np.float32)


def pack_int4(codes: Codes) -> NDArray[np.int32]:
    """Numbers -8..7 `[rows, columns]`, eight to a word, the first in the lowest bits.

    What fills up the last word of a row are bits of zero, not the code of 0.
    """
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // _CODES_PER_WORD) * _CODES_PER_WORD), np.uint8)
    padded[:, :columns] = codes.view(np.uint8) + np.uint8(8) & np.uint8(15)
    packed = padded[:, 0::2] | padded[:, 1::2] << np.uint8(4)
    words: NDArray[np.int32] = packed.view(np.dtype("<i4")).astype(np.int32, copy=False)
    return words


def unpack_int4(words: NDArray[np.int32], columns: int) -> Codes:
    """The first `columns` numbers of each row of words."""
    packed = np.ascontiguousarray(words).astype(np.dtype("<i4"), copy=False).view(np.uint8)
    codes = np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)
    flat = codes.reshape(len(words), -1)[:, :columns]
    return np.ascontiguousarray(flat).view(np.int8) - np.int8(8)


def rounded_or_infinite(values: F32, dtype: str) -> F32:
    """Rounded as `rounded` does; what is too large for the dtype becomes infinite."""
    is_finite = np.isfinite(values)
    if is_finite.all():
        return rounded(values, dtype)
    return np.where(is_finite, rounded(np.where(is_finite, values, 0), dtype), values)


def _words(words: NDArray[np.int32]) -> Tensor:
    return _tensor("I32", words)


def _tensor(dtype: str, values: NDArray[Any]) -> Tensor:
    return Tensor(dtype, values.shape, values.reshape(-1).view(np.uint8))
