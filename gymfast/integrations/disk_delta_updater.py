"""The updater that slime and miles get: derived from their own, which gathers the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymfast.delta.state import num_threads
from gymfast.integrations.delta_stream import DeltaStream, StreamSettings
from gymfast.integrations.delta_sync import DeltaSync, Pause, Trainer
from gymfast.integrations.device_twin import check_place
from gymfast.integrations.engine_loads import Address
from gymfast.integrations.engines import Engines
from gymfast.integrations.rank_encoder import Add
from gymfast.integrations.ranks import Ranks

OPTIONS = (
    *("gymfast_threads", "gymfast_host_memory_bytes", "gymfast_snapshot"),
    "gymfast_timeout_s",
)
"""What the file of --custom-config-path may set."""
_RATIO = 0.9  # of the time for which other ranks wait: they then learn what went wrong


@dataclass(frozen=True)
class Framework:
    """What the two frameworks have by different names; `self` is the updater."""

    gloo_group: Callable[[], Any]
    load_function: Callable[[str], Any]
    walk: Callable[[Any, Add], None]  # self, add
    address: Address
    pause: Callable[[Any], Pause] = lambda _: Pause()  # args
    loads_base: Callable[[Any], bool] = lambda _: False  # args


def check_options(args: Any, known: Sequence[str] = OPTIONS) -> None:
    """Raises ValueError for an option of gymfast, or a place, that does not exist."""
    unknown = sorted(n for n in vars(args) if n.startswith("gymfast_") and n not in known)
    if unknown:
        raise ValueError(
            f"option {unknown[0]} is unknown, expected one of {', '.join(known)}: correct the file "
            "of --custom-config-path"
        )
    check_place(getattr(args, "gymfast_snapshot", "auto"))
    timeout_s = getattr(args, "gymfast_timeout_s", None)
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and timeout_s > 0):
        raise ValueError(f"gymfast_timeout_s is {timeout_s!r}, expected seconds above 0")


def derive_updater(base: Any, framework: Framework) -> type:
    """A class with the interface of base, whose updates are those of DeltaSync."""
    import ray
    import torch
    import torch.distributed as dist

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=framework.gloo_group())
        return values

    class GymfastDiskDelta(base):  # type: ignore[misc]
        """The framework's delta updater with the codec of gymfast."""

        def __init__(self, args: Any, model: Any, weights_getter: Any, **options: Any) -> None:
            super().__init__(args, model, weights_getter, **options)
            ranks = Ranks(dist.get_rank(), gather)
            self._sync = DeltaSync(DeltaStream(_settings(args), ranks), ranks, self._trainer(args))

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def update_weights(self) -> None:
            """The next version; the first call publishes nothing, as in the framework."""
            if not self._sync.is_started:
                self._sync.start()
                return
            self._sync.write(self.weight_version + 1)
            self.weight_version += 1
            self._sync.deliver()
            self.update_weight_metrics = self._sync.metrics()

        def _trainer(self, args: Any) -> Trainer:
            path = args.custom_update_weight_post_write_path
            hook = framework.load_function(path) if path else None
            return Trainer(
                walk=lambda add: framework.walk(self, add),
                engines=lambda: Engines(self.rollout_engines, ray.get, _timeout_s(args)),
                local_checkpoint=args.update_weight_local_checkpoint_dir,
                hook=hook and (lambda path: hook(args, path, list(self.rollout_engines))),
                pause=framework.pause(args),
                address=framework.address,
                loads_base=framework.loads_base(args),
            )

    return GymfastDiskDelta


def _timeout_s(args: Any) -> float:
    """Seconds that engines have for one call, a load of everything included."""
    given = getattr(args, "gymfast_timeout_s", None)
    minutes = getattr(args, "distributed_timeout_minutes", 10)
    return float(60 * minutes * _RATIO if given is None else given)


def _settings(args: Any) -> StreamSettings:
    return StreamSettings(
        directory=Path(args.update_weight_disk_dir),
        base=Path(args.hf_checkpoint),
        encoding=args.update_weight_delta_encoding,
        algorithm=args.update_weight_delta_checksum,
        threads=num_threads(getattr(args, "gymfast_threads", None)),
        host_memory_bytes=getattr(args, "gymfast_host_memory_bytes", None),
        snapshot=getattr(args, "gymfast_snapshot", "auto"),
    )
