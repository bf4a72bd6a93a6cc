"""A decoder-only transformer over bytes: RMSNorm, rotary attention, SwiGLU, tied embedding.

Parameters are a plain dict of named tensors, as a checkpoint holds them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, TypeAlias

from gymfast.demo.options import EMBEDDING, FINAL_NORM, ModelShape, weight_shapes
from gymfast.errors import MissingDependencyError

TorchTensor: TypeAlias = Any
"""A torch.Tensor; torch is optional, so its types are not named here."""

Parameters: TypeAlias = dict[str, TorchTensor]
MISSING_TORCH = "gymfast demo trains a real model with torch: install gymfast[torch]"
RESIDUAL = ("o_proj.weight", "down_proj.weight")
"""Matrices that write to the residual stream; they start smaller."""


def load_torch() -> ModuleType:
    """The torch module.

    Raises MissingDependencyError if it is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependencyError(MISSING_TORCH) from error


def init_parameters(shape: ModelShape, seed: int) -> Parameters:
    """FP32 master weights from a seeded generator, ready for gradients."""
    torch = load_torch()
    generator = torch.Generator().manual_seed(seed)
    std = shape.width**-0.5
    residual_std = std * (2 * shape.num_layers) ** -0.5
    parameters: Parameters = {}
    for name, dims in weight_shapes(shape).items():
        if len(dims) == 1:
            parameters[name] = torch.ones(dims)
        else:
            scale = residual_std if name.endswith(RESIDUAL) else std
            parameters[name] = torch.randn(dims, generator=generator).mul_(scale)
    return {name: value.requires_grad_() for name, value in parameters.items()}


class KeyValueCache:
    """Keys and values of the tokens seen so far, one pair per layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[TorchTensor, TorchTensor]] = {}
        self.num_tokens = 0

    def extend(
        self, layer: int, keys: TorchTensor, values: TorchTensor
    ) -> tuple[TorchTensor, TorchTensor]:
        """All keys and values of the layer, the new ones at the end."""
        if layer in self.layers:
            torch = load_torch()
            old_keys, old_values = self.layers[layer]
            keys, values = torch.cat((old_keys, keys), 2), torch.cat((old_values, values), 2)
        self.layers[layer] = (keys, values)
        return keys, values


def forward(
    parameters: Parameters,
    shape: ModelShape,
    tokens: TorchTensor,
    cache: KeyValueCache | None = None,
) -> TorchTensor:
    """Logits `[batch, length, vocabulary]` of the next byte; `tokens` is `[batch, length]`.

    With a cache the tokens continue what it holds.
    """
    functional = load_torch().nn.functional
    start = cache.num_tokens if cache else 0
    rotation = _rotation(shape, start, tokens.shape[1])
    x = functional.embedding(tokens, parameters[EMBEDDING])
    for layer in range(shape.num_layers):
        x = x + _attention(parameters, shape, layer, x, rotation, cache)
        x = x + _feed_forward(parameters, layer, x)
    if cache:
        cache.num_tokens += tokens.shape[1]
    return functional.linear(_norm(x, parameters[FINAL_NORM]), parameters[EMBEDDING])


def _attention(
    parameters: Parameters,
    shape: ModelShape,
    layer: int,
    x: TorchTensor,
    rotation: tuple[TorchTensor, TorchTensor],
    cache: KeyValueCache | None,
) -> TorchTensor:
    functional = load_torch().nn.functional
    prefix = f"model.layers.{layer}."
    normed = _norm(x, parameters[prefix + "input_layernorm.weight"])
    batch, length, width = x.shape

    def heads(part: str) -> TorchTensor:
        projected = functional.linear(normed, parameters[f"{prefix}self_attn.{part}_proj.weight"])
        return projected.view(batch, length, shape.num_heads, shape.head_width).transpose(1, 2)

    queries, keys, values = _rotate(heads("q"), rotation), _rotate(heads("k"), rotation), heads("v")
    if cache:
        keys, values = cache.extend(layer, keys, values)
    mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=length > 1)
    mixed = mixed.transpose(1, 2).reshape(batch, length, width)
    return functional.linear(mixed, parameters[prefix + "self_attn.o_proj.weight"])


def _feed_forward(parameters: Parameters, layer: int, x: TorchTensor) -> TorchTensor:
    functional = load_torch().nn.functional
    prefix = f"model.layers.{layer}."
    normed = _norm(x, parameters[prefix + "post_attention_layernorm.weight"])
    gate = functional.silu(functional.linear(normed, parameters[prefix + "mlp.gate_proj.weight"]))
    up = functional.linear(normed, parameters[prefix + "mlp.up_proj.weight"])
    return functional.linear(gate * up, parameters[prefix + "mlp.down_proj.weight"])


def _norm(x: TorchTensor, weight: TorchTensor) -> TorchTensor:
    scale = x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    return (x.float() * scale).to(x.dtype) * weight


def _rotation(shape: ModelShape, start: int, length: int) -> tuple[TorchTensor, TorchTensor]:
    """Cosines and sines `[length, head_width / 2]` of the rotary position code."""
    torch = load_torch()
    half = shape.head_width // 2
    frequency = 10_000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(start, start + length)[:, None] * frequency[None, :]
    return torch.cos(angle), torch.sin(angle)


def _rotate(x: TorchTensor, rotation: tuple[TorchTensor, TorchTensor]) -> TorchTensor:
    torch = load_torch()
    cosine, sine = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
