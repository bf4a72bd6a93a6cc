"""The real vLLM, its CPU build: `make test-engines`. Its name keeps it out of `make test`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_run import Record, Run
from safetensors.torch import load_file
from safetensors.torch import save as save_bytes
from transformers import Qwen3Config, Qwen3MoeConfig

from gymfast.delta import encode

NUM_SYNCS = 10
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Eleven versions; some change one tensor of a fused layer, one norm, or nothing."""
    config = Qwen3Config(**SIZES, intermediate_size=256, tie_word_embeddings=False)
    run = Run(tmp_path_factory.mktemp("qwen3"), config)
    few = {3: ["model.layers.1.self_attn.q_proj.weight"], 4: ["model.norm.weight"], 5: []}
    for version in range(1, NUM_SYNCS + 1):
        run.publish(few.get(version, list(run.weights)))
    return run


@pytest.fixture(scope="module")
def expected(run: Run) -> list[Record]:
    """What vLLM's own loader makes of each checkpoint; the newest in an engine that starts."""
    steps = [["look"]] + [["reload", run.checkpoint(v)] for v in range(NUM_SYNCS)]
    first, *others = run.engine("reference", NUM_SYNCS, steps)
    return [*others, first]


def same(found: Record, expected: Record) -> bool:
    assert "error" not in found, found["error"]
    return found["tokens"] == expected["tokens"] and found["weights"] == expected["weights"]


def versions(*numbers: int) -> list[list[Any]]:
    return [["update", {"version": number}] for number in numbers]


def test_after_each_of_ten_deltas_the_engine_equals_one_that_loaded_the_checkpoint(
    run: Run, expected: list[Record]
) -> None:
    found = run.engine("follower", 0, versions(*range(NUM_SYNCS + 1)), follows=run.follows)
    assert [same(f, e) for f, e in zip(found, expected, strict=True)] == [True] * (NUM_SYNCS + 1)
    assert len({str(e["tokens"]) for e in expected}) > NUM_SYNCS // 2, "the versions differ"
    assert [f["num_calls"] for f in found[:7]] == [4, 4, 4, 1, 1, 0, 4], "groups that were loaded"


def test_a_failed_update_flags_the_engine_until_a_load_of_all_heals_it(
    run: Run, expected: list[Record]
) -> None:
    steps = [
        *versions(0, 1),
        ["update", {"version": 99}],
        ["generate"],
        ["break_loader", 2, "raise"],
        *versions(2),
        ["generate"],
        ["finish"],
        ["break_loader", 0, ""],
        *versions(3),
    ]
    found = run.engine("failing", 0, steps, follows=run.follows)
    assert same(found[1], expected[1])
    assert "NotFoundError" in found[2]["error"] and "99" in found[2]["error"]
    assert found[3]["tokens"] == expected[1]["tokens"], "the old version is served"
    assert "injected" in found[5]["error"]
    for refused in (found[6], found[7]):
        assert "the weights are not to be used" in refused["error"]
        assert "injected" in refused["error"]
    assert same(found[9], expected[3])


def test_a_killed_engine_that_starts_again_catches_up_from_an_anchor(
    run: Run, expected: list[Record]
) -> None:
    steps = [*versions(0), ["break_loader", 2, "kill"], *versions(1)]
    assert len(run.engine("killed", 0, steps, follows=run.follows)) == 2
    found = run.engine("late", 0, versions(NUM_SYNCS), follows=run.follows)
    assert same(found[0], expected[NUM_SYNCS])


def test_buckets_and_frames_without_a_store(run: Run, expected: list[Record]) -> None:
    old, new = (load_file(Path(run.checkpoint(v)) / "model.safetensors") for v in (1, 2))
    names = list(old)
    lost = "model.layers.1.self_attn.k_proj.weight"
    steps = [
        bucket({name: old[name] for name in names if name != lost}),
        ["generate"],
        bucket({name: old[name] for name in names[:20]}, is_last=False),
        ["finish"],
        bucket({name: old[name] for name in names[20:]}),
        ["update", {"frame": text(encode(old, new))}],
        bucket({lost: old[lost]}),
        bucket({lost: new[lost]}),
        ["update", {"frame": text(encode(old, new))}],
    ]
    found = run.engine("buckets", 0, steps, follows={})
    assert "'model.layers.1.self_attn.qkv_proj' got" in found[0]["error"], "a partial fused group"
    assert "CoverageError" in found[0]["error"] and "qkv_proj" in found[1]["error"]
    assert "20 tensors wait for a bucket with is_last" in found[3]["error"]
    assert same(found[4], expected[1])
    assert same(found[5], expected[2])
    assert found[6]["num_calls"] == found[7]["num_calls"] == 1, "the group of one tensor, whole"
    assert same(found[7], expected[2])
    assert same(found[8], expected[2]), "a frame that is applied already"


def bucket(tensors: dict[str, Any], **options: Any) -> list[Any]:
    return ["update", {"bucket": text(save_bytes(tensors)), **options}]


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", ["experts", "tied"])
def test_what_the_cpu_build_packs_apart_is_packed_again(tmp_path: Path, kind: str) -> None:
    is_tied = kind == "tied"
    config = Qwen3Config(**SIZES, intermediate_size=256, tie_word_embeddings=True)
    if not is_tied:
        config = Qwen3MoeConfig(
            **SIZES,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        )
    run = Run(tmp_path, config)
    run.publish(list(run.weights))
    few = (
        ["model.embed_tokens.weight"]
        if is_tied
        else ["model.layers.1.mlp.experts.3.up_proj.weight"]
    )
    run.publish(few)
    reference = run.engine("reference", 2, [["look"]])
    found = run.engine("follower", 0, versions(0, 1, 2), follows=run.follows)
    assert found[2]["num_calls"] == 1
    assert same(found[2], reference[0])
