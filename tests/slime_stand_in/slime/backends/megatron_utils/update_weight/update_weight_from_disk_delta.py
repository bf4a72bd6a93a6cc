"""A delta updater with the signatures of slime's, and the least that one can do behind them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import ray
import torch
import torch.distributed as dist
import xxhash
import zstandard
from megatron.core import mpu
from safetensors import numpy, safe_open

from slime.utils.distributed_utils import get_gloo_group
from slime.utils.misc import load_function


class UpdateWeightFromDiskDelta:
    def __init__(self, args, model, weights_getter, *, model_name, quantization_config):
        self.args, self.model = args, model
        self.weight_version = 0
        self.update_weight_metrics = {}
        self._snapshot = {}
        self._hook = load_function(args.custom_update_weight_post_write_path)

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
        self.rollout_engines = rollout_engines
        self._is_source = mpu.get_data_parallel_rank(with_context_parallel=True) == 0

    def disconnect_rollout_engines(self):
        pass

    @torch.no_grad()
    def update_weights(self):
        if not self._snapshot:
            self._start()
            return
        self.weight_version += 1
        path = Path(self.args.update_weight_disk_dir) / f"weight_v{self.weight_version:06d}"
        path.mkdir(parents=True, exist_ok=True)
        stored, digests, sizes = {}, {}, [0, 0]
        for name, tensor in self._iter_hf_tensors():
            new = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
            old = self._snapshot.get(name, new)
            sizes[0] += int(np.count_nonzero(old != new))
            sizes[1] += new.size
            if not np.array_equal(old, new):
                frame = zstandard.compress(old ^ new, 1)
                stored[name] = np.frombuffer(frame, np.uint8)
                digests[name] = xxhash.xxh3_128(new).hexdigest()
                self._snapshot[name] = new
        rows = self._gather((sizes, list(stored)))
        files = [rank for rank, (_, names) in enumerate(rows) if names]
        file_of = {r: f"model-{i:05d}-of-{len(files):05d}.safetensors" for i, r in enumerate(files)}
        if stored:
            numpy.save_file(stored, path / file_of[dist.get_rank()], digests)
        if dist.get_rank() == 0:
            weight_map = {name: file_of[r] for r in files for name in rows[r][1]}
            self._write_index(path, weight_map)
        dist.barrier()
        self._hook(self.args, str(path), list(self.rollout_engines))
        dist.barrier()
        if dist.get_rank() == 0:
            self._reload()
        changed, total = (sum(sizes[i] for sizes, _ in rows) for i in range(2))
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        self.update_weight_metrics["perf/update_weights_density"] = changed / max(total, 1)
        self.update_weight_metrics["perf/update_weights_wire_bytes"] = num_bytes

    def _iter_hf_tensors(self):
        for chunk in self.model if self._is_source else []:
            for name, parameter in chunk.named_parameters():
                yield name.removeprefix("module.module."), parameter.data
        dist.barrier(group=get_gloo_group())

    def _start(self):
        if dist.get_rank() == 0:
            shutil.rmtree(self.args.update_weight_disk_dir, ignore_errors=True)
            self._hook(self.args, self.args.update_weight_disk_dir, list(self.rollout_engines))
            self._ask("pull_weights", target_version=0)
        with safe_open(Path(self.args.hf_checkpoint) / "model.safetensors", "torch") as base:
            for name in base.keys():  # noqa: SIM118 - it is no mapping
                tensor = base.get_tensor(name).reshape(-1).view(torch.uint8)
                self._snapshot[name] = tensor.numpy().copy()
        dist.barrier()

    def _write_index(self, path, weight_map):
        metadata = {
            "version": f"{self.weight_version:06d}",
            "base_version": f"{self.weight_version - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        index = {"metadata": metadata, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    def _reload(self):
        self._ask("pull_weights", self.weight_version)
        self._ask("pause_generation")
        self._ask("flush_cache")
        self._ask(
            "update_weights_from_disk",
            model_path=self.args.update_weight_local_checkpoint_dir,
            weight_version=str(self.weight_version),
        )
        self._ask("continue_generation")

    def _ask(self, method, *args, **kwargs):
        ray.get([getattr(e, method).remote(*args, **kwargs) for e in self.rollout_engines])

    def _gather(self, value):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=get_gloo_group())
        return values
