"""The updater over process groups that slime and miles get: their own gathers the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gymfast.integrations.bucket_broadcast import EngineGroup
from gymfast.integrations.bucket_sync import BucketSync, Trainer
from gymfast.integrations.engine_link import EngineLink, GroupSettings
from gymfast.integrations.engine_loads import Address
from gymfast.integrations.flat_bucket import Bucket
from gymfast.integrations.ranks import Ranks

OPTIONS = ("gymfast_timeout_s", "gymfast_flat_buckets", "gymfast_delta")
"""What the file of --custom-config-path may set."""


@dataclass(frozen=True)
class BroadcastFramework:
    """What the two frameworks have by different names; `self` is the updater."""

    gloo_group: Callable[[], Any]
    address: Address
    trainer: Callable[[Any], Trainer]  # self, after its own __init__
    group_name: Callable[[Any], str | None]  # self; None on ranks that do not send
    init_process_group: Callable[..., Any]
    backend: Callable[[], str]
    wrap_host: Callable[[str], str]
    call: Callable[[Any, Any, str, Bucket, str | None], Any]  # self, handle, group, version
    leaves: Callable[[Any], bool] = lambda _: False  # self: an updater that stays as it was


def check_values(args: Any) -> None:
    """Raises ValueError for a value of an option that makes no sense."""
    seconds = timeout_s(args)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
        raise ValueError(f"gymfast_timeout_s is {seconds!r}, expected seconds above 0")
    for name in ("gymfast_flat_buckets", "gymfast_delta"):
        value = getattr(args, name, None)
        if value not in (None, True, False):
            raise ValueError(f"{name} is {value!r}, expected true or false, or nothing")


def timeout_s(args: Any) -> Any:
    """Seconds that a bucket may take: the option, or the framework's minutes for groups."""
    given = getattr(args, "gymfast_timeout_s", None)
    return 60 * args.distributed_timeout_minutes if given is None else given


def derive_broadcast_updater(base: Any, framework: BroadcastFramework) -> type:
    """A class with the interface of base, whose updates are those of BucketSync."""
    import ray
    import torch
    import torch.distributed as dist

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=framework.gloo_group())
        return values

    class GymfastBroadcast(base):  # type: ignore[misc]
        """The framework's distributed updater with the sending side of gymfast."""

        weight_version: int

        def __init__(self, args: Any, model: Any, weights_getter: Any, **options: Any) -> None:
            super().__init__(args, model, weights_getter, **options)
            trainer = framework.trainer(self)
            self._sync = BucketSync(Ranks(dist.get_rank(), gather), trainer, ray)

        def connect_rollout_engines(
            self,
            rollout_engines: Sequence[Any],
            rollout_engine_lock: Any,
            engine_gpu_counts: Sequence[int] | None = None,
            engine_gpu_offsets: Sequence[int] | None = None,
            engine_parallel_configs: Sequence[Any] | None = None,  # noqa: ARG002 - of slime
        ) -> None:
            """Makes the groups, one pipeline stage after the other."""
            if framework.leaves(self):
                super().connect_rollout_engines(
                    rollout_engines, rollout_engine_lock, engine_gpu_counts, engine_gpu_offsets
                )
                return
            self.rollout_engines, self.rollout_engine_lock = rollout_engines, rollout_engine_lock
            name, link = framework.group_name(self), None
            if name is not None:
                self._group_name = name
                call = partial(framework.call, self)
                group = EngineGroup(name, rollout_engines, rollout_engine_lock, ray, call)
                one = [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
                settings = GroupSettings(
                    init_process_group=framework.init_process_group,
                    backend=framework.backend(),
                    wrap_host=framework.wrap_host,
                    gpu_counts=engine_gpu_counts or one,
                    is_flat=getattr(self.args, "gymfast_flat_buckets", None),
                    urls=lambda: urls_of(self, framework.address, ray),
                )
                link = EngineLink(group, settings)
            self._sync.connect(rollout_engines, link)
            self._connection_stale = False  # as miles notes it

        def disconnect_rollout_engines(self) -> None:
            """Leaves the groups; engines that do not answer are left to their own time-out."""
            self._sync.disconnect()

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def update_weights(self) -> None:
            """The next version on all engines, or an error on all ranks; engines generate again."""
            if framework.leaves(self):
                super().update_weights()
                return
            self._sync.update(self.weight_version + 1)
            self.weight_version += 1
            self.update_weight_metrics = self._sync.metrics()

    return GymfastBroadcast


def urls_of(updater: Any, address: Address, ray: Any) -> list[Any]:
    """The addresses of the servers of an updater's engines."""
    calls = [getattr(handle, address.method).remote() for handle in updater.rollout_engines]
    answers = ray.get(calls, timeout=timeout_s(updater.args))
    return [address.url(answer) for answer in answers]
