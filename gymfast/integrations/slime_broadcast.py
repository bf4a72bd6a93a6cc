"""slime's updater over process groups, with flat buckets, deltas, overlap and deadlines."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from gymfast.integrations.broadcast_updater import (
    BroadcastFramework,
    derive_broadcast_updater,
    timeout_s,
    urls_of,
)
from gymfast.integrations.bucket_sync import Trainer, Walk
from gymfast.integrations.engine_loads import Address
from gymfast.integrations.flat_bucket import Bucket

_ADDRESS = Address("get_url")


def make_broadcast_updater(base: Any) -> type:
    """The updater, derived from slime's."""
    from slime.utils import accelerator
    from slime.utils.distributed_utils import get_gloo_group, init_process_group
    from slime.utils.http_utils import _wrap_ipv6

    framework = BroadcastFramework(
        gloo_group=get_gloo_group,
        address=_ADDRESS,
        trainer=_trainer,
        group_name=_group_name,
        init_process_group=init_process_group,
        backend=accelerator.weight_update_backend,
        wrap_host=_wrap_ipv6,
        call=_call,
    )
    return derive_broadcast_updater(base, framework)


def _trainer(updater: Any) -> Trainer:
    import ray

    args, config = updater.args, updater.quantization_config or {}
    is_packed = config.get("quant_method") == "compressed-tensors"
    has_delta = not is_packed and getattr(args, "gymfast_delta", None) is not False
    return Trainer(
        walks=[_walk(updater, n) for n in ("_iter_non_expert_chunks", "_iter_expert_chunks")],
        is_packed=is_packed,
        timeout_s=timeout_s(args),
        urls=(lambda: urls_of(updater, _ADDRESS, ray)) if has_delta else None,
    )


def _walk(updater: Any, name: str) -> Walk:
    def walk(take: Callable[[list[tuple[str, Any]]], None]) -> None:
        for chunk in getattr(updater, name)():
            updater._on_chunk(chunk)
            take(chunk)

    return walk


def _group_name(updater: Any) -> str | None:
    mpu = importlib.import_module("megatron.core").mpu
    updater._is_pp_src_rank = (
        mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        and mpu.get_tensor_model_parallel_rank() == 0
    )
    stage = mpu.get_pipeline_model_parallel_rank()
    return f"slime-pp_{stage}" if updater._is_pp_src_rank else None


def _call(updater: Any, handle: Any, name: str, bucket: Bucket, weight_version: str | None) -> Any:  # noqa: ARG001 - for miles
    return handle.update_weights_from_distributed.remote(
        names=bucket.names,
        dtypes=bucket.dtypes,
        shapes=bucket.shapes,
        group_name=name,
        weight_version=weight_version,
        load_format=bucket.load_format,
    )
