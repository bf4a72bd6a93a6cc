"""What the adapter uses of vLLM, with the same signatures and as little behind them as will do.

tests/engines/vllm_signatures.py compares it with the real package.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

Pairs = Iterable[tuple[str, torch.Tensor]]


class Engine24(ABC):
    """WeightTransferEngine of vLLM 0.24."""

    def __init__(self, config, parallel_config, model) -> None:
        self.config, self.parallel_config, self.model = config, parallel_config, model

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def receive_weights(self, update_info, load_weights): ...

    @abstractmethod
    def shutdown(self): ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator, trainer_args): ...


class Engine32(ABC):
    """WeightTransferEngine of vLLM 0.28 to 0.32."""

    def __init__(self, config, vllm_config, device, model) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def start_weight_update(self): ...

    @abstractmethod
    def finish_weight_update(self): ...

    @abstractmethod
    def receive_weights(self, update_info): ...

    @abstractmethod
    def shutdown(self): ...


class Factory:
    """WeightTransferEngineFactory."""

    def __init__(self) -> None:
        self.registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name, module_path_or_cls, class_name=None) -> None:
        if name in self.registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        self.registry[name] = (module_path_or_cls, class_name)


class CuMemAllocator:
    """The memory that sleeps; 0.24 has no `is_asleep`."""

    instance: CuMemAllocator | None = None

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, Any] = {}


def allocate(address: int, num_bytes: int) -> Any:
    """Has the allocator know this memory as that of weights; what it knows of it."""
    found = CuMemAllocator.instance = CuMemAllocator.instance or CuMemAllocator()
    data = SimpleNamespace(handle=(0, num_bytes, address, 0), tag="weights", is_asleep=False)
    found.pointer_to_data[address] = data
    return data


class LayerInfo:
    """LayerReloadingInfo: how much of a module was loaded since the reload began."""

    def __init__(self) -> None:
        self.load_numel = 0
        self.load_numel_total: int | None = None
        self.loaded_weights: list[Any] = []
        self.kernel_tensors: dict[str, nn.Parameter] = {}

    def can_load(self) -> bool:
        return self.load_numel_total is not None


_INFOS: dict[nn.Module, LayerInfo] = {}


def get_layerwise_info(layer: nn.Module) -> LayerInfo:
    return _INFOS.setdefault(layer, LayerInfo())


def initialize_layerwise_reload(model: nn.Module) -> None:
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            continue
        info.kernel_tensors = dict(layer.named_parameters(recurse=False))
        info.load_numel_total = sum(p.numel() for p in info.kernel_tensors.values())
        for name, parameter in info.kernel_tensors.items():
            like = getattr(layer, "as_loaded", {}).get(name, parameter)  # a packed one may differ
            empty = nn.Parameter(torch.empty_like(like, device="cpu"), requires_grad=False)
            empty.data.view(torch.uint8).fill_(0xFF)  # a NaN of every type
            empty.counted_by = info
            layer.register_parameter(name, empty)


def finalize_layerwise_reload(model: nn.Module, model_config: Any) -> None:
    assert model_config.dtype is not None
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue
        for name, parameter in info.kernel_tensors.items():
            if info.load_numel:
                value = getattr(layer, name).data
                pack = getattr(layer, "pack", None)  # process_weights_after_loading
                parameter.data.copy_(pack(name, value) if pack else value)
            layer.register_parameter(name, parameter)
        _INFOS[layer] = LayerInfo()


class Fused(nn.Module):
    """A layer whose weight is the q, k and v of the checkpoint, one above the other."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = _parameter(3 * size, size)


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv_proj = Fused(size)
        self.norm = nn.Module()
        self.norm.weight = _parameter(size)
        self.decay = nn.Module()
        self.decay.A = _parameter(size)  # -exp(A_log), as in Mamba


class Model(nn.Module):
    """A model with a fused layer and a composed loader; `tell` False: load_weights says nothing."""

    def __init__(self, size: int = 8, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Module()
        self.embed.weight = _parameter(16, size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(num_layers))
        self.tell = True
        self.calls: list[list[str]] = []
        self.fails_at = 0

    def forward(self) -> torch.Tensor:
        return self.embed.weight.sum()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def load_weights(self, weights: Pairs) -> set[str] | None:
        self.calls.append([])
        filled = set()
        for name, tensor in weights:
            if len(self.calls) == self.fails_at:
                raise RuntimeError("injected: the loader failed")
            self.calls[-1].append(name)
            filled.add(self._load(name, tensor))
        return filled if self.tell else None

    def _load(self, name: str, tensor: torch.Tensor) -> str:
        live, rows = name, slice(None)
        for i, shard in enumerate(("q_proj", "k_proj", "v_proj")):
            if shard in name:
                live, rows = name.replace(shard, "qkv_proj"), slice(i * len(tensor), None)
        live = live.replace("A_log", "A")
        parameter = self.get_parameter(live)
        value = -torch.exp(tensor) if live != name and "A_log" in name else tensor
        parameter.data[rows][: len(value)] = value
        info = getattr(parameter, "counted_by", None)
        if info is not None:
            info.load_numel += tensor.numel()
        return live


class PlainModel(Model):
    """A model whose parameters are the tensors of a checkpoint, nothing fused."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        nn.Module.__init__(self)
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, _parameter(*shape))
        self.tell, self.fails_at = True, 0
        self.calls: list[list[str]] = []

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()

    def _load(self, name: str, tensor: torch.Tensor) -> str:
        parameter = self.get_parameter(name)
        parameter.data.copy_(tensor)
        info = getattr(parameter, "counted_by", None)
        if info is not None:
            info.load_numel += tensor.numel()
        return name


def checkpoint(seed: int = 0, size: int = 8, num_layers: int = 2) -> dict[str, torch.Tensor]:
    """Random tensors under the names of a checkpoint of Model."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (16, size)}
    for i in range(num_layers):
        shapes |= {f"layers.{i}.{x}_proj.weight": (size, size) for x in "qkv"}
        shapes |= {f"layers.{i}.norm.weight": (size,), f"layers.{i}.decay.A_log": (size,)}
    return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def install(monkeypatch: Any, engine: type, version: str) -> Factory:
    """Makes `import vllm` find the stand-in; the factory."""
    factory = Factory()
    layerwise = {"get_layerwise_info": get_layerwise_info}
    reload = {
        "initialize_layerwise_reload": initialize_layerwise_reload,
        "finalize_layerwise_reload": finalize_layerwise_reload,
    }
    modules: dict[str, dict[str, object]] = {
        "vllm": {"__version__": version},
        "vllm.device_allocator": {},
        "vllm.device_allocator.cumem": {"CuMemAllocator": CuMemAllocator},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {},
        "vllm.distributed.weight_transfer": {"WeightTransferEngineFactory": factory},
        "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": engine},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": reload,
        "vllm.model_executor.model_loader.reload.layerwise": layerwise,
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return factory


def engine_arguments(engine: type, model: Model, world_size: int = 1) -> tuple[Any, ...]:
    """What vLLM's factory passes to an engine of that version."""
    config = SimpleNamespace(backend="gymfast")
    parallel = SimpleNamespace(world_size=world_size, distributed_executor_backend="mp")
    if engine is Engine24:
        return config, parallel, model
    model_config = SimpleNamespace(dtype=torch.float32, quantization=None)
    vllm_config = SimpleNamespace(parallel_config=parallel, model_config=model_config)
    return config, vllm_config, torch.device("cpu"), model


def join(monkeypatch: Any, num_ranks: int, rank: Callable[[], int], cpu_group: object) -> None:
    """Has vLLM find all ranks in one tensor-parallel group; `rank` is asked on each of them."""

    def group_of(size: int) -> Callable[[], Any]:
        return lambda: SimpleNamespace(
            world_size=size, rank_in_group=rank() % size, cpu_group=cpu_group
        )

    state = sys.modules["vllm.distributed.parallel_state"]
    for name, size in (("tp", num_ranks), ("pcp", 1), ("pp", 1)):
        monkeypatch.setattr(state, f"get_{name}_group", group_of(size), raising=False)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)
