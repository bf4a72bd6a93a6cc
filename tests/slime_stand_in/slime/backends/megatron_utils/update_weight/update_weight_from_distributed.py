"""What gymfast takes over of slime's distributed updater: the gathering side, in its signatures.

There is no sending side: slime's own updater runs where its source is.
"""

from __future__ import annotations


class UpdateWeightFromDistributed:
    def __init__(self, args, model, weights_getter, *, model_name, quantization_config):
        self.args, self.model = args, model
        self.quantization_config = quantization_config
        self.weight_version = 0
        self.update_weight_metrics = {}

    def pop_metrics(self):
        metrics, self.update_weight_metrics = self.update_weight_metrics, {}
        return metrics

    def connect_rollout_engines(
        self,
        rollout_engines,
        rollout_engine_lock,
        engine_gpu_counts=None,
        engine_gpu_offsets=None,
        engine_parallel_configs=None,
    ):
        raise NotImplementedError

    def disconnect_rollout_engines(self):
        raise NotImplementedError

    def update_weights(self):
        raise NotImplementedError

    def _send_weights(self, pbar):
        raise NotImplementedError

    def _on_chunk(self, hf_chunk):
        pass

    def _iter_non_expert_chunks(self):
        return self._chunks(False)

    def _iter_expert_chunks(self):
        return self._chunks(True)

    def _chunks(self, are_experts):
        buffer, size = [], 0
        for chunk in self.model if self._is_pp_src_rank else []:
            for name, parameter in chunk.named_parameters():
                if (".experts." in name) != are_experts:
                    continue
                num_bytes = parameter.numel() * parameter.element_size()
                if buffer and size + num_bytes > self.args.update_weight_buffer_size:
                    yield buffer
                    buffer, size = [], 0
                buffer.append((name.removeprefix("module.module."), parameter.data))
                size += num_bytes
        if buffer:
            yield buffer
