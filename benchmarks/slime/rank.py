"""One trainer rank with slime's updater or ours: an update for each line that it reads.

python -m benchmarks.slime.rank JOB.json, with tests/ on the path: the stubs of ray and megatron
are those of the tests. Each update is a line of JSON with its seconds.
"""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import slime_stubs
import torch
import torch.distributed as dist
from slime_run import MODULES, Chunk

from benchmarks.slime.job import Job
from benchmarks.slime.model import change, digest_of, read_checkpoint
from gymfast.integrations import slime
from gymfast.integrations.engine_http import EngineHttp

METHODS = (
    *("pull_weights", "pause_generation", "flush_cache", "update_weights_from_disk"),
    *("continue_generation", "get_url"),
)


@dataclass
class Call:
    """As slime_stubs.Call, for a call that may not be over yet."""

    future: Future[Any]

    @property
    def error(self) -> BaseException | None:
        return self.future.exception()

    @property
    def value(self) -> Any:
        return self.future.result()


@dataclass
class Engine:
    """A server in a process of its own, and when its methods were called and answered."""

    job: Job
    times: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.slime.server"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.http = EngineHttp(url, api_key=None, timeout_s=600)
        info = {} if self.job.has_loader else {"custom_weight_loader": None}
        folder = Path(self.job.folder)
        options = {"slime_source": self.job.source, "info": info}
        self.http.require("/reset", options | {"model_path": str(folder / "base")})
        self._pool = ThreadPoolExecutor(4)
        methods = {name: slime_stubs.Method(self._method(name)) for name in METHODS}
        self.handle = type("Handle", (), methods)()
        for method in methods.values():
            method.remote = self._started(method.function)

    def _started(self, function: Callable[..., Any]) -> Callable[..., Call]:
        return lambda *args, **kwargs: Call(self._pool.submit(function, *args, **kwargs))

    def _method(self, name: str) -> Callable[..., Any]:
        def call(target_version: int | None = None, **fields: Any) -> Any:
            if name == "get_url":
                return self.http.url
            if name == "pull_weights":
                fields["target_version"] = target_version
                fields["local_checkpoint_dir"] = str(Path(self.job.folder) / "local")
                fields["source_dir"] = str(Path(self.job.folder) / "versions")
            start_s = time.perf_counter()
            answer = self.http.require(f"/{name}", fields)
            self.times[name] = start_s, time.perf_counter()
            return answer

        return call


def run(job: Job) -> None:
    """Answers lines until there are no more."""
    torch.set_num_threads(1)
    folder = Path(job.folder)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    slime_stubs.install("slime", Path(job.source), slime_stubs.Place(0, 0))
    weights = read_checkpoint(folder / "base")
    chunk = Chunk([])
    chunk.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
    for parameter in chunk.parameters.values():
        parameter.tensor_model_parallel = False
    weights = {name: parameter.data for name, parameter in chunk.parameters.items()}
    engine = Engine(job)
    try:
        updater = _updater(job, chunk)
        updater.connect_rollout_engines([engine.handle], None, engine_gpu_counts=[1])
        updater.update_weights()
        for step, _ in enumerate(sys.stdin):
            change(weights, job.density, job.where, step)
            start_s = time.perf_counter()
            updater.update_weights()
            row = _seconds(engine.times, start_s, time.perf_counter())
            seen = engine.http.require("/digest", {})
            assert seen["digest"] == digest_of(weights.items()), "the engine serves other weights"
            row["num_loaded"] = seen["loads"][-1]
            row["wire_bytes"] = updater.pop_metrics()["perf/update_weights_wire_bytes"]
            print(json.dumps(row), flush=True)
    finally:
        engine.process.kill()


def _updater(job: Job, chunk: Any) -> Any:
    importlib.import_module("slime.utils.distributed_utils").init_gloo_group()
    folder = Path(job.folder)
    args = Namespace(
        update_weight_mode="delta",
        update_weight_transport="disk",
        update_weight_disk_dir=str(folder / "versions"),
        update_weight_local_checkpoint_dir=str(folder / "local"),
        update_weight_delta_encoding="xor",
        update_weight_delta_checksum="xxh3-128",
        update_weight_buffer_size=512 << 20,
        custom_update_weight_post_write_path=None,
        hf_checkpoint=str(folder / "base"),
        num_experts=None,
        q_lora_rank=None,
    )
    if job.is_gymfast:
        slime.install(args)
    updaters = importlib.import_module(MODULES["slime"])
    updater = updaters.UpdateWeightFromDiskDelta(
        args, [chunk], dict, model_name="benchmark", quantization_config=None
    )
    updater.weight_version = 0
    return updater


def _seconds(
    times: dict[str, tuple[float, float]], start_s: float, end_s: float
) -> dict[str, float]:
    """Of one update, by what the engine saw of it."""
    pull, pause, resume = (
        times[name] for name in ("pull_weights", "pause_generation", "continue_generation")
    )
    return {
        "encode": pull[0] - start_s,
        "pull": pull[1] - pull[0],
        "pause": resume[1] - pause[0],
        "total": end_s - start_s,
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    run(Job(**json.loads(Path(sys.argv[1]).read_text())))
