"""Bytes of a model in the number formats that trainers send and engines serve."""

from __future__ import annotations

import math
from typing import Literal, get_args

from gymfast.models.config import ModelConfig
from gymfast.models.tensors import ModelTensor, tensors_of

Format = Literal["bf16", "fp8", "int4"]
FORMATS: tuple[Format, ...] = get_args(Format)

_FP8_BLOCK = 128  # one F32 scale for each 128 x 128 weights: DeepSeek-V3, arXiv 2412.19437, 3.3
_INT4_GROUP = 32  # one BF16 scale for 32 weights of a row: Kimi-K2 QAT, compressed-tensors
_LINEAR = ("attention", "dense", "shared", "routed")


def tensor_bytes(tensor: ModelTensor, fmt: Format) -> int:
    """Bytes of one tensor with its scales.

    BF16 but for these: router biases are F32; fp8 makes the matrices of attention and MLPs FP8
    with block scales; int4 makes the routed experts INT4 with group scales.
    """
    if tensor.role == "router" and len(tensor.shape) == 1:
        return 4 * tensor.num_params
    if fmt == "fp8" and tensor.role in _LINEAR and len(tensor.shape) == 2:
        blocks = math.prod(math.ceil(size / _FP8_BLOCK) for size in tensor.shape)
        return tensor.num_params + 4 * blocks
    if fmt == "int4" and tensor.role == "routed":
        rows, columns = tensor.shape
        return tensor.num_params // 2 + 2 * rows * math.ceil(columns / _INT4_GROUP)
    return 2 * tensor.num_params


def model_bytes(config: ModelConfig, fmt: Format = "bf16", *, with_mtp: bool = True) -> int:
    """Bytes of all tensors of a model in a format, with or without its layers for MTP."""
    return sum(tensor_bytes(t, fmt) for t in tensors_of(config) if with_mtp or not t.is_mtp)
