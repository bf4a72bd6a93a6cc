"""A LoRA adapter: its factors and its configuration, in PEFT's files or as a version of a run.

See docs/adapters.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from gymfast.delta.memory import CPU
from gymfast.delta.safetensors_header import load_json
from gymfast.delta.tensors import Tensor, Weights, as_tensor
from gymfast.errors import CoverageError, FormatError

CONFIG = "adapter_config.json"
_FACTOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(lora_(?P<side>[AB])\.weight|lora_embedding_(?P<word>[AB]))"
)
_SHARED = re.compile(r"(?P<start>.*\.experts)\.(?P<end>[^.\d][^.]*)")


@dataclass(frozen=True)
class LoraAdapter:
    """The factors A `[rank, inputs]` and B `[outputs, rank]` of each module, under PEFT's names.

    Factors of experts may have a dimension in front: 1 for a factor that all experts share, else
    the number of experts ("shared-outer").
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        _check_config(self.config)
        _check_factors(self.tensors, self.config)

    @classmethod
    def of_state(
        cls, state: Weights, config: Mapping[str, Any], *, adapter: str = "default"
    ) -> LoraAdapter:
        """The adapter of that name in the state of a PEFT model, or as PEFT's save has it.

        `config` is what `model.peft_config[adapter].to_dict()` gives. Tensors of the base model
        are left out; those elsewhere than in CPU memory are copied.
        Raises ValueError for a configuration that is not LoRA's, CoverageError for factors that
        are missing or do not fit.
        """
        infix = re.compile(rf"(\.lora_(embedding_)?[AB])\.{re.escape(adapter)}(?=\.|$)")
        found = {}
        for name, value in state.items():
            if ".lora_" in name and not name.endswith(".base_layer.weight"):
                tensor = as_tensor(value, name)
                held = tensor if tensor.place == CPU else tensor.copy(CPU)
                found[infix.sub(r"\1", name)] = held
        return cls(_plain(config), found)

    @classmethod
    def of_weights(cls, weights: Weights) -> LoraAdapter:
        """The adapter that a version of a run holds. Raises FormatError if it holds none."""
        tensors = {name: as_tensor(value, name) for name, value in weights.items()}
        config = tensors.pop(CONFIG, None)
        if config is None:
            raise FormatError(
                f"a version of {len(tensors)} tensors has none named {CONFIG!r}: it is no adapter "
                "that LoraAdapter.weights() made"
            )
        return cls(parse_config(bytes(config.data), CONFIG), tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all factors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def is_shared_outer(self) -> bool:
        """True if factors of experts have a dimension for them, which only SGLang reads."""
        return any(len(tensor.shape) == 3 for tensor in self.tensors.values())

    def weights(self) -> dict[str, Tensor]:
        """What a publisher takes: the factors, and the configuration as one tensor of bytes.

        So a version is a whole adapter, and its root covers the rank and the scaling too.
        """
        text = np.frombuffer(config_text(self.config), np.uint8).copy()
        return {**self.tensors, CONFIG: Tensor("U8", text.shape, text)}

    def per_expert(self) -> LoraAdapter:
        """The same adapter with two factors for each expert, which vLLM reads too: larger."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if len(tensor.shape) != 3:
                tensors[name] = tensor
                continue
            module, side = _module_of(name)
            match = _SHARED.fullmatch(module)
            if match is None:
                raise FormatError(f"{name!r} has shape {tensor.shape} and is no factor of experts")
            num_experts = max(self.tensors[other].shape[0] for other in _pair(name, side))
            parts = np.split(tensor.data, tensor.shape[0])
            for expert in range(num_experts):
                part = parts[min(expert, len(parts) - 1)]
                own = f"{match['start']}.{expert}.{match['end']}"
                tensors[name.replace(module, own)] = Tensor(tensor.dtype, tensor.shape[1:], part)
        return LoraAdapter(self.config, tensors)


def parse_config(text: bytes, where: str) -> dict[str, Any]:
    """The table of an adapter_config.json. Raises FormatError if it is none."""
    config = load_json(text, where)
    if not isinstance(config, dict):
        raise FormatError(f"{where} is no table, so no configuration of an adapter")
    return config


def config_text(config: Mapping[str, Any]) -> bytes:
    """The same bytes for the same configuration."""
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


def _plain(value: Any) -> Any:
    """The value as JSON has it: PEFT keeps sets and members of enumerations."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _check_config(config: Mapping[str, Any]) -> None:
    kind, rank, alpha = (config.get(key) for key in ("peft_type", "r", "lora_alpha"))
    is_rank = isinstance(rank, int) and rank >= 1
    if kind != "LORA" or not is_rank or not isinstance(alpha, int | float):
        raise ValueError(
            f"peft_type is {kind!r}, r {rank!r} and lora_alpha {alpha!r}, expected 'LORA', a "
            "whole number above 0 and a number: engines read the scaling from there"
        )
    if "target_modules" not in config:
        raise ValueError("target_modules is missing: engines need the names of the modules")


def _check_factors(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    if not tensors:
        raise CoverageError("an adapter without factors: is it the state of a PEFT model?")
    for name in tensors:
        _, side = _module_of(name)
        missing = [other for other in _pair(name, side) if other not in tensors]
        if missing:
            raise CoverageError(f"{name!r} is there without {missing[0]!r}")
        a, b = (tensors[other].shape for other in _pair(name, side))
        if len(a) != len(b) or len(a) not in (2, 3) or a[-2] != b[-1]:
            raise CoverageError(f"{name!r}: factors A {a} and B {b} do not fit each other")
        if len(a) == 3 and 1 not in (a[0], b[0]) and a[0] != b[0]:
            raise CoverageError(f"{name!r}: A {a} and B {b} are of different numbers of experts")
        if a[-2] != config["r"] and not config.get("rank_pattern"):
            raise CoverageError(f"{name!r} has rank {a[-2]}, the configuration says {config['r']}")


def _module_of(name: str) -> tuple[str, str]:
    match = _FACTOR.fullmatch(name)
    if match is None:
        raise CoverageError(
            f"{name!r} is no factor, expected 'base_model.model.MODULE.lora_A.weight' (or _B): an "
            "adapter that trains other weights too has to be published as a whole model"
        )
    return match["module"], match["side"] or match["word"]


def _pair(name: str, side: str) -> tuple[str, str]:
    """The names of factor A and factor B of the same module."""
    start, _, end = name.rpartition(f"_{side}")
    return f"{start}_A{end}", f"{start}_B{end}"
