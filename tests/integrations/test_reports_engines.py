"""Rows of reports.md that concern engines: our adapters inside a fake engine, one test per report.

Which rows other tests cover is in tests/rows.txt.
"""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
import torch
from integrations.fake_model import (
    BF16,
    DOWN,
    EXPERTS,
    HEAD,
    SCALE,
    TIED,
    FakeModel,
    Graph,
    checkpoint,
    dense,
    step,
)
from integrations.fake_run import FLUSH, LOAD, PAUSE, RESUME, FakeRun, Start
from safetensors.torch import save
from torch import Tensor

from gymfast.delta import encode
from gymfast.errors import ChainError, ChannelError, GymfastError
from gymfast.integrations.run_stream import RunStream
from gymfast.integrations.sglang_client import SGLangClient
from gymfast.sync import Publisher

NAN_WITH_PAYLOAD = 0x7FA5


def test_R01_sparse_updates_of_a_fused_expert_stack_leave_what_a_dense_load_does(
    start: Start,
) -> None:
    run = start(num_ranks=2)
    run.sync()
    for _ in range(3):
        run.sync(EXPERTS)
        assert run.live() == run.dense()


def test_R02_a_nan_with_its_payload_is_a_value_like_any_other(start: Start) -> None:
    run = start()
    run.sync()
    new = {name: tensor.clone() for name, tensor in run.weights.items()}
    new["layers.0.norm.weight"].view(torch.int16)[3] = NAN_WITH_PAYLOAD
    new[f"layers.1.{DOWN}"].view(torch.uint8)[1, 2] = 0x7F  # a NaN of fp8
    run.publish(weights=new)
    run.pull()
    assert run.live() == run.dense()


def test_R13_a_change_of_the_embedding_reaches_the_head_that_is_a_clone(start: Start) -> None:
    run = start()
    run.sync()
    (before,) = run.live()
    run.sync(TIED)
    (after,) = run.live()
    assert after[TIED] == after[HEAD] != before[HEAD]


@pytest.mark.parametrize("change", ["removed", "unknown"])
def test_R15_a_version_of_other_tensors_is_never_reported_as_served(
    start: Start, change: str
) -> None:
    run = start(packs=False)
    run.sync()
    new = {name: tensor.clone() for name, tensor in run.weights.items()}
    if change == "removed":
        del new["layers.0.norm.weight"]
    else:
        new["layers.0.surprise.weight"] = torch.ones(4)
    run.publish(weights=new)
    with pytest.raises(ChainError, match=r"flagged.*(norm|surprise)"):
        run.pull()
    seen = run.engine.seen()
    assert (seen["version"], seen["is_paused"]) == ("0", True)


@pytest.mark.parametrize("kind", ["sglang"])
def test_R21_a_draft_model_in_the_engine_is_left_as_it_was(start: Start) -> None:
    run = start()
    (before,) = run.engine.seen()["ranks"]
    run.sync()
    run.sync()
    (after,) = run.engine.seen()["ranks"]
    assert after["draft"] == before["draft"]
    assert after["digests"] != before["digests"]


def test_R26_a_version_without_changes_moves_the_version_and_nothing_else(start: Start) -> None:
    run = start(packs=False)
    run.sync()
    (before,) = run.engine.seen()["ranks"]
    run.sync("no such tensor")
    seen = run.engine.seen()
    assert seen["version"] == "1"
    assert seen["ranks"][0]["loads"] == []
    assert seen["ranks"][0]["digests"] == before["digests"]


@pytest.mark.parametrize("held", [None, 0, 3])
def test_R28_engines_at_any_version_catch_up_with_a_trainer_that_resumed(
    start: Start, held: int | None
) -> None:
    run = start()
    for _ in range(4):
        run.publish()
    if held is not None:
        run.pull(held)
    run.publisher = Publisher(run.url, "run", anchor_every=100)
    run.publish()
    run.pull()
    assert run.live() == run.dense()
    assert run.engine.seen()["version"] == "4"


def test_R31_a_restarted_engine_tells_no_version_before_it_has_the_weights(start: Start) -> None:
    run = start()
    for _ in range(3):
        run.sync()
    run.restart()
    assert run.engine.seen()["version"] == "default"
    assert run.live() != run.dense()
    run.pull()
    assert run.live() == run.dense()
    assert run.engine.seen()["version"] == "2"


def test_R35_missed_versions_are_one_install_and_a_missing_one_disturbs_nothing(
    start: Start,
) -> None:
    run = start(packs=False)
    run.sync()
    for _ in range(3):
        run.publish()
    run.engine.seen()
    run.pull(3)
    (rank,) = run.engine.seen()["ranks"]
    loaded = [name for names in rank["loads"] for name in names]
    assert len(loaded) == len(set(loaded)) == len(run.weights)
    with pytest.raises(ChainError, match="goes on as before"):
        run.pull(5)
    run.pull(3)
    seen = run.engine.seen()
    assert seen["ranks"][0]["loads"] == []
    assert (seen["version"], seen["is_paused"]) == ("3", False)
    assert run.live() == run.dense()


@pytest.mark.parametrize("spans", [2, 3])
def test_R54_layers_that_span_buckets_are_one_load_per_version(start: Start, spans: int) -> None:
    run = start(num_ranks=2)
    weights = checkpoint(0)
    for number in range(2):
        run.engine.seen()
        send_in_parts(run, weights, encode(None, weights), spans * 2)
        seen = run.engine.seen()
        loaded = [name for names in seen["ranks"][0]["loads"] for name in names]
        assert sorted(loaded) == sorted(weights), f"version {number}: each tensor once"
        assert [rank["digests"] for rank in seen["ranks"]] == dense(weights, 2)
        weights = step(weights, 1)


def send_in_parts(run: FakeRun, weights: dict[str, Tensor], frame: bytes, parts: int) -> None:
    """All tensors in buckets or pieces that layers span, within one update."""
    if isinstance(run.client, SGLangClient):
        client = SGLangClient(run.engine.url, piece_bytes=len(frame) // parts + 1)
        client.send(frame, weight_version="1")
        return
    http, names = run.engine.http, list(weights)
    size = -(-len(names) // parts)
    http.require("/start_weight_update", {})
    for begin in range(0, len(names), size):
        bucket = save({name: weights[name] for name in names[begin : begin + size]})
        info = {"bucket": base64.b64encode(bucket).decode(), "is_last": begin + size >= len(names)}
        http.require("/update_weights", {"update_info": info})
    http.require("/finish_weight_update", {})


def test_R56_a_packed_layout_is_packed_anew_at_each_sync(start: Start) -> None:
    run = start()
    for _ in range(3):
        run.sync(DOWN)
        assert run.live() == run.dense()
    plain = dense(run.states[-1], packs=False)
    different = {name for name, digest in run.live()[0].items() if plain[0][name] != digest}
    assert different == {f"layers.{i}.{DOWN}" for i in range(2)}, "the layouts differ at all"


def test_R57_a_scale_that_is_not_in_a_delta_keeps_its_bytes(start: Start) -> None:
    run = start()
    run.sync()
    (before,) = run.live()
    run.sync(f"layers.0.{DOWN}.")  # no name has it
    new = {name: tensor.clone() for name, tensor in run.weights.items()}
    new[f"layers.0.{DOWN}"].view(torch.uint8)[:] ^= 8
    run.publish(weights=new)
    run.pull()
    (after,) = run.live()
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {f"layers.0.{DOWN}"}
    assert after[f"layers.0.{SCALE}"] == before[f"layers.0.{SCALE}"]
    assert run.live() == run.dense()


def test_R58_a_failed_load_of_a_packed_model_can_be_rolled_back(start: Start) -> None:
    run = start()
    run.sync()
    run.engine.seen(ranks={0: {"fails_at": (list(run.weights).index(f"layers.0.{DOWN}"), "raise")}})
    with pytest.raises(ChainError, match="flagged and stays paused"):
        run.sync()
    run.engine.seen(ranks={})
    run.publish(weights=run.states[0])  # the old version is the next one
    run.pull(is_full=True)
    assert run.live() == run.dense(0)
    assert run.engine.seen()["version"] == "2"


def test_R61_a_captured_graph_reads_the_new_weights_after_five_syncs(start: Start) -> None:
    run = start()
    run.sync()
    (first,) = run.engine.seen()["ranks"]
    for _ in range(5):
        run.sync()
        model = FakeModel()
        model.load_weights(run.weights.items())
        model.pack()
        expected = sha256(Graph(model).replay().encode()).hexdigest()
        assert run.engine.generate("replay")["weights"] == [expected]
    assert run.engine.seen()["ranks"][0]["places"] == first["places"]


@pytest.mark.parametrize("level", [1, 2])
def test_R62_an_engine_that_slept_gets_all_its_weights_with_the_next_version(
    start: Start, level: int
) -> None:
    run = start(packs=False)
    run.sync()
    run.sleep(level)
    run.wake_up()
    run.engine.seen()
    run.sync("layers.0.norm")
    (rank,) = run.engine.seen()["ranks"]
    if level == 2:
        assert sum(map(len, rank["loads"])) == len(run.weights)
    assert run.live() == run.dense()


def test_R63_the_cache_is_dropped_before_the_engine_answers_with_the_new_weights(
    start: Start,
) -> None:
    run = start()
    run.sync()
    old = run.engine.generate("the same prompt")
    run.engine.seen()
    run.sync()
    events = run.engine.seen()["events"]
    assert events.index(PAUSE[run.kind]) < events.index("flushed") < events.index(RESUME[run.kind])
    assert run.engine.generate("the same prompt")["token"] != old["token"]
    assert run.engine.seen()["stale_hits"] == 0


@pytest.mark.parametrize("number", [0, 1, 2], ids=["first", "second", "third"])
@pytest.mark.parametrize("is_failing", [False, True])
def test_R64_requests_in_flight_never_go_on_with_keys_and_values_of_older_weights(
    start: Start, number: int, is_failing: bool
) -> None:
    run = start(num_ranks=2)
    modes = {"vllm": ("wait", "abort", "keep"), "sglang": ("abort", "retract", "in_place")}
    mode = modes[run.kind][number]
    run.sync()
    run.client = run.make_client(pause=mode)
    run.publish()
    with ThreadPoolExecutor(8) as pool:
        prompts = [f"prompt number {n}" for n in range(8)]
        requests = [pool.submit(run.engine.generate, p, until_pause=True) for p in prompts]
        run.engine.wait_for_running(8)
        if is_failing:
            run.engine.seen(fails={LOAD[run.kind]: "before"})
        if is_failing or mode == "in_place":  # whose requests do not let go of the cache
            with pytest.raises(GymfastError):
                run.pull()
            run.engine.seen(fails={})
            run.client = run.make_client(pause=modes[run.kind][0])
        run.pull()
        run.engine.drain()
        answers = [request.result() for request in requests]
    if mode in ("wait", "abort") and not is_failing:
        assert all(len(answer["weights"]) == 1 for answer in answers)
    seen = run.engine.seen()
    assert (seen["stale_hits"], seen["num_running"], seen["version"]) == (0, 0, "1")
    assert run.live() == run.dense()


@pytest.mark.parametrize("where", ["load", "flush", "resume"])
def test_R65_generation_is_never_left_paused_without_a_word(start: Start, where: str) -> None:
    run = start()
    run.sync()
    path = {"load": LOAD, "flush": FLUSH, "resume": RESUME}[where][run.kind]
    run.engine.seen(fails={path: "before"})
    run.publish()
    with pytest.raises((ChainError, ChannelError), match=rf"{path}.*injected|goes on as before"):
        run.pull()
    seen = run.engine.seen(fails={})
    if not seen["is_paused"]:
        run.engine.generate("it goes on")
    run.pull()
    run.engine.generate("it goes on")
    assert run.engine.seen()["version"] == "1"


def test_R67_two_of_four_ranks_that_fail_stop_the_whole_engine_until_it_is_healed(
    start: Start,
) -> None:
    run = start(num_ranks=4)
    run.sync()
    run.engine.seen(ranks={rank: {"fails_at": (5, "raise")} for rank in (1, 3)})
    with pytest.raises(ChainError, match="flagged and stays paused"):
        run.sync()
    run.engine.seen(ranks={})
    run.engine.http.require(RESUME[run.kind], {})
    assert run.engine.http.call("/generate", {"text": "anything"}).code == 500
    run.pull(is_full=True)
    run.engine.generate("anything")
    assert run.live() == run.dense()


def views() -> dict[str, Tensor]:
    """Tensors of the checkpoint as views that are not contiguous, with the same values."""
    weights = checkpoint(3)
    q, norm = "layers.0.q_proj.weight", "layers.0.norm.weight"
    weights[q] = weights[q].T.contiguous().T
    weights[norm] = weights[norm].repeat_interleave(2)[::2]
    weights["layers.1.norm.weight"] = torch.ones(1, dtype=BF16).expand(8)
    stack = weights[f"layers.1.{EXPERTS}"]
    weights[f"layers.1.{EXPERTS}"] = stack.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return weights


def test_R71_views_that_are_not_contiguous_arrive_as_their_values(start: Start) -> None:
    run, weights = start(), views()
    assert sum(not tensor.is_contiguous() for tensor in weights.values()) == 4
    RunStream(run.publisher).publish(iter(weights.items()))
    run.pull(0)
    assert run.live() == dense(weights)


@pytest.mark.parametrize("kind", ["sglang"])
def test_R72_a_piece_smaller_than_a_row_is_enough(start: Start) -> None:
    run, weights = start(), checkpoint(0)
    frame = encode(None, weights)
    client = SGLangClient(run.engine.url, piece_bytes=601)
    client.send(frame, weight_version="1")
    assert run.live() == dense(weights)
