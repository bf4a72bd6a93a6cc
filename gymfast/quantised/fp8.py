"""FP8 weights with a scale for each block: `weight` in E4M3 and `weight_scale_inv` in F32.

Source: DeepSeek-V3 (arXiv 2412.19437, 3.3) and its checkpoints; the arithmetic is that of slime's
tools/convert_hf_to_fp8.py: scale = max(largest, 1e-12) / 448, code = weight / scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.tensors import Tensor
from gymfast.errors import FormatError
from gymfast.quantised.floats import (
    E4M3_MAX,
    F32,
    e4m3_codes,
    e4m3_values,
    tensor_of,
    values_of,
)

WEIGHT, SCALE = "", "_scale_inv"
_LAST_STEP = 32.0  # between the two largest numbers
_SMALLEST = np.float32(1e-12)  # largest magnitude that a block of zeros is given


@dataclass(frozen=True)
class Fp8Scheme:
    """One F32 scale for a block of `block` weights, rows by columns; the last may be smaller."""

    block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        if min(self.block) < 1:
            raise ValueError(f"block is {self.block}, expected two sizes of 1 or more")

    @property
    def scale_suffixes(self) -> tuple[str, ...]:
        """What follows ".weight" in the names of the tensors that give the scales."""
        return (SCALE,)

    @property
    def rows_of_parts(self) -> dict[str, int]:
        """By suffix: how many rows of weights one row of the part belongs to."""
        return {WEIGHT: 1, SCALE: self.block[0]}

    def check(self, shape: tuple[int, ...], name: str) -> None:
        """Raises ValueError for a shape that is no matrix."""
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"{name!r} has shape {shape}, expected a matrix: leave it out")

    def quantise(
        self, weight: Tensor, name: str, scales: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """The tensors that replace a weight, by suffix; with the scales given, or new ones.

        Weights out of the range of their scale get its nearest end. Raises ValueError for a shape
        that is no matrix or another one than that of the scales, and as `values_of` does.
        """
        values = self._matrix(weight, name)
        scale = self._scales(values) if scales is None else self._read(scales, values.shape, name)
        with np.errstate(over="ignore"):
            levels = np.clip(values / self._spread(scale, values.shape), -E4M3_MAX, E4M3_MAX)
        codes = e4m3_codes(levels)
        return {
            WEIGHT: Tensor("F8_E4M3", weight.shape, codes.reshape(-1)),
            SCALE: tensor_of(scale, "F32") if scales is None else scales[SCALE],
        }

    def dequantise(self, parts: Mapping[str, Tensor], name: str) -> F32:
        """The weights that the tensors stand for. Raises FormatError if they do not fit."""
        codes = self.codes(parts, name)
        scale = values_of(parts[SCALE], name)
        weights: F32 = e4m3_values(codes) * self._spread(scale, codes.shape)
        return weights

    def codes(self, parts: Mapping[str, Tensor], name: str) -> NDArray[np.uint8]:
        """The bytes of the weights. Raises FormatError if the parts do not fit."""
        shape = parts[WEIGHT].shape
        if parts[SCALE].shape != self._num_blocks(shape):
            raise FormatError(
                f"{name!r} of {shape} has {parts[SCALE].shape} scales, expected "
                f"{self._num_blocks(shape)}"
            )
        codes: NDArray[np.uint8] = parts[WEIGHT].data.reshape(shape)
        return codes

    def num_saturated(self, weight: Tensor, name: str, scales: Mapping[str, Tensor]) -> int:
        """How many weights lie more than a step out of the range of their scale."""
        values = self._matrix(weight, name)
        levels = values / self._spread(self._read(scales, values.shape, name), values.shape)
        return int(np.count_nonzero(np.abs(levels) > E4M3_MAX + _LAST_STEP))

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """The "quantization_config" of a model whose other linear modules are quantised so."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": ignore,
        }

    def _matrix(self, weight: Tensor, name: str) -> F32:
        values = values_of(weight, name)
        self.check(values.shape, name)
        return values

    def _scales(self, values: F32) -> F32:
        (rows, columns), (tall, wide) = values.shape, self.block
        sizes = np.abs(values)
        by_column = np.maximum.reduceat(sizes, np.arange(0, columns, wide), axis=1)
        largest = np.maximum.reduceat(by_column, np.arange(0, rows, tall), axis=0)
        scale: F32 = np.divide(np.maximum(largest, _SMALLEST), np.float32(E4M3_MAX))
        return scale

    def _read(self, scales: Mapping[str, Tensor], shape: tuple[int, ...], name: str) -> F32:
        scale = values_of(scales[SCALE], name)
        if scale.shape != self._num_blocks(shape) or not (scale > 0).all():
            raise ValueError(
                f"{name!r} has {self._num_blocks(shape)} blocks, the scales given for it are "
                f"{scale.shape} and have to be above zero"
            )
        return scale

    def _num_blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // step) for size, step in zip(shape, self.block, strict=False))

    def _spread(self, scale: F32, shape: tuple[int, ...]) -> F32:
        tall, wide = self.block
        full = np.repeat(np.repeat(scale, tall, axis=0), wide, axis=1)
        return full[: shape[0], : shape[1]]
