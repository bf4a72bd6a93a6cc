"""slime: its delta updater with native frames, put in place by one flag; and its two store hooks.

    --custom-megatron-init-path gymfast.integrations.slime.install

Flags, options and versions: docs/integrations/slime.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymfast.delta.state import num_threads
from gymfast.errors import GymfastError
from gymfast.integrations.delta_stream import DeltaStream, StreamSettings
from gymfast.integrations.delta_sync import DeltaSync, Trainer
from gymfast.integrations.engines import Engines
from gymfast.integrations.ranks import Ranks
from gymfast.integrations.rebind import replace_class
from gymfast.integrations.store_mirror import StoreMirror

OPTIONS = ("gymfast_threads", "gymfast_host_memory_bytes")
"""What the file of --custom-config-path may set."""

_MODULE = "slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta"
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
"""Methods of slime's class that the updater here uses or stands for, with their parameters."""


def install(args: Any) -> None:
    """Puts the updater of gymfast in the place of slime's; to be named on the command line.

    slime calls it in every trainer actor, before it picks an updater. Raises ValueError for a mode
    other than delta and for unknown options, GymfastError for an unknown slime.
    """
    check_options(args, OPTIONS)
    if args.update_weight_mode != "delta":
        raise ValueError(
            f"--update-weight-mode is {args.update_weight_mode}, this plug-in replaces the updater "
            "of delta: set it (with --update-weight-transport disk), or leave "
            "--custom-megatron-init-path out"
        )
    replace_class(_MODULE, "UpdateWeightFromDiskDelta", EXPECTED, make_updater)


def post_write(args: Any, path: str, engines: Sequence[Any]) -> None:  # noqa: ARG001 - of slime
    """Puts what the trainer wrote into the store; for --custom-update-weight-post-write-path.

    Store and run are those of GYMFAST_STORE and GYMFAST_RUN. Raises GymfastError if one of them is
    not set, StoreError if the store fails.
    """
    mirror = _mirror()
    if Path(path).name.startswith("weight_v"):
        mirror.put(Path(path))
    else:
        mirror.begin()  # slime's call before the first version


def pre_read(path: str, target_version: int) -> None:
    """Fetches what an engine is about to read; for --sglang-custom-pull-weights-pre-read-hook.

    Raises as post_write; NotFoundError for a version that is not in the store.
    """
    _mirror().fetch(Path(path), target_version)


def _mirror() -> StoreMirror:
    store, run = os.environ.get("GYMFAST_STORE"), os.environ.get("GYMFAST_RUN")
    if not store or not run:
        raise GymfastError(
            f"{'GYMFAST_RUN' if store else 'GYMFAST_STORE'} is not set: the hooks of "
            "gymfast.integrations.slime need it in the environment of trainer and engines, with "
            "the same value"
        )
    return StoreMirror(store, run)


def check_options(args: Any, known: Sequence[str]) -> None:
    """Raises ValueError for an option of gymfast that does not exist."""
    unknown = sorted(n for n in vars(args) if n.startswith("gymfast_") and n not in known)
    if unknown:
        raise ValueError(
            f"option {unknown[0]} is unknown, expected one of {', '.join(known)}: correct the file "
            "of --custom-config-path"
        )


def stream_settings(args: Any) -> StreamSettings:
    """What flags and options say of the versions."""
    return StreamSettings(
        directory=Path(args.update_weight_disk_dir),
        base=Path(args.hf_checkpoint),
        encoding=args.update_weight_delta_encoding,
        algorithm=args.update_weight_delta_checksum,
        threads=num_threads(getattr(args, "gymfast_threads", None)),
        host_memory_bytes=getattr(args, "gymfast_host_memory_bytes", None),
    )


def make_updater(base: Any) -> type:
    """The updater as a class derived from slime's, which gathers the tensors."""
    import ray
    import torch
    import torch.distributed as dist
    from slime.utils.distributed_utils import get_gloo_group
    from slime.utils.misc import load_function

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=get_gloo_group())
        return values

    class GymfastDiskDelta(base):  # type: ignore[misc]
        """slime's delta updater with the codec of gymfast."""

        def __init__(self, args: Any, model: Any, weights_getter: Any, **options: Any) -> None:
            super().__init__(args, model, weights_getter, **options)
            ranks = Ranks(dist.get_rank(), gather)
            path = args.custom_update_weight_post_write_path
            hook = load_function(path) if path else None
            trainer = Trainer(
                walk=self._walk,
                engines=lambda: Engines(self.rollout_engines, ray.get),
                local_checkpoint=args.update_weight_local_checkpoint_dir,
                hook=hook and (lambda path: hook(args, path, list(self.rollout_engines))),
            )
            self._sync = DeltaSync(DeltaStream(stream_settings(args), ranks), ranks, trainer)

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def update_weights(self) -> None:
            """The next version; the first call publishes nothing, as in slime."""
            if not self._sync.is_started:
                self._sync.start()
                return
            self._sync.write(self.weight_version + 1)
            self.weight_version += 1
            self._sync.deliver()
            self.update_weight_metrics.update(self._sync.metrics())

        def _walk(self, add: Any) -> None:
            for name, tensor in self._iter_hf_tensors():
                add(name, tensor)

    return GymfastDiskDelta
