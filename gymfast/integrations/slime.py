"""slime: its delta updater and its distributed one, put in place by one flag; two store hooks.

    --custom-megatron-init-path gymfast.integrations.slime.install

Flags, options and versions: docs/integrations/slime.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymfast.errors import GymfastError
from gymfast.integrations import broadcast_updater, slime_broadcast
from gymfast.integrations.disk_delta_updater import Framework, check_options, derive_updater
from gymfast.integrations.engine_loads import Address
from gymfast.integrations.patience import Patience
from gymfast.integrations.rank_encoder import Add
from gymfast.integrations.rebind import replace_class, require_class
from gymfast.integrations.store_mirror import StoreMirror

_MODULE = "slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta"
_CLASS = "UpdateWeightFromDiskDelta"
_CONSTRUCTOR = ("args", "model", "weights_getter", "model_name", "quantization_config")
_CONNECT = (
    *("rollout_engines", "rollout_engine_lock"),
    *("engine_gpu_counts", "engine_gpu_offsets", "engine_parallel_configs"),
)
EXPECTED = {
    "__init__": _CONSTRUCTOR,
    "connect_rollout_engines": _CONNECT,
    "disconnect_rollout_engines": (),
    "update_weights": (),
    "pop_metrics": (),
    "_iter_hf_tensors": (),
}
"""Methods of slime's delta updater that the one here uses or stands for, with their parameters."""
_ACTOR = "slime.backends.megatron_utils.actor"
EXPECTED_DISTRIBUTED = {
    "__init__": _CONSTRUCTOR,
    "connect_rollout_engines": _CONNECT,
    "disconnect_rollout_engines": (),
    "update_weights": (),
    "pop_metrics": (),
    "_send_weights": ("pbar",),
    "_on_chunk": ("hf_chunk",),
    "_iter_non_expert_chunks": (),
    "_iter_expert_chunks": (),
}
"""Those of slime's distributed updater."""
_log = logging.getLogger(__name__)


def install(args: Any) -> None:
    """Puts an updater of gymfast in the place of slime's; to be named on the command line.

    slime calls it in every trainer actor, before it picks an updater by its flags. Replaced are
    those of delta and of full over nccl; any other is left as it is, with a line in the log. Raises
    ValueError for unknown options, GymfastError for an unknown slime.
    """
    if args.update_weight_mode == "delta":
        check_options(args)
        replace_class(_MODULE, _CLASS, EXPECTED, make_updater)
        return
    check_options(args, broadcast_updater.OPTIONS)
    broadcast_updater.check_values(args)
    reason = "--colocate is set" if args.colocate else None
    if args.update_weight_transport != "nccl":
        reason = f"--update-weight-transport is {args.update_weight_transport}"
    if reason is not None:
        _log.warning(
            "gymfast leaves slime's updater as it is: %s; it replaces that of --update-weight-mode "
            "delta, and that of full with --update-weight-transport nccl and without --colocate",
            reason,
        )
        return
    # The actor looks the class up among its own names.
    replace_class(
        _ACTOR,
        "UpdateWeightFromDistributed",
        EXPECTED_DISTRIBUTED,
        slime_broadcast.make_broadcast_updater,
    )


def check_api() -> None:
    """Raises GymfastError if the updater of this slime is not the known one."""
    require_class(_MODULE, _CLASS, EXPECTED)


def post_write(args: Any, path: str, engines: Sequence[Any]) -> None:  # noqa: ARG001 - of slime
    """Puts what the trainer wrote into the store; for --custom-update-weight-post-write-path.

    Store and run are those of GYMFAST_STORE and GYMFAST_RUN; GYMFAST_STORE_CARRY=files puts files
    as they are. Raises GymfastError if a variable is missing or wrong, StoreError if the store
    fails.
    """
    mirror = _mirror(getattr(args, "gymfast_threads", None))
    if Path(path).name.startswith("weight_v"):
        mirror.put(Path(path))
    else:
        mirror.begin()  # slime's call before the first version


def pre_read(path: str, target_version: int) -> None:
    """Fetches what an engine is about to read; for --sglang-custom-pull-weights-pre-read-hook.

    Waits up to GYMFAST_STORE_WAIT_S seconds for what this host does not see yet. Raises as
    post_write; NotFoundError for a version that is not in the store.
    """
    _mirror().fetch(Path(path), target_version)


def _mirror(threads: int | None = None) -> StoreMirror:
    store, run = os.environ.get("GYMFAST_STORE"), os.environ.get("GYMFAST_RUN")
    if not store or not run:
        raise GymfastError(
            f"{'GYMFAST_RUN' if store else 'GYMFAST_STORE'} is not set: the hooks of "
            "gymfast.integrations.slime need it in the environment of trainer and engines, with "
            "the same value"
        )
    wait = os.environ.get("GYMFAST_STORE_WAIT_S", "30")
    if not wait.isdigit():
        raise GymfastError(f"GYMFAST_STORE_WAIT_S is {wait!r}, expected whole seconds, such as 30")
    carry = os.environ.get("GYMFAST_STORE_CARRY", "changes")
    if carry not in ("changes", "files"):
        raise GymfastError(f"GYMFAST_STORE_CARRY is {carry!r}, expected changes or files")
    patience, as_changes = Patience(int(wait)), carry == "changes"
    return StoreMirror(store, run, threads=threads, patience=patience, as_changes=as_changes)


def make_updater(base: Any) -> type:
    """The updater, derived from slime's."""
    from slime.utils.distributed_utils import get_gloo_group
    from slime.utils.misc import load_function

    return derive_updater(base, Framework(get_gloo_group, load_function, _walk, Address("get_url")))


def _walk(updater: Any, add: Add) -> None:
    for name, tensor in updater._iter_hf_tensors():
        add(name, tensor)
