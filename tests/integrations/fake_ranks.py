"""The ranks of a fake engine: a process each, with our real adapter around its share of a model."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations import sglang_stand_in, vllm_stand_in
from integrations.fake_model import ARENA_BYTES, FakeModel, Graph, checkpoint, digests
from integrations.sglang_stand_in import SchedulerWeightUpdaterManager, WeightUpdater
from safetensors.torch import load_file

from gymfast.integrations.sglang_plugin import begin_awake
from gymfast.stores.filesystem import FileStore


class Rank:
    """What every engine does; `read_damage` flips a bit of all that this rank reads of a store."""

    def __init__(self, rank: int, num_ranks: int, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.model = FakeModel(rank, num_ranks, packs=options.get("packs", True))
        self.model.load_weights(checkpoint(options.get("base", 0)).items())
        self.model.pack()
        self.model.loads.clear()
        self.graph = Graph(self.model)

    def run(self) -> str:
        """A digest of the weights that a request was computed with."""
        self.model()
        self.model.compute_logits(None)
        return self.graph.replay()

    def see(self) -> dict[str, Any]:
        seen = {
            "digests": digests(self.model),
            "places": {n: p.data_ptr() for n, p in self.model.named_parameters()},
            "loads": list(self.model.loads),
            "resident_pages": _resident_pages(),
            "num_files": len(list(Path("/proc/self/fd").iterdir())),
        }
        self.model.loads.clear()
        return seen

    def set(self, *, fails_at: Any = None, read_damage: bool = False, gather: int = 0) -> None:
        """`gather`: number of the gather, from 1, that fails."""
        self.model.fails_at = fails_at and tuple(fails_at)
        self.model.loads.clear()
        _patches.undo()
        if read_damage:
            for name in ("get", "get_range"):
                _patches.setattr(FileStore, name, _damaged(getattr(FileStore, name)))
        if gather:
            original = torch.distributed.all_gather_object
            _patches.setattr(torch.distributed, "all_gather_object", _failing(gather, original))

    def load_checkpoint(self, folder: str) -> None:
        """A dense load into the live model."""
        self.model.restore()
        for file in sorted(Path(folder).glob("*.safetensors")):
            self.model.load_weights(load_file(file).items())
        self.model.pack()

    def sleep(self, level: int) -> None:
        self.model.arena.sleep(level)

    def wake_up(self) -> None:
        self.model.arena.wake_up()


class VllmRank(Rank):
    """A worker of vLLM: its calls between a trainer's start and finish."""

    def __init__(self, rank: int, num_ranks: int, options: dict[str, Any], folder: str) -> None:
        super().__init__(rank, num_ranks, options)
        version = vllm_stand_in.Engine32, "0.32.0"
        patch = pytest.MonkeyPatch()
        vllm_stand_in.install(patch, *version)
        vllm_stand_in.join(patch, num_ranks, lambda: rank, _group(rank, num_ranks, folder))
        from gymfast.integrations.vllm import GymfastEngine

        arguments = vllm_stand_in.engine_arguments(version[0], self.model, num_ranks)
        self.engine = GymfastEngine(*arguments)
        self.is_active = False
        arena = self.model.arena
        self._allocation = vllm_stand_in.allocate(arena.address, ARENA_BYTES)

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self._allocation.is_asleep = True

    def wake_up(self) -> None:
        super().wake_up()
        self._allocation.is_asleep = False

    def init_transfer(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start(self) -> None:
        if self.is_active:
            text = "start_weight_update called while a weight update is already active"
            raise RuntimeError(f"{text}. Call finish_weight_update first.")
        self.engine.start_weight_update()
        self.is_active = True

    def update(self, info: dict[str, Any]) -> None:
        if not self.is_active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.engine.update_weights(info)
        except BaseException:
            self.is_active = False
            self.engine.reset_weight_update_target()
            raise

    def finish(self) -> None:
        if not self.is_active:
            raise RuntimeError("finish_weight_update called without start_weight_update")
        self.engine.finish_weight_update()
        self.engine.reset_weight_update_target()
        self.is_active = False


class SglangRank(Rank):
    """A scheduler of SGLang; `update` ends it when the loader raises, as in the real one."""

    def __init__(self, rank: int, num_ranks: int, options: dict[str, Any], folder: str) -> None:
        super().__init__(rank, num_ranks, options)
        group = _group(rank, num_ranks, folder)
        sys.modules.update(sglang_stand_in.install_sglang(num_ranks, group))
        loaders = ["gymfast.integrations.sglang.load"]
        updater = WeightUpdater(self.model, loaders)
        self.draft = FakeModel(rank, num_ranks)
        self.draft.load_weights(checkpoint(options.get("base", 0)).items())
        self._draft_updater = WeightUpdater(self.draft, loaders)
        self.manager = SchedulerWeightUpdaterManager(updater, sglang_stand_in.Scheduler())

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.manager.offload_tags.add("weights")

    def wake_up(self) -> None:
        super().wake_up()
        self.manager.offload_tags.discard("weights")

    def see(self) -> dict[str, Any]:
        return {**super().see(), "draft": digests(self.draft)}

    def begin(self) -> tuple[bool, str]:
        begin = type(self.manager).begin_weight_update
        output = begin_awake(begin, self.manager, SimpleNamespace(selector="target"))
        if output.success:
            self.model.restore()
        return output.success, output.message

    def update(self, body: dict[str, Any], payload: bytes) -> tuple[bool, str]:
        body = {**body, "serialized_named_tensors": [payload], "flush_cache": False}
        try:
            with torch.inference_mode():
                output = self.manager.update_weights_from_tensor(SimpleNamespace(**body))
                if body.get("selector", "all") != "target":
                    named = sglang_stand_in.deserialize(payload)
                    self._draft_updater.update_weights_from_tensor(named, body["load_format"])
        except Exception as error:  # noqa: BLE001 - the server dies of it
            sys.stderr.write(f"the engine dies: {error!r}\n")
            os._exit(1)
        return output.success, output.message

    def end(self) -> tuple[bool, str]:
        output = self.manager.end_weight_update(SimpleNamespace())
        if output.success:
            self.model.pack()
        return output.success, output.message

    def weights(self, name: str, size: int) -> Any:
        return self.model.get_weights_by_name(name, size, tp_size=1)


class RankError(Exception):
    """What a rank raised."""


class Ranks:
    """All ranks from the front end; EOFError if one is gone."""

    def __init__(self, kind: type[Rank], options: dict[str, Any], folder: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        num_ranks = options.get("num_ranks", 1)
        for rank in range(num_ranks):
            here, there = context.Pipe()
            self._pipes.append(here)
            arguments = (there, self._pipes, lambda r=rank: kind(r, num_ranks, options, folder))
            process = context.Process(target=_serve, args=arguments)
            process.start()
            there.close()
            self._processes.append(process)
        self.call("model_is_there")

    def __len__(self) -> int:
        return len(self._pipes)

    def call(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """What each rank answers. Raises RankError with the words of the first that failed."""
        return self.call_each(method, [arguments] * len(self), **options)

    def call_each(self, method: str, arguments: list[tuple[Any, ...]], **options: Any) -> list[Any]:
        """The same, with arguments for each rank."""
        for pipe, own in zip(self._pipes, arguments, strict=True):
            pipe.send((method, own, options))
        answers = [pipe.recv() for pipe in self._pipes]
        for is_value, answer in answers:
            if not is_value:
                raise RankError(answer)
        return [answer for _, answer in answers]

    def call_only(self, rank: int, method: str, **options: Any) -> None:
        """Has one rank do something. Raises RankError."""
        self._pipes[rank].send((method, (), options))
        is_value, answer = self._pipes[rank].recv()
        if not is_value:
            raise RankError(answer)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


_patches = pytest.MonkeyPatch()


def _serve(pipe: Connection, others: list[Connection], make: Callable[[], Rank]) -> None:
    for other in others:
        other.close()
    rank = make()
    with suppress(EOFError):  # the front end is gone
        while True:
            method, arguments, options = pipe.recv()
            try:
                if method == "model_is_there":
                    answer = (True, None)
                else:
                    answer = (True, getattr(rank, method)(*arguments, **options))
            except Exception as error:  # noqa: BLE001 - it goes to the front end
                answer = (False, f"{type(error).__name__}: {error}")
            pipe.send(answer)


def _group(rank: int, num_ranks: int, folder: str) -> Any:
    """The group of all ranks; None if there is only one."""
    if num_ranks == 1:
        return None
    store = torch.distributed.FileStore(f"{folder}/store", num_ranks)
    join = {"rank": rank, "world_size": num_ranks}
    torch.distributed.init_process_group("gloo", store=store, **join)
    return torch.distributed.group.WORLD


def _damaged(read: Callable[..., bytes]) -> Callable[..., bytes]:
    def damaged(*arguments: Any, **options: Any) -> bytes:
        data = bytearray(read(*arguments, **options))
        data[len(data) // 2] ^= 1
        return bytes(data)

    return damaged


def _failing(number: int, call: Callable[..., None]) -> Callable[..., None]:
    calls = []

    def failing(*arguments: Any, **options: Any) -> None:
        calls.append(None)
        if len(calls) == number:
            raise RuntimeError("injected: the gather failed")
        call(*arguments, **options)

    return failing


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
