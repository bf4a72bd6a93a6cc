"""What the adapter meets of NeMo-RL, with the same signatures and as little behind them as will do.

`install` makes `import nemo_rl` find it, or the real files of a checkout with stubs for what they
need; both give the same names.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from abc import ABC, abstractmethod
from concurrent.futures import wait
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

BASE = "nemo_rl.utils.checkpoint_engines.base"
POLICY = "nemo_rl.models.policy.workers.checkpoint_engine"
ROLLOUT = "nemo_rl.models.generation.vllm.checkpoint_engine"
CONFIG = "nemo_rl.weight_sync.checkpoint_engine_config"
SYNC = "nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer"


class CheckpointEngine(ABC):
    shard_expert_weights = False

    def get_target_weight_layout(self):
        return None

    @abstractmethod
    def prepare(self): ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank, train_world_size, rollout_world_size, metadata
    ): ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank, train_world_size, rollout_world_size, metadata
    ): ...

    def finalize(self):
        return None

    @abstractmethod
    async def send_weights(self, weights): ...

    @abstractmethod
    def receive_weight_batches(self): ...


def create_checkpoint_engine(backend, *, bucket_size_bytes, engine_kwargs):
    module, _, name = backend.partition(":")
    found = getattr(importlib.import_module(module), name)
    return found(bucket_size=bucket_size_bytes, **engine_kwargs)


class PolicyCheckpointEngineMixin:
    checkpoint_engine: Any = None
    rank: int

    async def checkpoint_engine_rpc(self, checkpoint_method, method_kwargs=None):
        given = method_kwargs or {}
        engine = self.checkpoint_engine
        if checkpoint_method == "checkpoint_engine_total_memory_bytes":
            return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if checkpoint_method == "init_checkpoint_engine":
            self.checkpoint_engine = engine or create_checkpoint_engine(**given)
        elif checkpoint_method == "prepare_checkpoint_engine":
            return {**engine.prepare(), "rank": self.rank}
        elif checkpoint_method == "init_checkpoint_engine_process_group":
            engine.init_policy_process_group(worker_rank=self.rank, **given)
        elif checkpoint_method == "send_weights_via_checkpoint_engine":
            await engine.send_weights(self._checkpoint_engine_weight_iterator(**given))
        elif checkpoint_method == "finalize_checkpoint_engine":
            engine.finalize()
        return None


class VllmCheckpointEngineMixin:
    checkpoint_engine: Any = None

    def checkpoint_engine_total_memory_bytes(self):
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def init_checkpoint_engine(self, backend, bucket_size_bytes, engine_kwargs):
        self.checkpoint_engine = self.checkpoint_engine or create_checkpoint_engine(
            backend, bucket_size_bytes=bucket_size_bytes, engine_kwargs=engine_kwargs
        )

    def prepare_checkpoint_engine(self):
        return {**self.checkpoint_engine.prepare(), "rank": torch.distributed.get_rank()}

    def init_checkpoint_engine_process_group(
        self, rank_prefix, train_world_size, rollout_world_size, metadata
    ):
        self.checkpoint_engine.init_rollout_process_group(
            rollout_rank=rank_prefix + torch.distributed.get_rank(),
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            metadata=metadata,
        )

    def finalize_checkpoint_engine(self):
        self.checkpoint_engine.finalize()

    def update_weights_from_checkpoint_engine(self):
        async def load():
            async for batch in self.checkpoint_engine.receive_weight_batches():
                self._load_weights(batch)
            return True

        return asyncio.run(load())


class VllmCheckpointEngineRpcMixin:
    def checkpoint_engine_rpc(self, checkpoint_method, method_args=()):
        result = self.llm.collective_rpc(checkpoint_method, args=method_args)
        is_update = checkpoint_method == "update_weights_from_checkpoint_engine"
        return all(result) if is_update else result


def checkpoint_engine_refit_config(generation_config):
    backend = generation_config["refit_transport"]
    given = {"release_after_refit": False, **generation_config["refit_cfg"][backend]}
    ratio = given.pop("update_weights_bucket_memory_ratio", 0.05)
    return {
        "backend": backend,
        "update_weights_bucket_memory_ratio": ratio,
        "engine_kwargs": {backend: given},
    }


class CheckpointEngineWeightSynchronizer:
    def __init__(self, policy, generation, config):
        self._ends = (policy, generation)
        self._config = config
        self._is_ready = False

    def init_communicator(self):
        self._ensure_ready()

    def _call(self, method, **policy_kwargs):
        """On all workers of the policy, then of vLLM; answers by worker."""
        policy, generation = (end.worker_group.run_all_workers_single_data for end in self._ends)
        calls = policy(
            "checkpoint_engine_rpc", checkpoint_method=method, method_kwargs=policy_kwargs
        )
        calls += generation(
            "checkpoint_engine_rpc",
            checkpoint_method=method,
            method_args=tuple(policy_kwargs.values()),
            run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"],
        )
        return calls

    def _ensure_ready(self):
        if self._is_ready:
            return
        get, backend = sys.modules["ray"].get, self._config["backend"]
        get(
            self._call(
                "init_checkpoint_engine",
                backend=backend,
                bucket_size_bytes=5 << 20,
                engine_kwargs=self._config["engine_kwargs"][backend],
            )
        )
        policy, generation = self._ends
        answers = get(self._call("prepare_checkpoint_engine"))
        num_policy = len(policy.worker_group.workers)
        rollout = [one for group in answers[num_policy:] for one in group]
        topology = {
            "train_world_size": num_policy,
            "rollout_world_size": len(rollout),
            "metadata": sorted(answers[:num_policy], key=lambda m: m["rank"]) + rollout,
        }
        calls = policy.worker_group.run_all_workers_single_data(
            "checkpoint_engine_rpc",
            checkpoint_method="init_checkpoint_engine_process_group",
            method_kwargs=topology,
        )
        num_workers = len(generation.worker_group.workers)
        prefixes = range(0, num_workers, num_workers // generation.dp_size)
        calls += generation.worker_group.run_all_workers_multiple_data(
            "checkpoint_engine_rpc",
            method_args=[(prefix, *topology.values()) for prefix in prefixes],
            run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"],
            common_kwargs={"checkpoint_method": "init_checkpoint_engine_process_group"},
        )
        get(calls)
        self._is_ready = True

    def sync_weights(self, *, timer=None, kv_scales=None):
        self._ensure_ready()
        get, (policy, generation) = sys.modules["ray"].get, self._ends
        try:
            calls = policy.worker_group.run_all_workers_single_data(
                "checkpoint_engine_rpc",
                checkpoint_method="send_weights_via_checkpoint_engine",
                method_kwargs={"kv_scales": kv_scales},
            )
            num_policy = len(calls)
            calls += generation.worker_group.run_all_workers_single_data(
                "checkpoint_engine_rpc",
                checkpoint_method="update_weights_from_checkpoint_engine",
                method_args=(),
                run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"],
            )
            if not all(get(calls)[num_policy:]):
                raise RuntimeError("Weight transfer failed")
        finally:
            backend = self._config["backend"]
            if self._config["engine_kwargs"][backend]["release_after_refit"]:
                self.shutdown()

    def shutdown(self):
        sys.modules["ray"].get(self._call("finalize_checkpoint_engine"))
        self._is_ready = False


_STAND_IN = {
    BASE: (CheckpointEngine, create_checkpoint_engine),
    POLICY: (PolicyCheckpointEngineMixin,),
    ROLLOUT: (VllmCheckpointEngineMixin, VllmCheckpointEngineRpcMixin),
    CONFIG: (checkpoint_engine_refit_config,),
    SYNC: (CheckpointEngineWeightSynchronizer,),
}


def install(monkeypatch: Any, source: Path | None) -> SimpleNamespace:
    """The names above, of the stand-in or, with the source of NeMo-RL, of its own files."""

    def add(name: str, folder: Path | None = None, **content: object) -> None:
        module = ModuleType(name)
        module.__path__ = [] if folder is None else [str(folder)]
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        monkeypatch.delitem(sys.modules, name)
    add("ray", get=get, ObjectRef=object)
    for name in _STAND_IN:
        parts = name.split(".")
        for length in range(1, len(parts)):
            package = ".".join(parts[:length])
            if package not in sys.modules:  # the real ones import vLLM, Megatron and more
                add(package, None if source is None else source.joinpath(*parts[:length]))
    if source is None:
        for name, content in _STAND_IN.items():
            add(name, **{value.__name__: value for value in content})
    else:
        add("nemo_rl.distributed")
        add("nemo_rl.distributed.batched_data_dict", BatchedDataDict=dict)
        add("nemo_rl.utils.nsys", wrap_with_nvtx_name=lambda _: lambda function: function)
    found: dict[str, Any] = {}
    for name, content in _STAND_IN.items():
        module = importlib.import_module(name)
        found |= {value.__name__: getattr(module, value.__name__) for value in content}
    return SimpleNamespace(**found)


def get(calls: list[Any]) -> list[Any]:
    """The answers to calls that run, or the first error; unlike Ray, once all are over."""
    wait(calls, timeout=60)
    return [call.result(timeout=60) for call in calls]
