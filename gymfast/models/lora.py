"""Parameters of a low-rank adapter on a model (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
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


def adapter_tensors(config: ModelConfig, lora: Lora) -> Iterator[ModelTensor]:
    """The tensors of the adapter as PEFT names them, factor A before factor B.

    With `is_shared_outer` the experts of a layer are one module with factors of three dimensions:
    the first is 1 for a factor that they share, else one for each expert.
    Source: PEFT's adapter_model.safetensors; for shared factors SGLang 0.5.23, srt/lora/lora.py.
    """
    for tensor in tensors_of(config):
        if not _is_adapted(lora, tensor):
            continue
        module, (outputs, inputs) = tensor.name.removesuffix(".weight"), tensor.shape
        shape_a: tuple[int, ...] = (lora.rank, inputs)
        shape_b: tuple[int, ...] = (outputs, lora.rank)
        if tensor.role == "routed" and lora.is_shared_outer:
            if ".experts.0." not in module:
                continue
            module = module.replace(".experts.0.", ".experts.")
            num_experts = config.experts.num_experts if config.experts else 1
            is_down = module.endswith(".down_proj")
            shape_a = (num_experts if is_down else 1, *shape_a)
            shape_b = (1 if is_down else num_experts, *shape_b)
        for side, shape in (("lora_A", shape_a), ("lora_B", shape_b)):
            name = f"base_model.model.{module}.{side}.weight"
            yield ModelTensor(name, shape, tensor.role, tensor.is_mtp)


def lora_bytes(config: ModelConfig, lora: Lora) -> int:
    """Bytes of the adapter in BF16."""
    return 2 * sum(_num_params(config, lora, tensor) for tensor in tensors_of(config))


def _num_params(config: ModelConfig, lora: Lora, tensor: ModelTensor) -> int:
    if not _is_adapted(lora, tensor):
        return 0
    module = tensor.name.split(".")[-2]
    outputs, inputs = tensor.shape
    if tensor.role == "routed" and lora.is_shared_outer:
        is_first = ".experts.0." in tensor.name
        inner = inputs if module == "down_proj" else outputs
        return lora.rank * (inner + (config.hidden_size if is_first else 0))
    return lora.rank * (outputs + inputs)


def _is_adapted(lora: Lora, tensor: ModelTensor) -> bool:
    if tensor.role not in lora.targets or len(tensor.shape) != 2:
        return False
    is_left_out = tensor.is_mtp and not lora.with_mtp
    return not is_left_out and tensor.name.split(".")[-2] not in lora.leaves_out
