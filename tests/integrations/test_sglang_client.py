"""The trainer's side: the calls that a server gets, in their order, and what failures leave."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.sglang_process import Server
from integrations.sglang_toy import ToyModel, checkpoint, model_of, step
from safetensors.torch import save_file

from gymfast.delta import encode
from gymfast.delta.hf_delta import publish_delta, pull
from gymfast.errors import ChainError, ChannelError, FormatError
from gymfast.integrations.engine_http import EngineHttp
from gymfast.integrations.sglang_client import SGLangClient
from gymfast.integrations.sglang_messages import LocalVersion
from gymfast.integrations.update_request import InitRequest
from gymfast.sync import Publisher

TENSOR, WEIGHTS = "/update_weights_from_tensor", "/get_weights_by_name"
BEGIN, END, POST = "/begin_weight_update", "/end_weight_update", "/post_process_weights"
PAUSE, RESUME = "/pause_generation:retract", "/continue_generation"


@pytest.fixture(
    scope="module", params=["stand-in", pytest.param("real files", marks=pytest.mark.ci)]
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    is_real = request.param == "real files"
    server = Server(request.getfixturevalue("sglang_source") if is_real else "")
    yield server
    server.close()


@pytest.fixture
def start(server: Server) -> Callable[..., Server]:
    return server.reset


def bits(model: ToyModel) -> dict[str, Any]:
    return {name: value.view(torch.int16).tolist() for name, value in model.named_parameters()}


def test_ten_versions_of_a_store_arrive_bit_for_bit(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server, weights, url = start(), checkpoint(0), f"file://{tmp_path / 'store'}"
    client, follow = SGLangClient(server.url), InitRequest(store=url, run="run")
    publisher = Publisher(url, "run")
    for version in range(11):
        publisher.publish(weights)
        status = client.pull(follow, version)
        assert status.root == publisher.root
        newest, weights = weights, step(weights, version)
    seen = server.seen()
    assert seen["weights"] == bits(model_of(newest))
    assert (seen["is_paused"], seen["is_open"]) == (False, False)
    assert server.weight_version == "10"


def test_versions_that_the_host_pulled_are_loaded_from_its_files(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server, weights = start(), checkpoint(0)
    client, local, versions = SGLangClient(server.url), tmp_path / "local", tmp_path / "versions"
    for number in range(4):
        (tmp_path / f"c{number}").mkdir()
        save_file(weights, tmp_path / f"c{number}" / "model.safetensors")
        if number:
            old, new = (tmp_path / f"c{one}" for one in (number - 1, number))
            publish_delta(versions, number, old, new)
        pull(local, tmp_path / "c0", versions, number)
        session = client.session()
        session.begin()
        status = client.load_local(session, LocalVersion(str(local), str(versions), "", number))
        assert status.num_loaded == (4 if number else len(weights))
        newest, weights = weights, step(weights, number, names="layers.1.self_attn.q_proj")
    seen = server.seen()
    assert seen["weights"] == bits(model_of(newest))
    last = [BEGIN, TENSOR, WEIGHTS, f"{TENSOR}:3:flush", END]
    assert seen["calls"][-6:] == ["/server_info", *last]
    assert not seen["is_open"]


def test_one_flush_and_one_version_at_the_end_of_many_pieces(start: Callable[..., Server]) -> None:
    server, frame = start(), encode(None, checkpoint(0))
    client = SGLangClient(server.url, piece_bytes=len(frame) // 3 + 1)
    client.send(frame, weight_version="step-7")
    seen = server.seen()
    pieces = [TENSOR] * 3
    last = f"{TENSOR}:flush:step-7"
    calls = ["/server_info", PAUSE, BEGIN, *pieces, TENSOR, WEIGHTS, last, END, RESUME]
    assert seen["calls"] == calls
    assert seen["weights"] == bits(model_of(checkpoint(0)))


@pytest.mark.parametrize(
    ("missing", "before", "after"),
    [
        ([], [BEGIN], [END]),
        ([BEGIN], [BEGIN, f"{POST}:10"], [f"{POST}:01"]),
        ([BEGIN, POST], [BEGIN, POST], []),
    ],
    ids=["session", "post-process", "neither"],
)
def test_each_version_gets_what_it_needs_around_an_update(
    start: Callable[..., Server], missing: list[str], before: list[str], after: list[str]
) -> None:
    server = start(missing=missing)
    SGLangClient(server.url).send(encode(None, checkpoint(0)), weight_version="1")
    calls = server.seen()["calls"]
    assert calls[2 : 2 + len(before)] == before
    assert calls[-1 - len(after) : -1] == after
    assert calls[-1] == RESUME


@pytest.mark.parametrize("path", [BEGIN, POST])
def test_a_server_that_cannot_make_its_weights_loadable_goes_on(
    start: Callable[..., Server], path: str
) -> None:
    server = start(missing=[BEGIN] if path == POST else [], fails={path: "cannot restore"})
    with pytest.raises(ChannelError, match=r"cannot make its weights loadable.*cannot restore"):
        SGLangClient(server.url).send(encode(None, checkpoint(0)), weight_version="1")
    seen = server.seen()
    assert not seen["is_paused"]
    assert TENSOR not in seen["calls"]


def test_packed_weights_are_not_touched_where_they_cannot_be_unpacked(
    start: Callable[..., Server],
) -> None:
    server = start(missing=[BEGIN, POST], packs=True)
    with pytest.raises(ChainError, match=r"goes on as before.*PackingMethod may have packed"):
        SGLangClient(server.url).send(encode(None, checkpoint(0)), weight_version="1")
    seen = server.seen()
    assert (seen["loads"], seen["is_paused"]) == ([], False)


def test_packed_weights_that_were_unpacked_for_nothing_flag_the_engine(
    start: Callable[..., Server],
) -> None:
    server, weights = start(packs=True), checkpoint(0)
    client = SGLangClient(server.url)
    client.send(encode(None, weights), weight_version="1")
    server.seen()
    with pytest.raises(ChainError, match="is flagged and stays paused"):
        client.send(encode(checkpoint(8), checkpoint(9)), weight_version="2")
    seen = server.seen()
    assert (seen["loads"], seen["is_open"]) == ([], True)
    new = step(weights, 1)
    client.send(encode(weights, new), weight_version="2", is_full=True)
    seen = server.seen()
    assert seen["weights"] == bits(model_of(new))
    assert (seen["is_paused"], seen["is_open"]) == (False, False)


@pytest.mark.parametrize(
    ("info", "sentence"),
    [
        ({"custom_weight_loader": []}, "without --custom-weight-loader gymfast"),
        ({"custom_weight_loader": None}, "without --custom-weight-loader gymfast"),
        ({"dp_size": 2}, "has dp_size 2"),
        ({"pp_size": 4}, "has pp_size 4"),
        ({"tp_size": None}, "not that of an SGLang known here"),
    ],
)
def test_a_server_that_would_die_of_an_update_gets_none(
    start: Callable[..., Server], info: dict[str, Any], sentence: str
) -> None:
    server = start(info=info)
    with pytest.raises(ChannelError, match=sentence):
        SGLangClient(server.url).send(b"", weight_version="1")
    assert server.seen()["calls"] == ["/server_info"]


def test_a_refused_update_leaves_engine_and_chain_as_they_were(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server, weights, url = start(), checkpoint(0), f"file://{tmp_path / 'store'}"
    client, follow = SGLangClient(server.url), InitRequest(store=url, run="run")
    publisher = Publisher(url, "run")
    publisher.publish(weights)
    client.pull(follow, 0)
    with pytest.raises(ChainError, match=r"goes on as before.*NotFoundError"):
        client.pull(follow, 3)
    seen = server.seen()
    assert (seen["is_paused"], seen["is_open"]) == (False, False)
    assert server.weight_version == "0"
    new = step(weights, 1)
    assert publisher.publish(new).kind == "delta"
    client.pull(follow, 1)
    assert server.seen()["weights"] == bits(model_of(new))


def test_a_failed_load_keeps_the_engine_paused_until_a_full_update(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server, weights, url = start(), checkpoint(0), f"file://{tmp_path / 'store'}"
    client, follow = SGLangClient(server.url), InitRequest(store=url, run="run")
    publisher = Publisher(url, "run")
    publisher.publish(weights)
    client.pull(follow, 0)
    server.seen(break_after=2)
    publisher.publish(step(weights, 1))
    with pytest.raises(ChainError, match=r"is flagged and stays paused.*the loader broke"):
        client.pull(follow, 1)
    seen = server.seen()
    assert seen["is_paused"]
    assert not [call for call in seen["calls"] if ":1" in call or "flush" in call]

    new = step(weights, 2)
    assert publisher.publish(new).kind == "delta"
    with pytest.raises(ChainError, match="the engine is flagged, send an anchor or a full update"):
        client.pull(follow, 2)
    assert server.weight_version == "0"

    assert not client.pull(follow, 2, is_full=True).is_flagged
    seen = server.seen()
    assert seen["weights"] == bits(model_of(new))
    assert (seen["is_paused"], seen["is_open"]) == (False, False)
    assert server.weight_version == "2"


@pytest.mark.parametrize("path", [TENSOR, WEIGHTS, END])
def test_an_answer_of_failure_is_passed_on_and_the_update_can_be_repeated(
    start: Callable[..., Server], path: str
) -> None:
    server, weights = start(fails={path: "it is Monday"}), checkpoint(0)
    client = SGLangClient(server.url)
    with pytest.raises(ChannelError, match=f"{path} answered 400: .*it is Monday"):
        client.send(encode(None, weights), weight_version="1")
    assert server.seen(options={"fails": {}})["is_paused"]
    client.send(encode(None, weights), weight_version="1")
    seen = server.seen()
    assert seen["weights"] == bits(model_of(weights))
    assert (seen["is_paused"], seen["is_open"]) == (False, False)


def test_groups_of_data_parallel_attention_each_tell_the_outcome(
    start: Callable[..., Server],
) -> None:
    client = SGLangClient(start(num_groups=2).url)
    assert client.send(encode(None, checkpoint(0)), weight_version="1").num_loaded > 0
    with pytest.raises(ChainError, match="goes on as before"):
        client.send(encode(checkpoint(1), checkpoint(2)), weight_version="2")


@pytest.mark.parametrize("answer", [[1.0, 2.0], [], "text", [None], [[1.0], None]])
def test_an_answer_that_is_no_status_is_refused(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineHttp, "require", lambda *_: answer)
    with pytest.raises(FormatError, match=r"no status of gymfast|are no Status"):
        SGLangClient("http://host").status()


def test_an_engine_that_restarted_refuses_a_delta_and_takes_the_run(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    weights, url = checkpoint(0), f"file://{tmp_path / 'store'}"
    new = step(weights, 1)
    publisher = Publisher(url, "run")
    publisher.publish(weights)
    publisher.publish(new)
    server = start()
    client = SGLangClient(server.url)
    with pytest.raises(ChainError, match="goes on as before"):
        client.send(encode(weights, new), weight_version="1")
    client.pull(InitRequest(store=url, run="run"), 1)
    assert server.seen()["weights"] == bits(model_of(new))


def test_a_server_that_is_gone_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
    with pytest.raises(ChannelError, match=f"{url}/server_info gave no answer"):
        SGLangClient(url).send(b"", weight_version="1")


def test_the_api_key_goes_with_every_call(start: Callable[..., Server]) -> None:
    server = start(api_key="secret")
    with pytest.raises(ChannelError, match="answered 401"):
        SGLangClient(server.url).send(encode(None, checkpoint(0)), weight_version="1")
    client = SGLangClient(server.url, api_key="secret")
    assert client.send(encode(None, checkpoint(0)), weight_version="1").error == ""


@pytest.mark.parametrize("url", ["ftp://host", "host:30000", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        SGLangClient(url)
