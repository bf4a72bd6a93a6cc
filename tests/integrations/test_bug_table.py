"""The bug table of engines.md section 4, row by row; tests/rows.txt says where the others are."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
import torch
from integrations import vllm_stand_in
from integrations.fake_model import BF16, EXPERTS, SIZE, FakeModel, checkpoint
from integrations.fake_run import Start
from torch import Tensor, nn

from gymfast.errors import ChainError
from gymfast.integrations.canonical import CanonicalCopy, bucket_of
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.vllm import GymfastEngine

BLOCK = 8


def engine_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> GymfastEngine:
    """Our engine of vLLM 0.32 in this process, as an offline LLM has it."""
    stand_in = vllm_stand_in.Engine32
    vllm_stand_in.install(monkeypatch, stand_in, "0.32.0")
    return GymfastEngine(*vllm_stand_in.engine_arguments(stand_in, model))


def test_bug_05_a_bucket_may_be_overwritten_as_soon_as_it_was_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks read one bucket; the second is late with the rest."""
    weights = checkpoint(0)
    names = list(weights)
    models = [FakeModel(rank, 2) for rank in range(2)]
    engines = [engine_of(model, monkeypatch) for model in models]
    halves = [names[:7], names[7:]]
    for half in halves:
        bucket = {name: weights[name].clone() for name in half}
        for engine in engines:
            engine.update_weights({"bucket": bucket, "is_last": half is halves[1]})
        for tensor in bucket.values():
            tensor.view(torch.uint8).fill_(0xEE)
    for rank, model in enumerate(models):
        expected = FakeModel(rank, 2)
        expected.load_weights(weights.items())
        expected.pack()
        for live, right in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(live.view(torch.uint8), right.view(torch.uint8))


class Blocked(nn.Module):
    """Experts in blocks of rows, as a kernel for new hardware wants them: a 4-D parameter."""

    def __init__(self, stack: Tensor) -> None:
        super().__init__()
        self.as_loaded = {"w13": torch.empty_like(stack, device="meta")}
        self.w13 = nn.Parameter(self.pack("w13", stack), requires_grad=False)

    def pack(self, name: str, value: Tensor) -> Tensor:
        blocks = value.view(len(value), -1, BLOCK, SIZE)
        return blocks.transpose(1, 2).contiguous()


def test_bug_08_a_four_dimensional_live_layout_is_filled_through_the_loader_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, model = checkpoint(0), FakeModel()
    for layer in model.layers:
        layer.experts = Blocked(layer.experts.w13.detach().clone())
    engine = engine_of(model, monkeypatch)
    place = model.layers[1].experts.w13.data_ptr()
    for seed in (0, 1):
        weights = checkpoint(seed)
        engine.update_weights({"bucket": weights})
        live = model.layers[1].experts.w13
        assert torch.equal(live, Blocked(weights[f"layers.1.{EXPERTS}"]).w13)
        assert live.data_ptr() == place


def test_bug_08_rows_written_past_that_loader_are_an_error_and_flag_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, model = checkpoint(0), FakeModel()
    for layer in model.layers:
        layer.experts = Blocked(layer.experts.w13.detach().clone())
        layer.experts.as_loaded = {}  # the reload does not know the layout either
    engine = engine_of(model, monkeypatch)
    with pytest.raises(ChainError, match=r"not to be used.*size of tensor"):
        engine.update_weights({"bucket": weights})
    with pytest.raises(ChainError, match="not to be used"):
        model.compute_logits(torch.ones(1))


def test_bug_16_syncs_leave_no_memory_and_no_file_behind(start: Start) -> None:
    run = start()
    for _ in range(10):
        run.sync()
    (before,) = run.engine.seen()["ranks"]
    for _ in range(20):
        run.sync()
    (after,) = run.engine.seen()["ranks"]
    assert after["num_files"] == before["num_files"]
    assert after["resident_pages"] - before["resident_pages"] < 256  # 1 MiB


def test_bug_19_an_update_that_waits_for_nothing_ends_and_versions_may_be_skipped(
    start: Start,
) -> None:
    run = start(packs=False)
    run.sync()
    begun = time.monotonic()
    with pytest.raises(ChainError, match=r"goes on as before"):
        run.client.pull(InitRequest(store=run.url, run="run", timeout_s=1.0), 7)
    assert time.monotonic() - begun < 1.0 + 5
    for _ in range(4):
        run.publish()
    run.pull()
    assert run.live() == run.dense()


def test_bug_20_no_rank_goes_on_alone_when_another_cannot_follow(start: Start) -> None:
    run = start(num_ranks=2)
    run.sync()
    run.engine.seen(ranks={1: {"read_damage": True}})
    run.publish()
    with pytest.raises(ChainError):
        run.pull()
    seen = run.engine.seen(ranks={})
    if not seen["is_paused"]:  # then all ranks serve the old version
        assert [rank["digests"] for rank in seen["ranks"]] == run.dense(0)
    run.pull(is_full=True)
    assert run.live() == run.dense()


@pytest.mark.parametrize("names", ["layers.0.norm", ""])
def test_bug_26_a_sync_is_the_same_few_calls_however_many_tensors_change(
    start: Start, names: str
) -> None:
    run = start(packs=False)
    run.sync()
    run.sync(names)
    run.engine.seen()
    run.sync(names)
    calls = [event for event in run.engine.seen()["events"] if event.startswith("/")]
    assert len(calls) <= 9
    assert len(calls) == len({*calls}) + (run.kind == "sglang")  # the confirmation there


@pytest.mark.parametrize("bit", range(8))
def test_bug_29_a_flip_of_the_high_byte_alone_is_seen(
    bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, model = checkpoint(0), FakeModel()
    engine = engine_of(model, monkeypatch)
    engine.update_weights({"bucket": weights})
    name = "layers.1.norm.weight"
    new = weights[name].clone()
    new.view(torch.uint8)[2 * bit + 1] ^= 1 << bit
    engine.update_weights({"bucket": {name: new}})
    assert torch.equal(model.layers[1].norm.weight.view(torch.int16), new.view(torch.int16))


def unaligned_bucket(tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file with the tensors one after the other, at odd places too."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        piece = tensor.view(torch.uint8).numpy().tobytes()
        dtype = {torch.uint8: "U8", BF16: "BF16"}[tensor.dtype]
        ends = [len(data), len(data) + len(piece)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": ends}
        data += piece
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_bug_35_a_bucket_of_mixed_dtypes_needs_no_alignment() -> None:
    tensors = {
        "a": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "b": torch.randn(5, generator=torch.Generator().manual_seed(0)).to(BF16),
    }
    copy = CanonicalCopy()
    copy.put_bucket(bucket_of(unaligned_bucket(tensors)), is_last=True)
    for name, tensor in copy.tensors(tensors, torch.empty(0)):
        assert tensor.dtype == tensors[name].dtype
        assert np.array_equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8))
