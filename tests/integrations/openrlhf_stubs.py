"""Just enough of Ray, DeepSpeed, vLLM and heavy parts of OpenRLHF for its trainer to run here.

Real are: the engine's side of gymfast, and (with a checkout) OpenRLHF's trainer and Ray actors.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from integrations import vllm_stand_in

STAND_IN = Path(__file__).parent / "openrlhf_stand_in"
_HEAVY = (
    *("models", "models.utils", "utils", "utils.agent", "utils.deepspeed", "utils.loss_utils"),
    *("utils.deepspeed.deepspeed_utils", "utils.vlm_utils", "utils.logging_utils"),
    *("trainer.ppo_utils", "trainer.ppo_utils.experience"),
)


class Handle:
    """A handle of a Ray actor in this process; `calls` counts what went to it."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.calls = actor, []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return getattr(self.actor, name)(*args, **kwargs)

        return SimpleNamespace(remote=remote)


class ActorClass:
    """What ray.remote makes of a class."""

    def __init__(self, cls: type) -> None:
        self.__ray_actor_class__ = cls
        for function in filter(inspect.isfunction, vars(cls).values()):
            _trace(function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__ray_actor_class__, name)

    def remote(self, *args: Any, **kwargs: Any) -> Handle:
        actor = self.__ray_actor_class__.__new__(self.__ray_actor_class__)
        asyncio.run(actor.__init__(*args, **kwargs))  # as Ray does for async actors
        return Handle(actor)


def _trace(function: Any) -> None:
    """Adds the parameter that Ray adds to methods of actors."""
    signature = inspect.signature(function)
    *first, last = signature.parameters.values()
    context = inspect.Parameter("_ray_trace_ctx", inspect.Parameter.KEYWORD_ONLY, default=None)
    is_open = last.kind is inspect.Parameter.VAR_KEYWORD
    parameters = [*first, context, last] if is_open else [*first, last, context]
    function.__signature__ = signature.replace(parameters=parameters)


def ray_remote(*args: Any, **options: Any) -> Any:
    return ActorClass(args[0]) if args else ActorClass


def ray_get(calls: Any, *, timeout: float | None = None) -> Any:
    if isinstance(calls, list):
        return [ray_get(call, timeout=timeout) for call in calls]
    return asyncio.run(asyncio.wait_for(calls, timeout))


class AsyncLLM:
    """vLLM's AsyncLLM 0.29 around our engine of several ranks; `fails` raises in its update.

    The worker that raises closes its update, those that do not keep theirs open.
    """

    def __init__(self, arguments: Any) -> None:
        from gymfast.integrations.vllm import GymfastEngine

        assert arguments.options["weight_transfer_config"] == {"backend": "gymfast"}
        self.model = vllm_stand_in.PlainModel(arguments.options["shapes"])
        made = vllm_stand_in.engine_arguments(vllm_stand_in.Engine32, self.model)
        self.engine, self.version, self.resets = GymfastEngine(*made), "", 0
        self.fails = self.keeps_cache = self.is_open = False

    async def is_sleeping(self) -> bool:
        return False

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(request.init_info))

    async def start_weight_update(self) -> None:
        if self.is_open:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.is_open = True
        self.engine.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        if self.fails:
            raise RuntimeError("injected: the engine core is dead")
        self.engine.update_weights(request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        was_failed, self.is_open = self.fails, False
        if was_failed:  # by the worker that has none open
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.engine.finish_weight_update()

    async def update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.resets += 1
        return reset_running_requests and not self.keeps_cache


class Gathered:
    """GatheredParameters: on entry each rank gets the shards of all others, a collective."""

    def __init__(self, params: Sequence[Any], *others: Any, enabled: bool = True) -> None:
        self.param, self.is_enabled = params[0], enabled

    def __enter__(self) -> None:
        if self.is_enabled:
            self.shard = self.param.data
            parts = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, self.shard)
            shape = self.param.ds_shape
            self.param.data = torch.cat(parts)[: math.prod(shape)].reshape(shape)

    def __exit__(self, *error: Any) -> None:
        if self.is_enabled:
            self.param.data = self.shard


def shard(model: torch.nn.Module) -> None:
    """Each rank keeps its part of each parameter."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for param in model.parameters():
        param.ds_shape = param.shape
        size = -(-param.numel() // world)
        flat = torch.nn.functional.pad(param.data.flatten(), (0, size * world - param.numel()))
        param.data = flat[rank * size : (rank + 1) * size].clone()


def install_vllm() -> None:
    """Makes `import vllm` find what an engine actor needs of it."""
    modules = SimpleNamespace(setitem=lambda where, name, value: where.update({name: value}))
    vllm_stand_in.install(modules, vllm_stand_in.Engine32, "0.29.0")
    base = sys.modules["vllm.distributed.weight_transfer.base"]
    for name, field in (("Init", "init_info"), ("Update", "update_info")):
        request = type("Request", (SimpleNamespace,), {field: None})
        setattr(base, f"WeightTransfer{name}Request", request)
    sys.modules["vllm"].AsyncEngineArgs = lambda *args, **options: SimpleNamespace(options=options)
    sys.modules["vllm"].AsyncLLMEngine = SimpleNamespace(from_engine_args=AsyncLLM)


def install_deepspeed() -> None:
    """Makes `import deepspeed` find what gathers parameters."""
    layers = SimpleNamespace(GatherReplacedLayerParams=Gathered)
    _module(
        "deepspeed",
        zero=SimpleNamespace(GatheredParameters=Gathered),
        module_inject=SimpleNamespace(layers=layers),
    )


def install(source: Path | None) -> None:
    """Makes OpenRLHF of a checkout (or its stand-in) importable, and stubs for what it needs."""
    install_vllm()
    install_deepspeed()
    _module("ray", remote=ray_remote, get=ray_get, get_gpu_ids=lambda: [0], __version__="0")
    torch.cuda.synchronize = lambda *_: None
    os.environ["RAY_ADDRESS"] = "here"
    root = source or STAND_IN
    sys.path.insert(0, str(root))
    if source is None:
        return
    _module("tqdm", tqdm=iter)
    for name in (
        "vllm.inputs",
        "vllm.utils",
        "ray.util",
        "ray.util.scheduling_strategies",
    ):
        sys.modules[name] = _anything(name)
    sys.modules["ray.util.placement_group"] = _anything("ray.util.placement_group")
    for name in _HEAVY:
        sys.modules[f"openrlhf.{name}"] = _anything(f"openrlhf.{name}", source)
    _module("openrlhf.trainer.ray.launcher", BaseModelActor=object)
    _module("openrlhf.trainer", __path__=[str(source / "openrlhf" / "trainer")])


def _anything(name: str, source: Path | None = None) -> ModuleType:
    module = MagicMock(name=name)
    path = [] if source is None else [str(source / name.replace(".", "/"))]
    module.__path__, module.__spec__, module.__name__ = path, None, name
    return module


def _module(name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
