"""One rank of a scripted run of slime's or miles's delta updater, or of gymfast's in its place.

python slime_run.py SCRIPT.json RANK
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import slime_stubs
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from slime_engine import Engine, receiver_of
from slime_stubs import Place

from gymfast.integrations.slime import post_write

EXPERT = "decoder.layers.0.mlp.experts.linear_fc1.weight"
TENSORS: dict[str, tuple[int, ...]] = {
    "embedding.weight": (300, 64),
    "decoder.layers.0.norm": (64,),
    "decoder.layers.0.linear": (256, 64),
    f"{EXPERT}0": (64, 32),
    f"{EXPERT}1": (64, 32),
    "decoder.layers.1.linear": (256, 64),
    "decoder.layers.1.empty": (0, 4),
    "output.scale": (1,),
}
LAST_STAGE = ("decoder.layers.1.linear", "decoder.layers.1.empty", "output.scale")
COPIED = "embedding.weight"  # on the last stage too, where stages hold copies
MODULES = {
    "slime": "slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta",
    "miles": "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.delta",
}
PLACES = {1: [Place(0, 0)], 3: [Place(0, 0), Place(1, 0), Place(1, 1)]}
_log = logging.getLogger("run")
_hook_failures: list[str] = []
_hook_calls: list[str] = []


@dataclass
class Script:
    """A run: where the source of the framework is, who updates, and the steps."""

    folder: Path
    source: Path | None
    is_gymfast: bool
    num_ranks: int
    steps: list[tuple[Any, ...]]
    encoding: str = "xor"
    algorithm: str = "xxh3-128"
    options: dict[str, Any] = field(default_factory=dict)
    has_copies: bool = False
    has_views: bool = False  # each rank and the engines have a directory of their own, and a store
    framework: str = "slime"
    servers: list[str] = field(default_factory=list)  # engines that are servers with our loader
    base_changes: dict[str, Any] = field(default_factory=dict)  # shapes

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def versions(self) -> Path:
        return self.folder / "versions"

    def versions_of(self, rank: int) -> Path:
        return self.folder / f"view{rank}" if self.has_views else self.versions


def weights_at(step: int) -> dict[str, torch.Tensor]:
    """All tensors after some training steps; step 0 is the base, every second leaves one alone."""
    weights = {}
    for number, (name, shape) in enumerate(TENSORS.items()):
        size = int(np.prod(shape))
        values = np.random.default_rng(number).standard_normal(size).astype(np.float32)
        for one in range(1, step + 1):
            random = np.random.default_rng([number, one])
            if not (number + one) % 2:
                at = random.permutation(size)[: max(1, size // 50)]
                values[at] *= 1.02
        weights[name] = torch.from_numpy(values).to(torch.bfloat16).reshape(shape)
    return weights


def run(script: Script) -> list[list[dict[str, Any]]]:
    """Runs all ranks in processes of their own; what each noted at every update."""
    script.base.mkdir(parents=True)
    base = weights_at(0)
    for name, shape in script.base_changes.items():
        base[name] = torch.zeros(shape, dtype=torch.bfloat16)
    save_file(base, script.base / "model.safetensors")
    (script.base / "config.json").write_text("{}")
    path = script.folder / "script.json"
    path.write_text(json.dumps(dataclasses.asdict(script), default=str))
    command = [sys.executable, "-P", __file__, str(path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    if script.has_views:
        environment |= {"GYMFAST_STORE": str(script.folder / "store"), "GYMFAST_RUN": "run-1"}
    logs = [script.folder / f"rank{rank}.log" for rank in range(script.num_ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            processes.append(
                subprocess.Popen([*command, str(rank)], env=environment, stdout=out, stderr=out)
            )
    try:
        codes = [process.wait(timeout=60) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise AssertionError("\n".join(log.read_text() for log in logs)) from error
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * script.num_ranks, "\n".join(log.read_text() for log in logs)
    return [
        json.loads((script.folder / f"rank{rank}.json").read_text())
        for rank in range(script.num_ranks)
    ]


def names_of(script: Script, place: Place) -> list[str]:
    """The tensors of a rank."""
    if script.num_ranks == 1:
        return list(TENSORS)
    if place.stage == 0:
        return [name for name in TENSORS if name not in LAST_STAGE]
    return [*LAST_STAGE, *([COPIED] if script.has_copies else [])]


def hook(args: Namespace, path: str, engines: list[Any]) -> None:
    """The post-write hook of these runs; fails once when told to."""
    _hook_calls.append(Path(path).name)
    if _hook_failures:
        raise OSError(_hook_failures.pop())
    if "GYMFAST_STORE" in os.environ:
        post_write(args, path, engines)


class Chunk:
    """A model chunk as Megatron has it: names and parameters."""

    config = None

    def __init__(self, names: list[str]) -> None:
        start = weights_at(0)
        self.parameters = {name: torch.nn.Parameter(start[name].clone()) for name in names}
        for parameter in self.parameters.values():
            parameter.tensor_model_parallel = False

    def named_parameters(self) -> Any:
        return [(f"module.module.{name}", p) for name, p in self.parameters.items()]

    def named_buffers(self) -> Any:
        return []


class Run:
    """One rank; the first one has the engines."""

    def __init__(self, script: Script, rank: int) -> None:
        self.script, self.rank = script, rank
        place = PLACES[script.num_ranks][rank]
        source = script.source or slime_stubs.STAND_IN
        slime_stubs.install(script.framework, source, place)
        self.chunk = Chunk(names_of(script, place))
        self.engines: dict[str, Engine] = {}
        self.notes: list[dict[str, Any]] = []
        self.updater = self._make_updater()

    def _make_updater(self) -> Any:
        framework = self.script.framework
        importlib.import_module(f"{framework}.utils.distributed_utils").init_gloo_group()
        script = self.script
        args = Namespace(
            update_weight_mode="delta",
            update_weight_transfer_mode="disk-delta",
            pause_generation_mode="in_place",
            check_weight_update_equal=False,
            q_lora_rank=None,
            update_weight_transport="disk",
            update_weight_disk_dir=str(script.versions_of(self.rank)),
            update_weight_local_checkpoint_dir=str(script.folder / "local"),
            update_weight_delta_encoding=script.encoding,
            update_weight_delta_checksum=script.algorithm,
            update_weight_buffer_size=30_000,
            custom_update_weight_post_write_path="slime_run.hook",
            hf_checkpoint=str(script.base),
            num_experts=2,
            **script.options,
        )
        plug_in = importlib.import_module(f"gymfast.integrations.{framework}")
        self.expected = plug_in.EXPECTED
        if script.is_gymfast:
            plug_in.install(args)
        # As the actor does: the class is looked up in the module only now.
        updaters = importlib.import_module(MODULES[framework])
        options = {"is_lora": False} if framework == "miles" else {}
        updater = updaters.UpdateWeightFromDiskDelta(
            args, [self.chunk], dict, model_name="test", quantization_config=None, **options
        )
        updater.weight_version = 0
        return updater

    def signatures(self) -> None:
        methods = {name: getattr(type(self.updater), name) for name in self.expected}
        self.notes.append({n: list(inspect.signature(m).parameters) for n, m in methods.items()})

    def connect(self, *names: str) -> None:
        for name in names:
            if name not in self.engines:
                local = self.script.folder / name / "local"
                if name in self.script.servers:
                    self.engines[name] = self._start_server()
                    continue
                is_slime = self.script.framework == "slime"  # miles's receiver is not in its source
                pull = receiver_of(self.script.source if is_slime else None, self.script.has_views)
                self.engines[name] = Engine(
                    name, self.script.base, self.script.versions, local, pull
                )
        self.engines = {name: self.engines[name] for name in names}
        handles = [engine.handle for engine in self.engines.values()]
        self.updater.connect_rollout_engines(handles, None, engine_gpu_counts=[1] * len(handles))

    def _start_server(self) -> Any:
        from slime_server_engine import ServerEngine

        source = self.script.source if self.script.framework == "slime" else None
        local = self.script.folder / "local"  # as the updater names it
        return ServerEngine(self.script.base, self.script.versions, local, source)

    def break_loader(self, engine: str, num_tensors: int | None) -> None:
        self.engines[engine].break_after(num_tensors)

    def restart(self, engine: str, options: dict[str, Any]) -> None:
        self.engines[engine].restart(**options)

    def close(self) -> None:
        for name in self.script.servers:
            if name in self.engines:
                self.engines[name].server.close()

    def train(self, step: int) -> None:
        for name, tensor in weights_at(step).items():
            if name in self.chunk.parameters:
                self.chunk.parameters[name].data.copy_(tensor)

    def differ(self, rank: int, name: str) -> None:
        if self.rank == rank:
            self.chunk.parameters[name].data.view(-1)[0] += 1

    def fail(self, engine: str, method: str, how: str) -> None:
        self.engines[engine].failures.append((method, how))

    def fail_hook(self, rank: int) -> None:
        if self.rank == rank:
            _hook_failures.append("the bucket is not reachable")

    def sync(self) -> None:
        for engine in self.engines.values():
            engine.calls.clear()
        _hook_calls.clear()
        error = None
        try:
            self.updater.update_weights()
        except Exception as raised:  # noqa: BLE001 - the test asks for it
            _log.exception("update %d", len(self.notes))
            error = f"{type(raised).__name__}: {raised}"
        note = {
            "error": error,
            "version": self.updater.weight_version,
            "metrics": self.updater.pop_metrics(),
            "hook": list(_hook_calls),
        }
        if self.rank == 0:
            note["engines"] = {name: e.note() for name, e in self.engines.items()}
        self.notes.append(note)


def main(path: str, rank: int) -> None:
    logging.basicConfig(level=logging.INFO)
    fields = json.loads(Path(path).read_text())
    fields["folder"] = Path(fields["folder"])
    fields["source"] = Path(fields["source"]) if fields["source"] else None
    script = Script(**fields)
    meeting = f"file://{script.folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=script.num_ranks)
    one = Run(script, rank)
    try:
        for step, *arguments in script.steps:
            getattr(one, step)(*arguments)
    finally:
        one.close()
    (script.folder / f"rank{rank}.json").write_text(json.dumps(one.notes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # The hook is found by its import path: it and this run have to be one module.
    sys.modules["slime_run"] = sys.modules["__main__"]
    main(sys.argv[1], int(sys.argv[2]))
