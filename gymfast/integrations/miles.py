"""miles: its delta updater and its distributed one, put in place by one flag.

    --custom-megatron-init-path gymfast.integrations.miles.install

The hooks of gymfast.integrations.slime fit miles too. See docs/integrations/miles.md.
"""

from __future__ import annotations

from typing import Any

from gymfast.integrations.broadcast_updater import (
    OPTIONS,
    BroadcastFramework,
    check_values,
    derive_broadcast_updater,
    timeout_s,
    urls_of,
)
from gymfast.integrations.bucket_sync import Trainer, Walk
from gymfast.integrations.delta_sync import Pause
from gymfast.integrations.disk_delta_updater import Framework, check_options, derive_updater
from gymfast.integrations.engine_loads import Address
from gymfast.integrations.flat_bucket import Bucket
from gymfast.integrations.rank_encoder import Add
from gymfast.integrations.rebind import replace_class, require_class

_MODULE = "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.delta"
_CLASS = "UpdateWeightFromDiskDelta"
_SHARED = {
    "__init__": (
        *("args", "model", "weights_getter", "model_name", "quantization_config", "is_lora"),
    ),
    "connect_rollout_engines": (
        *("rollout_engines", "rollout_engine_lock", "engine_gpu_counts", "engine_gpu_offsets"),
    ),
    "is_rollout_engines_fresh": (),
    "mark_engine_connection_stale": (),
    "update_weights": (),
    "pop_metrics": (),
}
EXPECTED = {**_SHARED, "_for_each_hf_bucket": ("bucket_func",)}
"""Methods of miles's class that the updater here uses or stands for, with their parameters."""
_ACTOR = "miles.backends.megatron_utils.actor"
_GATHER = "_gather_and_update_non_expert_weights", "_gather_and_update_expert_weights"
EXPECTED_DISTRIBUTED = {
    **_SHARED,
    **dict.fromkeys(_GATHER, ("update_bucket_weight_func", "pbar")),
}
"""Those of miles's distributed updater."""
_ADDRESS = Address("get_topology_info", lambda facts: facts["url"])


def install(args: Any) -> None:
    """Puts an updater of gymfast in the place of miles's; to be named on the command line.

    Raises ValueError for a mode other than disk-delta and broadcast, or colocated engines, and for
    unknown options, GymfastError for an unknown miles.
    """
    mode = args.update_weight_transfer_mode
    if mode == "disk-delta":
        check_options(args)
        replace_class(_MODULE, _CLASS, EXPECTED, make_updater)
        return
    if mode != "broadcast" or args.colocate:
        found = "--colocate is set" if mode == "broadcast" else f"it is {mode}"
        raise ValueError(
            "this plug-in replaces the updaters of --update-weight-transfer-mode disk-delta, and "
            f"of broadcast without --colocate; {found}: leave --custom-megatron-init-path out"
        )
    check_options(args, OPTIONS)
    check_values(args)
    # The actor looks the class up among its own names.
    updater = "UpdateWeightFromDistributed"
    replace_class(_ACTOR, updater, EXPECTED_DISTRIBUTED, make_broadcast_updater)


def check_api() -> None:
    """Raises GymfastError if the updater of this miles is not the known one."""
    require_class(_MODULE, _CLASS, EXPECTED)


def make_updater(base: Any) -> type:
    """The updater, derived from miles's."""
    from miles.utils.distributed_utils import get_gloo_group
    from miles.utils.misc import load_function

    framework = Framework(get_gloo_group, load_function, _walk, _ADDRESS, _pause, _loads_base)
    return derive_updater(base, framework)


def make_broadcast_updater(base: Any) -> type:
    """The updater over process groups, derived from miles's; with LoRA it is miles's own."""
    import torch
    from miles.utils.distributed_utils import get_gloo_group, init_process_group

    framework = BroadcastFramework(
        gloo_group=get_gloo_group,
        address=_ADDRESS,
        trainer=_trainer,
        group_name=_group_name,
        init_process_group=init_process_group,
        backend=lambda: "nccl" if torch.cuda.is_available() else "gloo",
        wrap_host=lambda host: f"[{host}]" if ":" in host else host,
        call=_call,
        leaves=lambda updater: bool(updater.is_lora),
    )
    return derive_broadcast_updater(base, framework)


def _trainer(updater: Any) -> Trainer:
    import ray

    args = updater.args
    wants_delta = getattr(args, "gymfast_delta", None) is not False
    return Trainer(
        walks=[_chunks(updater, name) for name in _GATHER],
        is_packed=False,
        timeout_s=timeout_s(args),
        pause=_pause(args),
        selector=_selector(args),
        urls=(lambda: urls_of(updater, _ADDRESS, ray)) if wants_delta else None,
    )


def _chunks(updater: Any, name: str) -> Walk:
    return lambda take: getattr(updater, name)(lambda chunk, _progress=None: take(chunk), None)


def _group_name(updater: Any) -> str | None:
    from miles.backends.training_utils.parallel import get_parallel_state

    return f"miles-pp_{get_parallel_state().pp.rank}" if updater._is_source else None


def _selector(args: Any) -> str:
    from miles.backends.megatron_utils.update_weight.common import weight_update_selector

    return str(weight_update_selector(args))


def _call(updater: Any, handle: Any, name: str, bucket: Bucket, weight_version: str | None) -> Any:
    """The handle's own method has no parameter for a load format, its endpoint has."""
    payload = {
        "names": bucket.names,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
        "shapes": [list(shape) for shape in bucket.shapes],
        "group_name": name,
        "flush_cache": False,
        "selector": _selector(updater.args),
    }
    options = {"weight_version": weight_version, "load_format": bucket.load_format}
    payload |= {key: value for key, value in options.items() if value is not None}
    return handle._make_request.remote("update_weights_from_distributed", payload)


def _walk(updater: Any, add: Add) -> None:
    def add_bucket(named_tensors: Any, progress: Any = None) -> None:  # noqa: ARG001 - of miles
        for name, tensor in named_tensors:
            add(name, tensor)

    updater._for_each_hf_bucket(add_bucket)


def _pause(args: Any) -> Pause:
    mode = args.pause_generation_mode
    return Pause({"mode": mode}, flushes_cache=mode != "in_place")


def _loads_base(args: Any) -> bool:
    """Its check of weights clears those of the engines first."""
    return bool(args.check_weight_update_equal)
