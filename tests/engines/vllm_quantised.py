"""A real vLLM server reads the INT4 checkpoints that a run carries: `make test-vllm`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from engines.vllm_process import PROMPTS
from engines.vllm_server import Server
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from gymfast.delta.tensors import like
from gymfast.quantised import Int4Scheme, Quantiser
from gymfast.sync import CheckpointTarget, Publisher, Subscriber

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder and the BF16 weights of a tiny model, large enough for tokens to differ."""
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
    base = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(base)
    found = load_file(base / "model.safetensors")
    return base, {n: w * 5 if w.dim() == 2 else w for n, w in found.items()}


def tokens(folder: Path) -> list[list[int]]:
    with Server(str(folder), folder.with_suffix(".log"), options=()) as server:
        return server.tokens(PROMPTS)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_a_pulled_int4_checkpoint_gives_the_tokens_of_its_dequantised_weights(
    weights: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, is_symmetric: bool
) -> None:
    base, first = weights
    scheme = Int4Scheme(32, is_symmetric)
    quantiser, store = Quantiser(scheme), (tmp_path / "store").as_uri()
    publisher, parts = Publisher(store, "int4"), {}
    generator = torch.Generator().manual_seed(1)
    second = {
        n: w + torch.randn(w.shape, generator=generator).to(w.dtype) * 0.05 * (w.dim() == 2)
        for n, w in first.items()
    }
    for state in (first, second):
        parts = quantiser.quantise(state)
        publisher.publish(parts)
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    with Subscriber(store, "int4", CheckpointTarget(pulled / "model.safetensors")) as reader:
        assert reader.pull().version == 1
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = scheme.config(["lm_head"])
    (pulled / "config.json").write_text(json.dumps(config))

    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(base / "config.json", plain)
    whole = {}
    for name, value in second.items():
        if quantiser.selects(name, tuple(value.shape)):
            values = scheme.dequantise(quantiser.parts_of(parts, name), name)
            whole[name] = torch.from_numpy(values).bfloat16()
        else:
            whole[name] = like(parts[name], value)
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    assert tokens(pulled) == tokens(plain)
