"""What the adapter meets of SkyRL, with the same signatures and as little behind them as will do.

`install` makes `import skyrl` find it, or the real files of a checkout with stubs for what they
need; both give the same names.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

WEIGHT_SYNC = "skyrl.backends.skyrl_train.weight_sync"
RELOAD = "skyrl.backends.skyrl_train.inference_servers.layerwise_reload"
CLIENT_FILE = "skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py"


@dataclass
class WeightChunk:
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    tensors: list[Any]


class WeightTransferStrategy(ABC):
    @staticmethod
    @abstractmethod
    def create_init_info(ie_cfg, inference_world_size=None, base_model_path=None): ...

    @staticmethod
    @abstractmethod
    def get_vllm_transfer_engine(): ...

    @staticmethod
    @abstractmethod
    def create_sender(init_info, inference_client): ...


class BroadcastTransferStrategy(WeightTransferStrategy):
    pass


class DeltaWeightTransferSender:
    async def send_chunks(self, chunks, weight_metadata=None, reset_prefix_cache=False): ...

    def teardown(self): ...


class DeltaTransferStrategy(WeightTransferStrategy):
    @staticmethod
    def create_init_info(ie_cfg, inference_world_size=None, base_model_path=None): ...

    @staticmethod
    def create_sender(init_info, inference_client): ...

    @staticmethod
    def get_vllm_transfer_engine(): ...


def get_transfer_strategy_cls(weight_sync_backend, colocate_all):
    module: Any = sys.modules[WEIGHT_SYNC]
    is_delta = weight_sync_backend == "delta"
    return module.DeltaTransferStrategy if is_delta else module.BroadcastTransferStrategy


class LayerwiseReloadWorkerMixin:
    """The session of an update in a vLLM worker; one that failed has to be finished too."""

    def skyrl_start_weight_update(self, is_checkpoint_format=True):
        assert not is_checkpoint_format, "gymfast reloads by itself"
        if getattr(self, "_skyrl_weight_update_active", False):
            raise RuntimeError("skyrl_start_weight_update called while an update is active")
        self._skyrl_weight_update_active = self._weight_update_active = True

    def skyrl_finish_weight_update(self):
        if not getattr(self, "_skyrl_weight_update_active", False):
            raise RuntimeError("skyrl_start_weight_update must be called first")
        self._skyrl_weight_update_active = self._weight_update_active = False


_STAND_IN = {
    WEIGHT_SYNC: (
        *(WeightChunk, WeightTransferStrategy, BroadcastTransferStrategy),
        *(DeltaWeightTransferSender, DeltaTransferStrategy, get_transfer_strategy_cls),
    ),
    RELOAD: (LayerwiseReloadWorkerMixin,),
}


def install(monkeypatch: Any, source: Path | None) -> SimpleNamespace:
    """The names above, of the stand-in or, with the source of SkyRL, of its own files."""

    def add(name: str, folder: Path | None = None, **content: object) -> None:
        module = ModuleType(name)
        module.__path__ = [] if folder is None else [str(folder)]
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    for name in [name for name in sys.modules if name.partition(".")[0] == "skyrl"]:
        monkeypatch.delitem(sys.modules, name)
    for name in _STAND_IN:
        parts = name.split(".")
        for length in range(1, len(parts)):
            package = ".".join(parts[:length])
            if package not in sys.modules:  # the real ones import ray, vLLM and more
                add(package, None if source is None else source.joinpath(*parts[:length]))
    if source is None:
        for name, content in _STAND_IN.items():
            add(name, **{value.__name__: value for value in content})
    else:
        add("ray")
        add("skyrl.train")
        add("skyrl.train.utils")
        add("skyrl.train.utils.utils", str_to_torch_dtype=None)
        reload = "vllm.model_executor.model_loader.reload"
        add(f"{reload}.meta")  # the real mixin puts a function of its own there
        monkeypatch.setattr(
            sys.modules[reload], "meta", sys.modules[f"{reload}.meta"], raising=False
        )
    found: dict[str, Any] = {}
    for name, content in _STAND_IN.items():
        module = importlib.import_module(name)
        found |= {value.__name__: getattr(module, value.__name__) for value in content}
    return SimpleNamespace(**found)
