"""The tensors of a checkpoint as its configuration implies them: names, shapes, roles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gymfast.models.config import Experts, LatentAttention, ModelConfig

Role = Literal[
    "embedding", "attention", "norm", "router", "dense", "shared", "routed", "head", "mtp", "vision"
]


@dataclass(frozen=True)
class ModelTensor:
    """One tensor. Those of layers for multi-token prediction have `is_mtp`."""

    name: str
    shape: tuple[int, ...]
    role: Role
    is_mtp: bool = False

    @property
    def num_params(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def tensors_of(config: ModelConfig) -> Iterator[ModelTensor]:
    """All tensors of the checkpoint, in its order; a vision tower is one flat tensor."""
    if config.num_vision_params:
        yield ModelTensor("vision_tower.weight", (config.num_vision_params,), "vision")
    table = (config.vocab_size, config.hidden_size)
    yield ModelTensor("model.embed_tokens.weight", table, "embedding")
    for layer in range(config.num_layers):
        yield from _layer(config, layer, is_mtp=False)
    yield ModelTensor("model.norm.weight", (config.hidden_size,), "norm")
    if not config.is_tied:
        yield ModelTensor("lm_head.weight", table, "head")
    for layer in range(config.num_layers, config.num_layers + config.num_mtp_layers):
        yield from _mtp_layer(config, layer)


def num_params(config: ModelConfig, *, with_mtp: bool = True) -> int:
    """Parameters of the checkpoint, with or without the layers for multi-token prediction."""
    return sum(t.num_params for t in tensors_of(config) if with_mtp or not t.is_mtp)


def _mtp_layer(config: ModelConfig, layer: int) -> Iterator[ModelTensor]:
    """A decoder layer, what joins it to the model, and copies of embedding and head."""
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    table = (config.vocab_size, hidden)
    yield ModelTensor(f"{prefix}.embed_tokens.weight", table, "mtp", is_mtp=True)
    yield ModelTensor(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden), "mtp", is_mtp=True)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield ModelTensor(f"{prefix}.{name}.weight", (hidden,), "norm", is_mtp=True)
    yield ModelTensor(f"{prefix}.shared_head.head.weight", table, "mtp", is_mtp=True)
    yield from _layer(config, layer, is_mtp=True)


def _layer(config: ModelConfig, layer: int, *, is_mtp: bool) -> Iterator[ModelTensor]:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    norm = (hidden,)
    yield ModelTensor(f"{prefix}.input_layernorm.weight", norm, "norm", is_mtp)
    attention = _attention(config) if config.latent is None else _latent(config, config.latent)
    for name, shape in attention:
        yield ModelTensor(f"{prefix}.self_attn.{name}", shape, "attention", is_mtp)
    yield ModelTensor(f"{prefix}.post_attention_layernorm.weight", norm, "norm", is_mtp)
    experts = config.experts
    if experts is None or layer < experts.num_dense_layers:
        yield from _mlp(f"{prefix}.mlp", hidden, config.intermediate_size, "dense", is_mtp)
    else:
        yield from _experts(experts, f"{prefix}.mlp", hidden, is_mtp=is_mtp)


def _attention(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = config.hidden_size, config.head_size
    q, kv = config.num_heads * head, config.num_kv_heads * head
    for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield f"{name}.weight", (size, hidden)
        if config.has_qkv_bias:
            yield f"{name}.bias", (size,)
    yield "o_proj.weight", (hidden, q)
    if config.has_qk_norm:
        yield "q_norm.weight", (head,)
        yield "k_norm.weight", (head,)


def _latent(config: ModelConfig, latent: LatentAttention) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config.hidden_size, config.num_heads
    key = latent.nope_size + latent.rope_size
    yield "q_a_proj.weight", (latent.q_rank, hidden)
    yield "q_a_layernorm.weight", (latent.q_rank,)
    yield "q_b_proj.weight", (heads * key, latent.q_rank)
    yield "kv_a_proj_with_mqa.weight", (latent.kv_rank + latent.rope_size, hidden)
    yield "kv_a_layernorm.weight", (latent.kv_rank,)
    kv_b = heads * (latent.nope_size + latent.value_size)
    yield "kv_b_proj.weight", (kv_b, latent.kv_rank)
    yield "o_proj.weight", (hidden, heads * latent.value_size)


def _experts(experts: Experts, prefix: str, hidden: int, *, is_mtp: bool) -> Iterator[ModelTensor]:
    router = (experts.num_experts, hidden)
    yield ModelTensor(f"{prefix}.gate.weight", router, "router", is_mtp)
    if experts.has_router_bias:
        bias = f"{prefix}.gate.e_score_correction_bias"
        yield ModelTensor(bias, (experts.num_experts,), "router", is_mtp)
    for number in range(experts.num_experts):
        place = f"{prefix}.experts.{number}"
        yield from _mlp(place, hidden, experts.intermediate_size, "routed", is_mtp)
    if experts.num_shared:
        size = experts.num_shared * experts.intermediate_size
        yield from _mlp(f"{prefix}.shared_experts", hidden, size, "shared", is_mtp)


def _mlp(prefix: str, hidden: int, size: int, role: Role, is_mtp: bool) -> Iterator[ModelTensor]:
    yield ModelTensor(f"{prefix}.gate_proj.weight", (size, hidden), role, is_mtp)
    yield ModelTensor(f"{prefix}.up_proj.weight", (size, hidden), role, is_mtp)
    yield ModelTensor(f"{prefix}.down_proj.weight", (hidden, size), role, is_mtp)
