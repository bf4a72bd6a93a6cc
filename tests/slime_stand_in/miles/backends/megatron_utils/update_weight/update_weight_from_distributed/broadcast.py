"""What gymfast takes over of miles's distributed updater: the gathering side, in its signatures."""

from __future__ import annotations

from megatron.core import mpu
from slime.backends.megatron_utils.update_weight import update_weight_from_distributed as slime


class UpdateWeightFromDistributed(slime.UpdateWeightFromDistributed):
    def __init__(
        self, args, model, weights_getter, *, model_name, quantization_config, is_lora=False
    ):
        options = {"model_name": model_name, "quantization_config": quantization_config}
        super().__init__(args, model, weights_getter, **options)
        self.is_lora = is_lora
        self.rollout_engines = None
        self._connection_stale = False

    def is_rollout_engines_fresh(self):
        return self.rollout_engines is not None and not self._connection_stale

    def mark_engine_connection_stale(self):
        self._connection_stale = True

    def connect_rollout_engines(
        self, rollout_engines, rollout_engine_lock, engine_gpu_counts=None, engine_gpu_offsets=None
    ):
        raise NotImplementedError

    def update_weights(self):
        raise NotImplementedError

    @property
    def _is_source(self):
        return mpu.get_data_parallel_rank(with_context_parallel=True) == 0

    _is_pp_src_rank = _is_source

    def _gather_and_update_non_expert_weights(self, update_bucket_weight_func, pbar=None):
        for chunk in self._iter_non_expert_chunks():
            update_bucket_weight_func(chunk, pbar)

    def _gather_and_update_expert_weights(self, update_bucket_weight_func, pbar=None):
        for chunk in self._iter_expert_chunks():
            update_bucket_weight_func(chunk, pbar)
