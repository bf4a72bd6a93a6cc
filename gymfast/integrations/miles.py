"""miles: its delta updater with native frames, put in place by one flag.

    --custom-megatron-init-path gymfast.integrations.miles.install

The hooks of gymfast.integrations.slime fit miles too. See docs/integrations/miles.md.
"""

from __future__ import annotations

from typing import Any

from gymfast.integrations.delta_sync import Pause
from gymfast.integrations.disk_delta_updater import Framework, check_options, derive_updater
from gymfast.integrations.engine_loads import Address
from gymfast.integrations.rank_encoder import Add
from gymfast.integrations.rebind import replace_class, require_class

_MODULE = "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.delta"
_CLASS = "UpdateWeightFromDiskDelta"
EXPECTED = {
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
    "_for_each_hf_bucket": ("bucket_func",),
}
"""Methods of miles's class that the updater here uses or stands for, with their parameters."""


def install(args: Any) -> None:
    """Puts the updater of gymfast in the place of miles's; to be named on the command line.

    Raises ValueError for a mode other than disk-delta and for unknown options, GymfastError for an
    unknown miles.
    """
    check_options(args)
    if args.update_weight_transfer_mode != "disk-delta":
        raise ValueError(
            f"--update-weight-transfer-mode is {args.update_weight_transfer_mode}, this plug-in "
            "replaces the updater of disk-delta: set it, or leave --custom-megatron-init-path out"
        )
    replace_class(_MODULE, _CLASS, EXPECTED, make_updater)


def check_api() -> None:
    """Raises GymfastError if the updater of this miles is not the known one."""
    require_class(_MODULE, _CLASS, EXPECTED)


def make_updater(base: Any) -> type:
    """The updater, derived from miles's."""
    from miles.utils.distributed_utils import get_gloo_group
    from miles.utils.misc import load_function

    address = Address("get_topology_info", lambda facts: facts["url"])
    framework = Framework(get_gloo_group, load_function, _walk, address, _pause, _loads_base)
    return derive_updater(base, framework)


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
