"""Just enough of ray, megatron and heavy parts of slime and miles for their updaters to run here.

Real are: the updaters, their gather and bucket code, their distributed helpers and their codec.
"""

from __future__ import annotations

import importlib
import sys
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

STAND_IN = Path(__file__).parent / "slime_stand_in"


@dataclass
class Call:
    """A call that is over; `get` gives its value, or raises its error, as Ray does."""

    value: Any = None
    error: Exception | None = None


class Method:
    def __init__(self, function: Any) -> None:
        self.function = function

    def remote(self, *args: Any, **kwargs: Any) -> Call:
        try:
            return Call(self.function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as Ray keeps it for get
            return Call(error=error)


class GetTimeoutError(TimeoutError): ...


def get(calls: Any, timeout: float | None = None) -> Any:
    if isinstance(calls, list):
        return [get(call, timeout) for call in calls]
    if isinstance(calls, Future):
        if not futures.wait([calls], timeout).done:
            raise GetTimeoutError("Get timed out: some object(s) not ready.")
        return calls.result()
    if calls.error is not None:
        raise calls.error
    return calls.value


def wait(calls: list[Any], *, num_returns: int, timeout: float | None) -> tuple[list, list]:
    """As Ray's for one: who is ready by the time-out, up to that many."""
    assert num_returns == 1
    done = futures.wait(calls, timeout, futures.FIRST_COMPLETED).done
    ready = [call for call in calls if call in done][:1]
    return ready, [call for call in calls if call not in ready]


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its pipeline stage, and its number among the replicas of the stage."""

    stage: int
    replica: int


def install(framework: str, source: Path, place: Place) -> None:
    """Makes a framework of a checkout (or its stand-in) importable, and stubs for what it needs."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    services = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    private = SimpleNamespace(services=services)
    _module("ray", get=get, wait=wait, ObjectRef=Call, _private=private)
    _module("ray.actor", ActorHandle=object)
    _install_megatron(place, own)
    sys.path.insert(0, str(source))
    if source == STAND_IN:
        for name in ("slime", "miles"):
            _module(f"{name}.utils.misc", load_function=_load_function)
        updates = "miles.backends.megatron_utils.update_weight"
        _module(f"{updates}.common", weight_update_selector=lambda args: "all")
        return
    _module("tqdm", tqdm=_Bar)
    _module("httpx", AsyncClient=object)
    utils = source / framework / "backends" / "megatron_utils"
    _package(f"{framework}.backends", utils.parent)
    _package(f"{framework}.backends.megatron_utils", utils)
    _module(f"{framework}.backends.megatron_utils.megatron_to_hf", convert_to_hf=_convert)
    if framework == "slime":
        stream = type("Stream", (), {"synchronize": lambda self: None})()
        device = {"current_stream": lambda: stream, "current_device": lambda: "cpu"}
        _module("slime.utils.accelerator", weight_update_backend=lambda: "gloo", **device)
        _install_actor(utils)
    else:
        _install_for_miles(place, own)
        _install_miles_actor(utils)


def _install_megatron(place: Place, own: Any) -> None:
    mpu = _module(
        "megatron.core.mpu",
        get_data_parallel_rank=lambda with_context_parallel: place.replica,
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
        get_pipeline_model_parallel_rank=lambda: place.stage,
        get_expert_model_parallel_rank=lambda: 0,
        get_expert_model_parallel_world_size=lambda: 1,
        get_expert_model_parallel_group=lambda: own,
        get_expert_tensor_parallel_world_size=lambda: 1,
    )
    _package("megatron")
    _package("megatron.core", mpu=mpu)
    _package("megatron.core.transformer")
    _module(
        "megatron.core.transformer.transformer_layer",
        get_transformer_layer_offset=lambda config, vp_stage=None: 0,
    )


def _install_actor(utils: Path) -> None:
    """slime's actor module, with its own lines that pick an updater as the function `pick`."""
    text = (utils / "actor.py").read_text()
    package = "slime.backends.megatron_utils"
    actor = _module(f"{package}.actor", __package__=package)
    for name in ("Distributed", "Disk", "Tensor"):
        kind = f"UpdateWeightFrom{name}"
        actor.__dict__[kind] = type(kind, (), {})
    imported = (
        "from .update_weight.update_weight_from_distributed import UpdateWeightFromDistributed"
    )
    assert imported in text.splitlines()
    exec(imported, actor.__dict__)
    begin = text.index("        update_weight_mode = self.args.update_weight_mode")
    lines = text[begin : text.index("        self.weight_updater = update_weight_cls(")]
    function = f"class Actor:\n    def pick(self):\n{lines}        return update_weight_cls\n"
    exec(compile(function, str(utils / "actor.py"), "exec"), actor.__dict__)
    actor.pick = lambda args: actor.Actor.pick(SimpleNamespace(args=args))


def _install_for_miles(place: Place, own: Any) -> None:
    alone = SimpleNamespace(rank=0, size=1, group=own)
    replicas = SimpleNamespace(rank=place.replica, size=2, group=None)
    stage = SimpleNamespace(rank=place.stage)
    state = SimpleNamespace(intra_dp_cp=replicas, tp=alone, ep=alone, etp=alone, pp=stage)
    _package("miles.backends.training_utils")
    _module("miles.backends.training_utils.parallel", get_parallel_state=lambda: state)
    _module("miles.utils.ft_utils.process_group_utils", GeneralPGUtil=object)
    _module("miles.utils.logging_utils", configure_logger_raw=None)
    torch.cuda.current_device = lambda: "cpu"


def _install_miles_actor(utils: Path) -> None:
    """miles's actor module, with its own lines that pick an updater as the function `pick`."""
    text = (utils / "actor.py").read_text()
    package = "miles.backends.megatron_utils"
    actor = _module(f"{package}.actor", __package__=package)
    actor.UpdateWeightFromTensor = actor.UpdateWeightP2P = type("Other", (), {})
    helpers = importlib.import_module("miles.utils.distributed_utils")
    make = helpers.init_process_group
    helpers.init_process_group = lambda **options: make(**options | {"backend": "gloo"})
    imported = (
        "from .update_weight.update_weight_from_distributed.broadcast "
        "import UpdateWeightFromDistributed"
    )
    assert imported in text.splitlines()
    exec(imported, actor.__dict__)
    begin = text.index("        if self.args.colocate:\n            update_weight_cls")
    lines = text[begin : text.index("        self.weight_updater = update_weight_cls(")]
    function = f"class Actor:\n    def pick(self):\n{lines}        return update_weight_cls\n"
    exec(compile(function, str(utils / "actor.py"), "exec"), actor.__dict__)
    actor.pick = lambda args: actor.Actor.pick(SimpleNamespace(args=args))


def _load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _convert(args: Any, model_name: str, name: str, tensor: torch.Tensor, config: Any) -> list:
    # A clone: on the CPU slime's snapshot would otherwise be the memory of the live parameter.
    return [(name.removeprefix("module.module."), tensor.clone())]


class _Bar:
    def __init__(self, **options: Any) -> None: ...

    def update(self, count: int) -> None: ...


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def _package(name: str, *path: Path, **content: Any) -> None:
    _module(name, __path__=[str(p) for p in path], **content)
