"""Parameters of a low-rank adapter on a model (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gymfast.models.config import ModelConfig
from gymfast.models.tensors import ModelTensor, Role, tensors_of

TARGETS: tuple[Role, ...] = ("attention", "dense", "shared", "routed")


@dataclass(frozen=True)
class Lora:
    """Which matrices get factors A [rank, inputs] and B [outputs, rank].

    With `is_shared_outer` the experts of a layer share the factor that touches the hidden size: A
    of gate and up, B of down. `leaves_out` names matrices that get none, such as "kv_b_proj".
    """

    rank: int = 32
    is_shared_outer: bool = True
    targets: Collection[Role] = TARGETS
    leaves_out: Collection[str] = ()
    with_mtp: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, expected 1 or more")
        if unknown := sorted(set(self.targets) - set(TARGETS)):
            raise ValueError(f"targets {unknown} cannot be adapted, expected some of {TARGETS}")


def lora_bytes(config: ModelConfig, lora: Lora) -> int:
    """Bytes of the adapter in BF16."""
    return 2 * sum(_num_params(config, lora, tensor) for tensor in tensors_of(config))


def _num_params(config: ModelConfig, lora: Lora, tensor: ModelTensor) -> int:
    module = tensor.name.split(".")[-2]
    is_left_out = tensor.is_mtp and not lora.with_mtp
    if tensor.role not in lora.targets or len(tensor.shape) != 2 or is_left_out:
        return 0
    if module in lora.leaves_out:
        return 0
    outputs, inputs = tensor.shape
    if tensor.role == "routed" and lora.is_shared_outer:
        is_first = ".experts.0." in tensor.name
        inner = inputs if module == "down_proj" else outputs
        return lora.rank * (inner + (config.hidden_size if is_first else 0))
    return lora.rank * (outputs + inputs)
