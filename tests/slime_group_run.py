"""One rank of a scripted run of slime's distributed updater, or of gymfast's in its place.

python slime_group_run.py SCRIPT.json RANK
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import slime_stubs
import torch
import torch.distributed as dist
from slime_group_engine import digest
from slime_stubs import Method, Place

TESTS = Path(__file__).parent
FIRST = {
    "embedding.weight": (torch.bfloat16, (300, 120)),  # more bytes than the buffer has
    "decoder.layers.0.flags": (torch.uint8, (7,)),
    "decoder.layers.0.norm": (torch.bfloat16, (33,)),
    "decoder.layers.0.bias": (torch.float32, (5,)),
    "decoder.layers.0.linear": (torch.bfloat16, (128, 64)),
    "decoder.layers.0.mlp.experts.linear_fc1.weight0": (torch.bfloat16, (64, 32)),
    "decoder.layers.0.mlp.experts.linear_fc1.weight1": (torch.uint8, (3, 11)),
}
LAST = {
    "decoder.layers.1.scale": (torch.float32, ()),
    "decoder.layers.1.empty": (torch.bfloat16, (0, 4)),
    "decoder.layers.1.packed": (torch.uint8, (257,)),
    "decoder.layers.1.linear": (torch.bfloat16, (128, 64)),
    "decoder.layers.1.mlp.experts.linear_fc1.weight0": (torch.float32, (31,)),
    "output.double": (torch.float64, (9,)),
}
TENSORS = FIRST | LAST
BUFFER_BYTES = 30_000
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLACES = {
    1: [Place(0, 0)],
    2: [Place(0, 0), Place(1, 0)],
    3: [Place(0, 0), Place(1, 0), Place(1, 1)],
}
_log = logging.getLogger("run")


@dataclass
class Script:
    """A run: where the source of slime is, who updates, what stages hold, and the steps."""

    folder: Path
    source: Path | None
    is_gymfast: bool
    steps: list[tuple[Any, ...]]
    engines: dict[str, str]  # names to addresses
    stages: list[list[str]] = field(default_factory=lambda: [list(TENSORS)])
    num_ranks: int = 1
    options: dict[str, Any] = field(default_factory=lambda: {"gymfast_timeout_s": 20})
    quantization: dict[str, Any] | None = None
    sizes: list[int] = field(default_factory=list)  # elements of other tensors instead
    buffer_bytes: int = BUFFER_BYTES
    framework: str = "slime"
    is_lora: bool = False


def weights_at(step: int) -> dict[str, torch.Tensor]:
    """All tensors after some training steps."""
    weights = {}
    for number, (name, (dtype, shape)) in enumerate(TENSORS.items()):
        values = np.random.default_rng([number, step]).integers(1, 250, shape)
        weights[name] = torch.from_numpy(np.asarray(values)).to(dtype)
    return weights


def truth(step: int) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in weights_at(step).items()}


@contextmanager
def engines(names: str, source: Path | None) -> Iterator[dict[str, str]]:
    """Engines in processes of their own: the addresses of those with these one-letter names."""
    command = [sys.executable, "-P", str(TESTS / "slime_group_engine.py"), str(source or "")]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in names]
    try:
        ports = [int(process.stdout.readline()) for process in processes]
        yield {n: f"127.0.0.1:{port}" for n, port in zip(names, ports, strict=True)}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ask(address: str, path: str, fields: dict[str, Any]) -> Any:
    """What an engine answers; raises as slime's handle does."""
    connection = HTTPConnection(address)
    try:
        connection.request("POST", f"/{path}", json.dumps(fields))
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise HTTPError(f"{response.status} for http://{address}/{path}: {text}")
        return json.loads(text)
    finally:
        connection.close()


class HTTPError(Exception):
    """Named as that of `requests`."""


class Handle:
    """The methods of slime's SGLangEngine that an update calls, in their signatures."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get_url(self):
        return f"http://{self._address}"

    def flush_cache(self):
        ask(self._address, "flush_cache", {})

    def pause_generation(self):
        ask(self._address, "pause_generation", {})

    def continue_generation(self):
        ask(self._address, "continue_generation", {})

    def init_weights_update_group(
        self, master_address, master_port, rank_offset, world_size, group_name, backend
    ):
        fields = locals()
        del fields["self"]
        return ask(self._address, "init_weights_update_group", fields)

    def destroy_weights_update_group(self, group_name):
        try:
            return ask(self._address, "destroy_weights_update_group", {"group_name": group_name})
        except (OSError, HTTPError):
            return None

    def update_weights_from_distributed(
        self,
        names,
        dtypes,
        shapes,
        group_name,
        flush_cache=False,
        weight_version=None,
        load_format=None,
    ):
        fields = {
            "names": names,
            "dtypes": [str(dtype).replace("torch.", "") for dtype in dtypes],
            "shapes": shapes,
            "group_name": group_name,
            "flush_cache": flush_cache,
        }
        if weight_version is not None:
            fields["weight_version"] = weight_version
        if load_format is not None:
            fields["load_format"] = load_format
        return ask(self._address, "update_weights_from_distributed", fields)

    def post_process_weights(
        self, restore_weights_before_load=False, post_process_quantization=False
    ):
        fields = locals()
        del fields["self"]
        return ask(self._address, "post_process_weights", fields)


class MilesHandle(Handle):
    """Those of miles's SGLangEngine that are others."""

    def get_topology_info(self):
        return {"url": self.get_url()}

    def pause_generation(self, mode="retract"):
        ask(self._address, "pause_generation", {"mode": mode})

    def begin_weight_update(self, selector="all"):
        return self._make_request("begin_weight_update", {"selector": selector})

    def end_weight_update(self):
        return self._make_request("end_weight_update", {})

    def update_weight_version(self, weight_version):
        return self._make_request("update_weight_version", {"new_version": weight_version})

    def update_weights_from_distributed(
        self,
        names,
        dtypes,
        shapes,
        group_name,
        flush_cache=False,
        weight_version=None,
        selector="all",
    ):
        fields = {
            "names": names,
            "dtypes": [str(dtype).replace("torch.", "") for dtype in dtypes],
            "shapes": shapes,
            "group_name": group_name,
            "flush_cache": flush_cache,
            "selector": selector,
        }
        if weight_version is not None:
            fields["weight_version"] = weight_version
        return self._make_request("update_weights_from_distributed", fields)

    def _make_request(self, endpoint, payload=None):
        return ask(self._address, endpoint, payload or {})


class Actor:
    """A handle as Ray has it: calls go one after the other, in a process that is not ours."""

    def __init__(self, handle: Handle) -> None:
        self._handle, self._thread = handle, ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._handle, name)
        remote = type(
            "Remote", (), {"remote": lambda _, *a, **k: self._thread.submit(method, *a, **k)}
        )
        return remote()


class Lock:
    """slime's lock on the engines, for ranks without Ray: a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.acquire, self.release = Method(self._acquire), Method(folder.rmdir)

    def _acquire(self) -> bool:
        try:
            self._folder.mkdir()
        except FileExistsError:
            return False
        return True


class Chunk:
    config = None

    def __init__(self, names: list[str], sizes: list[int]) -> None:
        start = weights_at(0)
        tensors = {name: start[name].clone() for name in names}
        if sizes:
            tensors = {str(n): torch.ones(size).bfloat16() for n, size in enumerate(sizes)}
        self.parameters = {
            name: torch.nn.Parameter(tensor, requires_grad=False)
            for name, tensor in tensors.items()
        }
        for parameter in self.parameters.values():
            parameter.tensor_model_parallel = False

    def named_parameters(self) -> Any:
        return [(f"module.module.{name}", p) for name, p in self.parameters.items()]

    def named_buffers(self) -> Any:
        return []


class Run:
    def __init__(self, script: Script, rank: int) -> None:
        self.script, self.rank = script, rank
        place = PLACES[script.num_ranks][rank]
        framework = script.framework
        slime_stubs.install(framework, script.source or slime_stubs.STAND_IN, place)
        self.chunk = Chunk(script.stages[place.stage], script.sizes)
        kind = Handle if framework == "slime" else MilesHandle
        self.actors = {name: Actor(kind(address)) for name, address in script.engines.items()}
        self.notes: list[dict[str, Any]] = []
        self.connected: list[str] = []
        importlib.import_module(f"{framework}.utils.distributed_utils").init_gloo_group()
        self.args = Namespace(
            update_weight_mode="full",
            update_weight_transport="nccl",
            colocate=False,
            q_lora_rank=None,
            update_weight_buffer_size=script.buffer_bytes,
            num_experts=2,
            rollout_num_gpus_per_engine=1,
            distributed_timeout_minutes=10,
            update_weight_transfer_mode="broadcast",
            **{"pause_generation_mode": "retract"} | script.options,
        )
        if script.is_gymfast:
            importlib.import_module(f"gymfast.integrations.{framework}").install(self.args)
        # As the actor does: the class is looked up in its module only now.
        actor = importlib.import_module(f"{framework}.backends.megatron_utils.actor")
        self.updater = actor.pick(self.args)(
            *(self.args, [self.chunk], dict),
            model_name="test",
            quantization_config=script.quantization,
            **({} if framework == "slime" else {"is_lora": script.is_lora}),
        )

    def connect(self, names: str) -> None:
        self.connected = list(names)
        handles = [self.actors[name] for name in names]
        lock = Lock(self.script.folder / "lock")
        turns = [self.rank] if self.script.is_gymfast else range(self.script.num_ranks)
        with self._noted(is_quiet=True):
            for turn in turns:  # slime's own could wait for ever if all stages came at once
                if turn == self.rank:
                    self.updater.connect_rollout_engines(handles, lock)
                if not self.script.is_gymfast:
                    dist.barrier()

    def train(self, step: int) -> None:
        for name, tensor in weights_at(step).items():
            if name in self.chunk.parameters:
                self.chunk.parameters[name].data.copy_(tensor)

    def fail(self, engine: str, path: str, how: str, after: int) -> None:
        if self.rank == 0:
            failure = {"path": path, "how": how, "after": after}
            ask(self.script.engines[engine], "test", {"failures": [failure]})

    def tell(self, engine: str, version: str) -> None:
        """The version of SGLang that an engine says it is."""
        self.set(engine, {"server_version": version})

    def set(self, engine: str, fields: dict[str, Any]) -> None:
        """What an engine is from here on."""
        if self.rank == 0:
            ask(self.script.engines[engine], "test", fields)
        dist.barrier()

    def change(self, share: float, seed: int) -> None:
        """A step that changes some elements of each tensor by one step of their type."""
        for number, parameter in enumerate(self.chunk.parameters.values()):
            values = np.random.default_rng([seed, number]).random(parameter.shape)
            bits = parameter.data.view(BITS[parameter.dtype.itemsize])
            bits += torch.from_numpy(np.asarray(values < share)).to(bits.dtype)

    def _truth(self) -> dict[str, str]:
        """What the engines should hold, of all ranks; all take part."""
        own = {name: digest(p.data) for name, p in self.chunk.parameters.items()}
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, own)
        return {name: one for row in rows for name, one in row.items()}

    def break_gathering(self, rank: int) -> None:
        """The first look at the parameters of this rank fails."""
        named = self.chunk.named_parameters

        def refuse() -> Any:
            self.chunk.named_parameters = named
            raise MemoryError("no room for a chunk")

        if self.rank == rank:
            self.chunk.named_parameters = refuse

    def sync(self) -> None:
        if self.rank == 0:
            for name in self.connected:
                self._see(name)
        with self._noted(is_quiet=False):
            self.updater.update_weights()

    @contextmanager
    def _noted(self, *, is_quiet: bool) -> Iterator[None]:
        dist.barrier()
        start_s, error = time.monotonic(), None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - the test asks for it
            _log.exception("step %d", len(self.notes))
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.monotonic() - start_s
        dist.barrier()
        if error is None and is_quiet:
            return
        note = {"error": error, "seconds": seconds, "version": self.updater.weight_version}
        note["metrics"] = self.updater.pop_metrics()
        note["truth"] = self._truth()
        if self.rank == 0:
            note["engines"] = {name: self._see(name) for name in self.connected}
        self.notes.append(note)

    def _see(self, name: str) -> dict[str, Any] | None:
        try:
            return ask(self.script.engines[name], "test", {})
        except OSError:
            return None  # it is gone


def run(script: Script) -> list[list[dict[str, Any]]]:
    """Runs all ranks in processes of their own; what each noted at every update."""
    script.folder.mkdir(parents=True, exist_ok=True)
    path = script.folder / "script.json"
    path.write_text(json.dumps(dataclasses.asdict(script), default=str))
    command = [sys.executable, "-P", __file__, str(path)]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    logs = [script.folder / f"rank{rank}.log" for rank in range(script.num_ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            processes.append(
                subprocess.Popen([*command, str(rank)], env=environment, stdout=out, stderr=out)
            )
    try:
        codes = [process.wait(timeout=90) for process in processes]
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


def main(path: str, rank: int) -> None:
    logging.basicConfig(level=logging.INFO)
    fields = json.loads(Path(path).read_text())
    fields["folder"] = Path(fields["folder"])
    fields["source"] = Path(fields["source"]) if fields["source"] else None
    script = Script(**fields)
    meeting = f"file://{script.folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=script.num_ranks)
    one = Run(script, rank)
    for step, *arguments in script.steps:
        getattr(one, step)(*arguments)
    (script.folder / f"rank{rank}.json").write_text(json.dumps(one.notes))
    dist.barrier()
    os._exit(0)  # calls to engines that never answer would be waited for


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
