"""A real vLLM server that admits requests by version: `make test-engines`."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from engines.vllm_process import PROMPTS
from engines.vllm_run import Run
from engines.vllm_server import CALL_LIMIT_S, FOLLOWS_A_RUN, Server
from transformers import Qwen3Config

from gymfast.errors import ChainError
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.versioned_requests import VersionedRequests
from gymfast.integrations.vllm_client import VLLMClient
from gymfast.stores import open_store
from gymfast.sync.fleet import FleetWatch

ADMITS = (*FOLLOWS_A_RUN, "--middleware", "gymfast.integrations.admission.Admission")
LONG = ("--max-model-len", "2048")
NUM_LONG = 1500  # tokens of a request that an update overtakes
LONG_LIMIT_S = 300.0
GENERATE = "/inference/v1/generate"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    run = Run(tmp_path_factory.mktemp("admission"), config)
    for _ in range(4):
        run.publish(list(run.weights))
    return run


@pytest.fixture(scope="module")
def server(run: Run) -> Iterator[Server]:
    with Server(run.checkpoint(0), run.folder / "server.log", options=(*ADMITS, *LONG)) as server:
        yield server


def ask(server: Server, *, max_tokens: int = 4, **more: Any) -> tuple[int, Any, dict[str, str]]:
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": PROMPTS[0], "sampling_params": greedy | {"max_tokens": max_tokens}} | more
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}{GENERATE}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=LONG_LIMIT_S) as answer:
            status, text, told = answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        status, text, told = error.code, error.read().decode(), error.headers
    value = text if more.get("stream") else json.loads(text)
    return status, value, {name.lower(): content for name, content in told.items()}


def test_vllm_admits_by_version(run: Run, server: Server) -> None:
    follow = InitRequest(**run.follows)
    client = VLLMClient(server.url)
    assert server.call("/gymfast/ready")[0] == 503
    assert ask(server)[0] == 200
    status, body, _ = ask(server, weight_version={"min_version": 1})
    assert (status, body["served_version"], body["retryable"]) == (409, None, True)

    client.pull(follow, 1)
    assert server.call("/gymfast/ready") == (
        200,
        server.call("/gymfast/version")[1] | {"age_s": pytest.approx(0, abs=60)},
    )
    assert server.version == "1", "vLLM says the same"
    status, body, headers = ask(server, weight_version={"exact_version": 1})
    assert status == 200 and body["choices"][0]["token_ids"]
    assert headers["x-gymfast-version-start"] == headers["x-gymfast-version-end"] == "1"
    assert ask(server, weight_version={"exact_version": 0})[1]["retryable"] is False

    server.fail("pull 0")
    with pytest.raises(ChainError, match="goes on as before"):
        client.pull(follow, 2)
    server.fail("")
    assert ask(server, weight_version={"exact_version": 1})[0] == 200

    requests = VersionedRequests([server.url])
    later = threading.Timer(0.5, client.pull, (follow, 2))
    later.start()
    fields = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 4, "detokenize": False}}
    answer = requests.post(GENERATE, fields, min_version=2, patience_s=CALL_LIMIT_S)
    later.join()
    assert (answer.start_version, answer.end_version) == (2, 2)

    status, text, headers = ask(server, stream=True, weight_version={"min_version": 2})
    assert status == 200 and "text/event-stream" in headers["content-type"]
    assert text.endswith(": x-gymfast-version-end 2\n\n")


def test_the_fleet_shows_what_vllm_serves(run: Run, server: Server) -> None:
    fleet = FleetWatch(open_store(run.follows["store"]), run.follows["run"]).look(None)
    (row,) = fleet.readers
    assert (row.state, row.version) == ("clean", 2) and row.is_ready(2)


def test_a_request_that_an_update_overtakes_is_told(run: Run, server: Server) -> None:
    """With `keep` vLLM goes on with running requests, on the new weights."""
    client = VLLMClient(server.url, pause="keep")
    found: list[tuple[int, Any, dict[str, str]]] = []
    exact = {"weight_version": {"exact_version": 2}}
    long = threading.Thread(target=lambda: found.append(ask(server, max_tokens=NUM_LONG, **exact)))
    long.start()
    while not _num_running(server) and long.is_alive():
        time.sleep(0.05)
    client.pull(InitRequest(**run.follows), 3)
    long.join()
    status, body, headers = found[0]
    if headers["x-gymfast-version-end"] == "2":
        pytest.fail("the request ended before the update: give it more tokens")
    assert (status, body["served_version"], body["retryable"]) == (409, 3, False)


def test_a_flagged_vllm_is_not_ready(run: Run, server: Server) -> None:
    client, follow = VLLMClient(server.url), InitRequest(**run.follows)
    server.fail("load 0")
    with pytest.raises(ChainError, match="flagged"):
        client.pull(follow, 4)
    status, text = server.call("/gymfast/ready")
    assert status == 503 and json.loads(text)["state"] == "inconsistent"
    assert ask(server)[0] == 503
    fleet = FleetWatch(open_store(run.follows["store"]), run.follows["run"])
    rows = fleet.look(None).readers
    assert [(row.state, row.version) for row in rows] == [("inconsistent", None)]
    server.fail("")
    client.pull(follow, 4)
    assert ask(server, weight_version={"exact_version": 4})[0] == 200


def _num_running(server: Server) -> float:
    lines = server.call("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_r"))
