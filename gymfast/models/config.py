"""What a published configuration says of a model, as far as its tensors depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """The mixture of experts: in all layers but the first `num_dense_layers`."""

    num_experts: int
    intermediate_size: int
    num_shared: int = 0
    num_dense_layers: int = 0
    has_router_bias: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); sizes per head or of ranks."""

    q_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int


@dataclass(frozen=True)
class ModelConfig:
    """One model. `source` is where its configuration was published."""

    name: str
    source: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int  # of dense layers
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    num_mtp_layers: int = 0  # multi-token prediction: each a layer with an embedding and a head
    num_vision_params: int = 0
