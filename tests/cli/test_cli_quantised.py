"""`gymfast sync` takes quantised checkpoints as it takes any checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_commands import Gymfast
from safetensors.torch import load_file, save_file

from gymfast.delta.tensors import like
from gymfast.quantised import Fp8Scheme, Int4Scheme, Quantiser
from gymfast.quantised.floats import tensor_of

RUN = ("--run", "demo")
NAME = "model.layers.0.mlp.up_proj.weight"


def checkpoint(folder: Path, quantiser: Quantiser, step: int) -> dict[str, torch.Tensor]:
    """A directory with the shards of a quantised model, as trainers save it."""
    values = np.random.default_rng(1).normal(0, 0.02, (256, 256)).astype(np.float32)
    values[step, :: step + 2] *= 1.5
    weights = {
        NAME: tensor_of(values, "BF16"),
        "model.norm.weight": tensor_of(np.ones(64, np.float32) + step, "BF16"),
    }
    parts = quantiser.quantise(weights)
    tensors = {name: like(part, torch.empty(0)) for name, part in parts.items()}
    folder.mkdir()
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for number, name in enumerate(sorted(tensors)):
        list(shards.values())[number % 2][name] = tensors[name]
    for file, part in shards.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"quantization_config": quantiser.scheme.config(["lm_head"])}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("scheme", [Int4Scheme(128, False), Fp8Scheme()], ids=["int4", "fp8"])
def test_a_directory_of_quantised_weights_is_published_and_pulled(
    scheme, tmp_path: Path, gymfast: Gymfast
) -> None:
    quantiser, expected = Quantiser(scheme), {}
    folders = [str(tmp_path / f"v{step}") for step in range(3)]
    for step, folder in enumerate(folders):
        expected = checkpoint(Path(folder), quantiser, step)
    store = str(tmp_path / "store")
    done = gymfast("sync", "publish", store, *folders, *RUN)
    assert done.code == 0 and "version 2: delta" in done.out, done
    assert gymfast("sync", "pull", store, str(tmp_path / "out"), *RUN).code == 0
    found: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(shard)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    assert gymfast("sync", "verify", store, str(tmp_path / "out"), *RUN).code == 0
