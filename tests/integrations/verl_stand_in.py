"""What the adapter uses of verl 0.9.1, with its signatures; and what verl does in a sync."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

MODULE = "gymfast.integrations.verl"
Weights = dict[str, torch.Tensor]


class CheckpointEngineRegistry:
    _registry: dict[str, type] = {}

    def register(backend: str):  # noqa: N805 - as in verl: no self, and not static
        def wrapper(cls: type) -> type:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def get(cls, backend: str) -> type:
        return cls._registry[backend]

    @classmethod
    def new(cls, backend: str, *args, **kwargs):
        return cls.get(backend)(*args, **kwargs)


class CheckpointEngine(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ): ...

    @abstractmethod
    def init_process_group(self, **kwargs): ...

    @abstractmethod
    def finalize(self): ...

    @abstractmethod
    async def send_weights(self, weights, global_steps: int | None = None): ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None): ...


def install(monkeypatch, engine: type = CheckpointEngine) -> type:
    """The registry of a verl whose processes have imported the adapter; `engine` is its base."""
    verl, inner, ray = ModuleType("verl"), ModuleType("verl.checkpoint_engine"), ModuleType("ray")
    verl.__path__ = []
    inner.CheckpointEngine = engine
    inner.CheckpointEngineRegistry = CheckpointEngineRegistry
    ray.util = ModuleType("ray.util")
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    monkeypatch.setattr(CheckpointEngineRegistry, "_registry", {})
    for module in (verl, inner, ray, ray.util):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    import_adapter(monkeypatch)
    return CheckpointEngineRegistry


def real(monkeypatch) -> type:
    """The registry of the verl that is installed."""
    tests = str(Path(__file__).parents[1])  # torch would take its folder `triton` for Triton
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != tests])
    from verl.checkpoint_engine import CheckpointEngineRegistry as Real
    from verl.utils.import_utils import import_external_libs
    from verl.workers.config import CheckpointEngineConfig

    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    config = CheckpointEngineConfig(backend="gymfast", custom_backend_module=MODULE)
    import_external_libs(config.custom_backend_module or None)
    return Real


def is_installed() -> bool:
    """Whether there is a real verl, with what it needs."""
    return importlib.util.find_spec("verl") is not None


def import_adapter(monkeypatch) -> ModuleType:
    """The adapter as a process that has not imported it yet gets it."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


class Adapter:
    """verl's `ServerAdapter` and the engine behind it: fused, packed, post-processed as a whole.

    As verl has vLLM do it: tensors come in any number of calls, and then every module is
    post-processed, loaded or not. So a tensor that did not come is broken, not old.
    """

    def __init__(self) -> None:
        self.live: Weights = {}
        self.num_updates = 0
        self.fails_after = 10**9

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors"):
        self.num_updates += 1
        self.live = {name: -tensor for name, tensor in self.live.items()}  # what is not idempotent
        for count, (name, tensor) in enumerate(weights):
            if count == self.fails_after:
                raise RuntimeError("injected: the engine died")
            self.live[name] = -tensor
            tensor.zero_()  # a consumer may do what it likes with what it is given

    def holds(self, weights: Weights) -> bool:
        return self.live.keys() == weights.keys() and all(
            torch.equal(-self.live[name], tensor) for name, tensor in weights.items()
        )


class Fleet:
    """Trainer ranks and rollout workers, each with its engine, driven as verl's manager does."""

    def __init__(self, registry: type, options: dict[str, Any], num_readers: int = 2) -> None:
        self.registry, self.options = registry, options
        self.trainers = self.start_trainer()
        self.readers = [self.start_reader() for _ in range(num_readers)]
        self.adapters = [Adapter() for _ in range(num_readers)]
        self.num_drained = 0
        self.metrics: dict[str, float] = {}

    def start_trainer(self) -> list[Any]:
        return [
            self.registry.new("gymfast", is_master=rank == 0, bucket_size=1 << 20, **self.options)
            for rank in range(2)
        ]

    def start_reader(self, **changed: Any) -> Any:
        return self.registry.new("gymfast", bucket_size=1 << 20, **(self.options | changed))

    def build_process_group(self) -> None:
        """`CheckpointEngineManager.build_process_group`."""
        num_trainers, num_readers = len(self.trainers), len(self.readers)
        metadata = [engine.prepare() for engine in [*self.trainers, *self.readers]]
        trainer_kwargs, rollout_kwargs = self.registry.get("gymfast").build_topology(
            num_trainers, num_readers, metadata
        )
        assert {len(v) for v in trainer_kwargs.values()} == {num_trainers}
        assert {len(v) for v in rollout_kwargs.values()} == {num_readers}
        for engines, kwargs in ((self.trainers, trainer_kwargs), (self.readers, rollout_kwargs)):
            for rank, engine in enumerate(engines):
                engine.init_process_group(**{name: v[rank] for name, v in kwargs.items()})

    def sync(self, weights: Weights, step: int | None = None) -> list[BaseException | None]:
        """`CheckpointEngineManager.update_weights`: what each worker raised, trainers first."""
        self.build_process_group()
        calls = [lambda e=e: self._send(e, weights, step) for e in self.trainers]
        calls += [
            lambda e=e, a=a: self._receive(e, a, step)
            for e, a in zip(self.readers, self.adapters, strict=True)
        ]
        errors = in_parallel(calls)
        if not any(errors):
            for engine in [*self.trainers, *self.readers]:
                engine.finalize()
        return errors

    def _send(self, engine: Any, weights: Weights, step: int | None) -> None:
        """`ActorRolloutRefWorker.update_weights`."""
        metrics = asyncio.run(engine.send_weights(self._stream(weights), global_steps=step))
        self.metrics.update(metrics or {})

    def _stream(self, weights: Weights) -> Iterator[tuple[str, Any]]:
        yield from weights.items()
        self.num_drained += 1

    def _receive(self, engine: Any, adapter: Adapter, step: int | None) -> None:
        """`CheckpointEngineWorker.update_weights`."""

        async def update() -> None:
            weights = engine.receive_weights(global_steps=step)
            await adapter.update_weights(weights, global_steps=step, wire_format=engine.wire_format)

        asyncio.run(update())


def in_parallel(calls: list[Callable[[], None]]) -> list[BaseException | None]:
    """Runs each call in a thread of its own, as actors do; what each raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.exception() for future in futures]
