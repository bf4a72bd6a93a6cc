"""One rank of OpenRLHF's trainer: `python -m integrations.openrlhf_rank SCRIPT RANK`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from integrations import openrlhf_stubs as stubs
from integrations import vllm_stand_in
from integrations.vllm_server import digests

SHAPES = {n: tuple(t.shape) for n, t in vllm_stand_in.checkpoint().items()}


class Flags:
    """Flags of OpenRLHF: those that are given, and something for all others."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        return MagicMock()


def make_trainer(script: dict[str, Any], model: torch.nn.Module, engines: list[Any] | None) -> Any:
    from openrlhf.trainer.ray import ppo_actor

    flags = Flags(
        actor=Flags(aux_loss_coef=0.0),
        ds=Flags(zero_stage=script["zero_stage"], tensor_parallel_size=script["tensor_parallel"]),
        vllm=Flags(sync_backend="nccl", num_engines=2, tensor_parallel_size=1),
        train=Flags(colocate_all=script["is_colocated"], async_enable=False, max_epochs=1),
    )
    actor = SimpleNamespace(model=SimpleNamespace(module=model), is_vlm=True)
    return ppo_actor.ActorPPOTrainer(
        SimpleNamespace(args=flags), actor, None, None, None, vllm_engines=engines
    )


def train(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.data[::3] += 0.5


def whole(model: torch.nn.Module, is_sharded: bool) -> dict[str, str]:
    """Digests of the whole parameters."""
    found = {}
    for name, param in model.named_parameters():
        with stubs.Gathered([param], enabled=is_sharded):
            found.update(digests([(name, param)]))
    return found


def main(script: dict[str, Any], rank: int) -> None:
    folder = Path(script["folder"])
    store = dist.FileStore(str(folder / "group"), script["num_ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=script["num_ranks"])
    stubs.install(Path(script["source"]) if script["source"] else None)
    from gymfast.integrations.openrlhf import install

    install((folder / "store").as_uri(), "run")
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    model = vllm_stand_in.PlainModel(SHAPES)
    for (name, param), value in zip(
        model.named_parameters(), vllm_stand_in.checkpoint().values(), strict=True
    ):
        param.data = value
        param.requires_grad = name != "embed.weight"  # frozen, as the vision encoder of a VLM
    is_sharded = script["zero_stage"] == 3 or script["tensor_parallel"] > 1
    if is_sharded:
        stubs.shard(model)
    handles = [RolloutRayActor.remote(num_gpus=1, shapes=SHAPES) for _ in range(2)]
    llms = [handle.actor.llm for handle in handles]
    trainer = make_trainer(script, model, handles)
    notes = []
    for step, *arguments in script["steps"]:
        if step == "train":
            train(model)
        elif step == "break":
            vars(llms[1]).update({arguments[0]: arguments[1]})
        elif step == "lose":
            del model.get_submodule("layers")._modules["1"]
        else:
            error = ""
            try:
                trainer.broadcast_to_vllm()
            except Exception as caught:  # noqa: BLE001 - a note for the test
                error = f"{type(caught).__name__}: {caught}"
            expected = whole(model, is_sharded)
            held = [digests(llm.model.named_parameters()) == expected for llm in llms]
            note = {"error": error, "held": held, "calls": [h.calls for h in handles]}
            note |= {"versions": [llm.version for llm in llms], "resets": [e.resets for e in llms]}
            notes.append(note)
            for handle in handles:
                handle.calls = []
    print(json.dumps(notes), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
