"""Invariants I40 to I46 with our adapters inside a fake engine, whose ranks are processes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations import vllm_stand_in
from integrations.fake_model import FakeModel, checkpoint
from integrations.fake_run import LOAD, PAUSE, RESUME, FakeRun, Start

from gymfast.errors import ChainError, ChannelError, GymfastError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.sglang_model import LiveModel
from gymfast.integrations.vllm import GymfastEngine

PAUSES = {"vllm": ("wait", "abort", "keep"), "sglang": ("retract", "abort", "in_place")}
STEPS = {
    "vllm": (
        *("/pause", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
        *("/finish_weight_update", "/reset_prefix_cache", "/resume"),
    ),
    "sglang": (
        *("/server_info", "/pause_generation", "/begin_weight_update"),
        *("/update_weights_from_tensor", "/get_weights_by_name", "/end_weight_update"),
        "/continue_generation",
    ),
}
NUM_TENSORS = len(checkpoint())


def assert_serves(run: FakeRun, version: int) -> None:
    """The engine generates, with exactly the weights of that version."""
    assert run.live() == run.dense(version)
    run.engine.generate("is it there")
    seen = run.engine.seen()
    assert (seen["version"], seen["is_paused"]) == (str(version), False)


def assert_refuses(run: FakeRun) -> None:
    """Whoever resumes the engine by hand gets no token from it."""
    run.engine.http.require(RESUME[run.kind], {})
    assert run.engine.http.call("/generate", {"text": "anything"}).code == 500


@pytest.mark.parametrize("shift", [0, pytest.param(1, marks=pytest.mark.long)])
def test_I40_each_rank_failing_at_each_tensor_is_flagged_and_healed(
    start: Start, shift: int
) -> None:
    run = start(num_ranks=2)
    run.sync()
    for number in range(1, NUM_TENSORS + 1):
        rank = (number + shift) % 2
        run.engine.seen(ranks={rank: {"fails_at": (number, "raise")}})
        with pytest.raises(ChainError, match=rf"flagged and stays paused.*tensor {number} of rank"):
            run.sync()
        seen = run.engine.seen(ranks={})
        assert seen["is_paused"]
        assert seen["version"] == str(2 * (number - 1))
        assert_refuses(run)
        run.publish()
        run.pull(is_full=True)
        assert_serves(run, 2 * number)


@pytest.mark.parametrize("number", [1, NUM_TENSORS // 2, NUM_TENSORS])
def test_I40_an_engine_of_which_a_rank_is_killed_serves_nothing_and_joins_late(
    start: Start, number: int
) -> None:
    run = start(num_ranks=2)
    run.sync()
    run.engine.seen(ranks={1: {"fails_at": (number, "kill")}})
    with pytest.raises(GymfastError):
        run.sync()
    assert run.engine.seen()["is_dead"]
    run.restart()
    run.pull()
    assert_serves(run, 1)


@pytest.mark.parametrize("fault", ["digest", "one rank", "first gather", "second gather"])
def test_I41_the_version_moves_only_after_every_rank_has_it(start: Start, fault: str) -> None:
    run = start(num_ranks=2)
    run.sync()
    if run.kind == "vllm" and "gather" in fault:
        fault = "digest"  # a worker whose gather failed lives, and the other one waits for it
    options: dict[str, Any] = {
        "digest": {"read_damage": True},
        "one rank": {"fails_at": (3, "raise")},
        "first gather": {"gather": 1},
        "second gather": {"gather": 2},
    }
    run.engine.seen(ranks={1: options[fault]})
    with pytest.raises(GymfastError):
        run.sync()
    seen = run.engine.seen()
    assert seen["version"] == "0"
    assert not [event for event in seen["events"] if "version" in event.split()]
    if seen["is_dead"]:
        run.restart()
    else:
        run.engine.seen(ranks={})
    run.pull(is_full=True)
    assert_serves(run, 1)


def test_I41_the_version_and_the_flush_come_after_the_load_and_before_the_resume(
    start: Start,
) -> None:
    run = start(num_ranks=2)
    run.sync()
    events = run.engine.seen()["events"]
    order = [events.index(event) for event in (PAUSE[run.kind], LOAD[run.kind], "version 0")]
    assert order == sorted(order)
    assert events.index("flushed") > events.index(LOAD[run.kind])
    assert events[-1] == RESUME[run.kind]


@pytest.mark.parametrize("packs", [True, False])
def test_I42_untouched_tensors_keep_pointer_layout_and_bytes(start: Start, packs: bool) -> None:
    run = start(packs=packs)
    run.sync()
    (before,) = run.engine.seen()["ranks"]
    touched = {
        "layers.0.q_proj": "layers.0.qkv_proj.weight",
        "layers.1.up_proj": "layers.1.gate_up_proj.weight",
        "layers.1.experts": "layers.1.experts.w13",
        "layers.0.mixer": "layers.0.mixer.A",
        "layers.0.down_proj.weight_scale": "layers.0.down_proj.weight_scale",
    }
    for name, live in touched.items():
        run.sync(name)
        (after,) = run.engine.seen()["ranks"]
        assert after["places"] == before["places"]
        changed = {n for n, d in after["digests"].items() if before["digests"][n] != d}
        assert changed == {live}
        before = after
    assert run.live() == run.dense()


@pytest.mark.parametrize("how", ["before", "after", "silent"])
def test_I43_the_engine_ends_resumed_or_the_caller_is_told(start: Start, how: str) -> None:
    run, timeout_s = start(), 0.5 if how == "silent" else 30.0
    run.sync()
    for path in STEPS[run.kind]:
        run.publish()
        run.client = run.make_client(timeout_s=timeout_s)
        run.engine.seen(fails={path: how})
        begun = time.monotonic()
        with pytest.raises((ChainError, ChannelError)) as told:
            run.pull()
        assert time.monotonic() - begun < timeout_s + 5
        seen = run.engine.seen(fails={})
        newest = len(run.states) - 1
        if seen["is_paused"]:
            assert "goes on as before" not in str(told.value), path
        else:
            assert seen["version"] in (str(newest), str(newest - 1))
            assert run.live() == run.dense(int(seen["version"])), path
            run.engine.generate("one of the two")
        run.client = run.make_client()
        run.pull()
        assert_serves(run, newest)
    assert run.engine.seen()["stale_hits"] == 0


@pytest.mark.parametrize("number", [0, 1, 2], ids=["first", "second", "third"])
def test_I44_no_prompt_meets_keys_and_values_of_older_weights(start: Start, number: int) -> None:
    run = start(num_ranks=2)
    run.client = run.make_client(pause=PAUSES[run.kind][number])
    run.sync()
    for _ in range(3):
        first = run.engine.generate("a long prompt")
        assert run.engine.generate("a long prompt") == first
        run.sync("layers.1.norm")
        assert run.engine.generate("a long prompt") != first
    seen = run.engine.seen()
    assert seen["num_hits"] >= 9  # so that the cache is there to be stale
    assert seen["stale_hits"] == 0


def test_I44_a_flush_that_is_refused_keeps_the_engine_paused_until_one_works(start: Start) -> None:
    run = start()
    run.sync()
    run.engine.generate("a long prompt")
    path = "/reset_prefix_cache" if run.kind == "vllm" else "/get_weights_by_name"
    run.engine.seen(fails={path: "before"})
    with pytest.raises((ChainError, ChannelError), match="injected"):
        run.sync()
    seen = run.engine.seen(fails={})
    assert (seen["is_paused"], seen["version"]) == (True, "0")
    run.pull()
    run.engine.generate("a long prompt")
    assert run.engine.seen()["stale_hits"] == 0
    assert_serves(run, 1)


@pytest.mark.parametrize("level", [1, 2])
def test_I45_an_engine_that_sleeps_is_not_touched(start: Start, level: int) -> None:
    run = start(num_ranks=2)
    run.sync()
    run.sleep(level)
    run.publish("layers.0")
    with pytest.raises((ChainError, ChannelError), match=r"asleep.*wake"):
        run.pull()
    run.wake_up()
    seen = run.engine.seen()
    assert not seen["is_dead"]
    assert seen["version"] == "0"
    if run.kind == "vllm" and level == 1:
        assert [rank["digests"] for rank in seen["ranks"]] == run.dense(0)
    run.pull()
    assert_serves(run, 1)


class Watched:
    """A model's loader that notes how many bytes of what it was given are alive at once."""

    def __init__(self, model: FakeModel) -> None:
        self._load, self.most_bytes, self.largest_pair = model.load_weights, 0, 0
        model.load_weights = self  # type: ignore[assignment]

    def __call__(self, weights: Any) -> set[str]:
        return self._load(self._one_by_one(weights))

    def _one_by_one(self, weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        before = 0
        for name, tensor in weights:
            alive.add(tensor)
            self.largest_pair = max(self.largest_pair, before + tensor.nbytes)
            before = tensor.nbytes
            self.most_bytes = max(self.most_bytes, sum(one.nbytes for one in alive))
            yield name, tensor


def test_I46_a_loader_is_given_one_tensor_after_the_other(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging on the device is that of two tensors, however many change: this and the one before.

    The copy of the checkpoint is in CPU memory.
    """
    weights, model = checkpoint(0), FakeModel()
    watched = Watched(model)
    if kind == "vllm":
        vllm_stand_in.install(monkeypatch, vllm_stand_in.Engine32, "0.32.0")
        arguments = vllm_stand_in.engine_arguments(vllm_stand_in.Engine32, model)
        GymfastEngine(*arguments).update_weights({"bucket": weights})
    else:
        copy = CanonicalCopy()
        copy.put_bucket(weights, is_last=True)
        LiveModel(model).load(copy, is_full=True)
    assert 0 < watched.most_bytes <= watched.largest_pair * 1.05
