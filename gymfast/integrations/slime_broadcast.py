"""slime's updater over process groups, with flat buckets, overlap and deadlines."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from gymfast.integrations.bucket_broadcast import EngineGroup
from gymfast.integrations.bucket_sync import BucketSync, Trainer
from gymfast.integrations.ranks import Ranks
from gymfast.integrations.slime_groups import EngineLink

OPTIONS = ("gymfast_timeout_s", "gymfast_flat_buckets")
"""What the file of --custom-config-path may set."""


def check_values(args: Any) -> None:
    """Raises ValueError for a value of an option that makes no sense."""
    flat = getattr(args, "gymfast_flat_buckets", None)
    if flat not in (None, True, False):
        raise ValueError(f"gymfast_flat_buckets is {flat!r}, expected true or false, or nothing")


def derive_broadcast_updater(base: Any) -> type:
    """A class with the interface of slime's, derived from it: gathering and conversion are its."""
    import ray
    import torch
    import torch.distributed as dist
    from slime.utils.distributed_utils import get_gloo_group

    mpu = importlib.import_module("megatron.core").mpu

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=get_gloo_group())
        return values

    class GymfastBroadcast(base):  # type: ignore[misc]
        """slime's distributed updater with the sending side of gymfast."""

        weight_version: int

        def __init__(self, args: Any, model: Any, weights_getter: Any, **options: Any) -> None:
            super().__init__(args, model, weights_getter, **options)
            config = self.quantization_config or {}
            trainer = Trainer(
                passes=lambda: (self._iter_non_expert_chunks(), self._iter_expert_chunks()),
                on_chunk=self._on_chunk,
                is_packed=config.get("quant_method") == "compressed-tensors",
                timeout_s=_timeout_s(args),
            )
            self._sync = BucketSync(Ranks(dist.get_rank(), gather), trainer, ray)

        def connect_rollout_engines(
            self,
            rollout_engines: Sequence[Any],
            rollout_engine_lock: Any,
            engine_gpu_counts: Sequence[int] | None = None,
            engine_gpu_offsets: Sequence[int] | None = None,  # noqa: ARG002 - of slime
            engine_parallel_configs: Sequence[Any] | None = None,  # noqa: ARG002 - of slime
        ) -> None:
            """Makes the groups, one pipeline stage after the other."""
            self.rollout_engines, self.rollout_engine_lock = rollout_engines, rollout_engine_lock
            self._is_pp_src_rank = (
                mpu.get_data_parallel_rank(with_context_parallel=True) == 0
                and mpu.get_tensor_model_parallel_rank() == 0
            )
            link = None
            if self._is_pp_src_rank:
                self._group_name = f"slime-pp_{mpu.get_pipeline_model_parallel_rank()}"
                one = [self.args.rollout_num_gpus_per_engine]
                link = EngineLink(
                    EngineGroup(self._group_name, rollout_engines, rollout_engine_lock, ray),
                    gpu_counts=engine_gpu_counts or one * len(rollout_engines),
                    is_flat=getattr(self.args, "gymfast_flat_buckets", None),
                )
            self._sync.connect(rollout_engines, link)

        def disconnect_rollout_engines(self) -> None:
            """Leaves the groups; engines that do not answer are left to their own time-out."""
            self._sync.disconnect()

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def update_weights(self) -> None:
            """The next version on all engines, or an error on all ranks; engines generate again."""
            self._sync.update(self.weight_version + 1)
            self.weight_version += 1
            self.update_weight_metrics = self._sync.metrics()

    return GymfastBroadcast


def _timeout_s(args: Any) -> Any:
    """Seconds that a bucket may take: the option, or slime's --distributed-timeout-minutes."""
    given = getattr(args, "gymfast_timeout_s", None)
    return 60 * args.distributed_timeout_minutes if given is None else given
