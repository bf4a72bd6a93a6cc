"""What is installed in the driver reaches real Ray actors, and they sync.

OpenRLHF is the stand-in, so are DeepSpeed and vLLM around our real engine; Ray is the real one:
`pip install ray`, then `pytest tests/engines/openrlhf_ray.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

TESTS = Path(__file__).parents[1]
STAND_IN = TESTS / "integrations" / "openrlhf_stand_in"
STUB = "from integrations import openrlhf_stubs\nopenrlhf_stubs.install_{}()\n"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray with workers that find the stubs as packages."""
    for name in ("vllm", "deepspeed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(STUB.format(name))
    places = [str(place) for place in (tmp_path, STAND_IN, TESTS)]
    monkeypatch.setattr(sys, "path", [*places, *sys.path])
    path = ":".join([*places, str(TESTS.parent)])
    ray.init(num_cpus=4, runtime_env={"env_vars": {"PYTHONPATH": path}}, include_dashboard=False)
    yield
    ray.shutdown()


def make_actor() -> Any:
    """The model of a rank, in the process of that rank."""
    import torch
    from integrations.vllm_stand_in import PlainModel, checkpoint

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    weights = checkpoint()
    model = PlainModel({name: tuple(t.shape) for name, t in weights.items()})
    for name, value in weights.items():
        model.get_parameter(name).data.copy_(value)
    return SimpleNamespace(model=SimpleNamespace(module=model))


def train(actor: Any) -> None:
    for parameter in actor.trainer.actor.model.module.parameters():
        parameter.data.view(-1)[::3] += 0.5


def digests_of_trainer(actor: Any) -> dict[str, str]:
    from integrations.vllm_server import digests

    return digests(actor.trainer.actor.model.module.named_parameters())


def digests_of_engine(actor: Any) -> tuple[str, dict[str, str]]:
    from integrations.vllm_server import digests

    return actor.llm.version, digests(actor.llm.model.named_parameters())


def test_two_engines_follow_a_trainer(cluster: None, tmp_path: Path) -> None:
    from integrations.vllm_stand_in import checkpoint

    from gymfast.integrations.openrlhf import install

    install((tmp_path / "store").as_uri(), "run")
    from openrlhf.trainer.ray import ppo_actor, vllm_engine

    shapes = {name: tuple(t.shape) for name, t in checkpoint().items()}
    engines = [vllm_engine.RolloutRayActor.remote(num_gpus=0, shapes=shapes) for _ in range(2)]
    flags = SimpleNamespace(zero_stage=2, tensor_parallel_size=1)
    strategy = SimpleNamespace(args=SimpleNamespace(ds=flags))
    policy = ppo_actor.PolicyModelActor.options(num_gpus=0).remote()
    ray.get(policy.init_model_from_pretrained.remote(strategy, make_actor, vllm_engines=engines))
    for version in range(4):
        ray.get(policy.broadcast_to_vllm.remote())
        expected = (str(version), ray.get(policy.__ray_call__.remote(digests_of_trainer)))
        for engine in engines:
            assert ray.get(engine.__ray_call__.remote(digests_of_engine)) == expected
        ray.get(policy.__ray_call__.remote(train))
    ray.kill(engines[1])
    with pytest.raises(ray.exceptions.RayTaskError, match="engine 1 of 2 failed at gymfast_pull"):
        ray.get(policy.broadcast_to_vllm.remote())
    version, held = ray.get(engines[0].__ray_call__.remote(digests_of_engine))
    assert version == "4"
    assert held == ray.get(policy.__ray_call__.remote(digests_of_trainer))
