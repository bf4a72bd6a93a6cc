"""A real vLLM server that loads and unloads versions of an adapter: `make test-vllm`.

Needs `peft` too: the tokens are compared with those of a model into which PEFT merged the adapter.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.vllm_process import PROMPTS
from engines.vllm_server import Server
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

from gymfast.errors import ChainError
from gymfast.integrations.lora_adapter import LoraAdapter
from gymfast.integrations.lora_files import LoraFolder
from gymfast.integrations.lora_server import VLLMLora
from gymfast.integrations.lora_versions import LoraVersions
from gymfast.integrations.update_request import InitRequest
from gymfast.sync import Publisher

NUM_VERSIONS = 100
NUM_COMPARED = 6
pytestmark = pytest.mark.timeout(900)


class Trainer:
    """A tiny base model, a PEFT adapter on it, and the run that its versions go to."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=False,
        )
        self.base = folder / "base"
        AutoModelForCausalLM.from_config(config).save_pretrained(self.base)
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        plan = LoraConfig(r=8, lora_alpha=16, target_modules=modules)
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(self.base), plan)
        self.follow = InitRequest(store=(folder / "store").as_uri(), run="adapter")
        self._publisher = Publisher(self.follow.store, "adapter", keep=NUM_VERSIONS)

    def publish(self) -> LoraAdapter:
        """The next version: all factors are others."""
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if "lora_" in name:
                    value.copy_(torch.randn_like(value) * 0.3)
        config = self.model.peft_config["default"].to_dict()
        adapter = LoraAdapter.of_state(self.model.state_dict(), config)
        self._publisher.publish(adapter.weights())
        return adapter

    def tokens(self, path: Path) -> list[list[int]]:
        """What a model makes of the prompts into which PEFT merged the adapter of a folder."""
        base = AutoModelForCausalLM.from_pretrained(self.base)
        merged = PeftModel.from_pretrained(base, path).merge_and_unload().eval()
        found = []
        for prompt in PROMPTS:
            with torch.no_grad():
                out = merged.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=12,
                    min_new_tokens=12,
                    do_sample=False,
                    pad_token_id=0,
                )
            found.append(out[0, len(prompt) :].tolist())
        return found


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def server(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "8")
    with Server(
        str(trainer.base),
        tmp_path_factory.mktemp("log") / "server.log",
        dtype="float32",
        options=options,
        settings={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    ) as server:
        yield server


def test_R95_a_hundred_versions_are_served_and_three_are_never_exceeded(
    trainer: Trainer, server: Server, tmp_path: Path
) -> None:
    folder = LoraFolder(tmp_path, "policy", trainer.follow)
    versions = LoraVersions(VLLMLora(server.url), folder, keep=2)
    before = server.tokens(PROMPTS)
    seen: set[str] = set()
    for version in range(NUM_VERSIONS):
        trainer.publish()
        report = versions.serve(version)
        assert report.left == {}
        assert report.resident == tuple(range(max(0, version - 1), version + 1))
        if version % (NUM_VERSIONS // NUM_COMPARED) == 0 or version == NUM_VERSIONS - 1:
            found = server.tokens(PROMPTS, model=report.name)
            assert found == trainer.tokens(report.path), f"version {version}"
            assert found != before
            seen.add(json.dumps(found))
    assert len(seen) > NUM_COMPARED
    assert server.tokens(PROMPTS) == before
    assert server.tokens(PROMPTS, model="policy@v98") != server.tokens(PROMPTS, model="policy@v99")
    status, answer = server.generate(PROMPTS[0], model="policy@v1")
    assert status == 404, answer


def test_a_request_that_runs_ends_on_its_adapter(
    trainer: Trainer, server: Server, tmp_path: Path
) -> None:
    folder = LoraFolder(tmp_path, "running", trainer.follow)
    versions = LoraVersions(VLLMLora(server.url), folder, keep=2)
    first = versions.serve(NUM_VERSIONS - 1)
    expected = server.generate(PROMPTS[0], model=first.name, max_tokens=100)
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(
            server.generate(PROMPTS[0], model=first.name, max_tokens=100, cache_salt="other")
        )
    )
    thread.start()
    for _ in range(3):
        trainer.publish()
    newest = NUM_VERSIONS + 2
    for version in range(NUM_VERSIONS, newest + 1):
        versions.serve(version)
    thread.join()
    assert found[0][0] == 200 and found[0][1]["choices"] == expected[1]["choices"]


def test_what_vllm_refuses_leaves_what_it_serves(server: Server, tmp_path: Path) -> None:
    client = VLLMLora(server.url)
    held = client.resident()
    with pytest.raises(ChainError, match="No adapter found"):
        client.load("nothing@v0", str(tmp_path / "nothing"))
    name, path = next(iter(held.items()))
    with pytest.raises(ChainError, match="has already been loaded"):
        client.load(name, path)
    client.unload("never@v0")
    assert client.resident() == held


def test_same_name_is_replaced_in_place(trainer: Trainer, server: Server, tmp_path: Path) -> None:
    folder = LoraFolder(tmp_path, "stable", trainer.follow)
    versions = LoraVersions(VLLMLora(server.url), folder, same_name=True)
    newest = NUM_VERSIONS + 2
    for version in range(newest - 1, newest + 1):
        report = versions.serve(version)
        assert report.name == "stable"
        assert server.tokens(PROMPTS, model="stable") == trainer.tokens(report.path)
