"""The stand-in of slime's updater with the signatures of miles's."""

from __future__ import annotations

from slime.backends.megatron_utils.update_weight import update_weight_from_disk_delta as slime


class UpdateWeightFromDiskDelta(slime.UpdateWeightFromDiskDelta):
    def __init__(
        self, args, model, weights_getter, *, model_name, quantization_config, is_lora=False
    ):
        assert not is_lora
        options = {"model_name": model_name, "quantization_config": quantization_config}
        super().__init__(args, model, weights_getter, **options)
        self.rollout_engines = None
        self._is_stale = False

    def is_rollout_engines_fresh(self):
        return self.rollout_engines is not None and not self._is_stale

    def mark_engine_connection_stale(self):
        self._is_stale = True

    def connect_rollout_engines(
        self, rollout_engines, rollout_engine_lock, engine_gpu_counts=None, engine_gpu_offsets=None
    ):
        super().connect_rollout_engines(rollout_engines, rollout_engine_lock)
        self._is_stale = False

    def _for_each_hf_bucket(self, bucket_func):
        bucket_func(list(self._iter_hf_tensors()), None)

    def _ask(self, method, *args, **kwargs):
        if method == "pause_generation":
            kwargs["mode"] = self.args.pause_generation_mode
        if method != "flush_cache" or self.args.pause_generation_mode != "in_place":
            super()._ask(method, *args, **kwargs)
