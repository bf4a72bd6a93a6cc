"""Requests that ask for a version, over sockets, while trainers update the engine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from integrations.asgi_server import HAS_UVICORN, serving
from integrations.versioned_engine import Engine

from gymfast.errors import ChainError, ChannelError, DeadlineError
from gymfast.integrations.admission import Admission
from gymfast.integrations.admission_rules import Served
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.versioned_requests import VersionedRequests
from gymfast.integrations.vllm_client import VLLMClient
from gymfast.integrations.vllm_ranks import FLAGGED
from gymfast.stores import MemoryStore
from gymfast.sync import LiveTarget, Publisher, Subscriber

FOLLOW = InitRequest(store="file:///mnt/runs", run="demo")
LIMIT_S = 60.0


@dataclass
class Place:
    """A server and its engine."""

    url: str
    engine: Engine

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        return call(self.url, path, body, **headers)

    def ask(self, **constraint: int) -> tuple[int, Any, dict[str, str]]:
        return self.call("/v1/completions", {"prompt": "a", "weight_version": constraint})

    @property
    def client(self) -> VLLMClient:
        return VLLMClient(self.url, timeout_s=LIMIT_S)


def call(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON and headers of an answer; the names of headers are given with _ for -."""
    sent = {"Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, sent)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, _value(answer.read()), _lower(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, _value(error.read()), _lower(error.headers)


def _value(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def wait_for(holds: Any) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture(params=["plain", pytest.param("uvicorn", marks=pytest.mark.ci)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "uvicorn" and not HAS_UVICORN:
        pytest.skip("needs uvicorn")
    engine = Engine()
    with serving(Admission(engine), with_uvicorn=request.param == "uvicorn") as url:
        yield Place(url, engine)


def test_an_engine_is_ready_from_the_first_version_on(place: Place) -> None:
    status, body, headers = place.call("/gymfast/ready")
    assert (status, body["reason"]) == (503, "no version is served yet")
    assert headers["retry-after"] == "1"
    assert place.call("/v1/completions", {"prompt": "a"})[0] == 200, "it serves all the same"
    place.client.pull(FOLLOW, 7)
    status, body, _ = place.call("/gymfast/ready")
    assert (status, body["served_version"], body["state"]) == (200, 7, "clean")
    assert place.call("/gymfast/version")[1]["served_version"] == 7


def test_a_request_is_taken_by_an_engine_that_serves_what_it_asks_for(place: Place) -> None:
    place.client.pull(FOLLOW, 7)
    for constraint in ({"min_version": 7}, {"min_version": 0}, {"exact_version": 7}):
        status, body, headers = place.ask(**constraint)
        assert (status, body["version"]) == (200, "7")
        assert body["fields"] == {"prompt": "a"}, "the engine does not see the field"
        assert headers["x-gymfast-version-start"] == headers["x-gymfast-version-end"] == "7"
    assert place.call("/v1/completions", {}, X_Gymfast_Min_Version="7")[0] == 200
    assert place.call("/v1/completions", {}, X_Gymfast_Exact_Version="7")[0] == 200


@pytest.mark.parametrize(
    ("asked", "is_retryable"),
    [({"min_version": 8}, True), ({"exact_version": 8}, True), ({"exact_version": 6}, False)],
)
def test_another_request_is_a_conflict(
    place: Place, asked: dict[str, int], is_retryable: bool
) -> None:
    place.client.pull(FOLLOW, 7)
    num_before = len(place.engine.bodies)
    status, body, headers = place.ask(**asked)
    assert (status, body["served_version"], body["retryable"]) == (409, 7, is_retryable)
    assert "this engine serves version 7" in body["error"]["message"]
    assert ("retry-after" in headers) is is_retryable
    assert len(place.engine.bodies) == num_before, "the engine was not asked"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"weight_version": {"min_version": -1}}, {}),
        ({"weight_version": {"min_version": True}}, {}),
        ({"weight_version": {"min_version": 2**60}}, {}),
        ({"weight_version": {"newest": 1}}, {}),
        ({"weight_version": {}}, {}),
        ({"weight_version": "7"}, {}),
        ({"weight_version": {"min_version": 1, "exact_version": 1}}, {}),
        ({"weight_version": {"min_version": 1}}, {"X_Gymfast_Min_Version": "2"}),
        ({}, {"X_Gymfast_Min_Version": "seven"}),
        ({}, {"X_Gymfast_Min_Version": "7", "X_Gymfast_Exact_Version": "7"}),
    ],
)
def test_a_request_that_asks_for_no_version_is_refused(
    place: Place, body: Any, headers: dict[str, str]
) -> None:
    status, answer, _ = place.call("/v1/completions", body, **headers)
    assert (status, answer["retryable"]) == (400, False)
    assert not place.engine.bodies


def test_during_an_update_requests_for_a_version_come_back_later(place: Place) -> None:
    place.client.pull(FOLLOW, 7)
    for path, body in (
        ("/pause", {}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"version": 8}}),
    ):
        assert place.call(path, body)[0] == 200
        status, answer, headers = place.ask(min_version=7)
        assert (status, answer["retryable"], headers["retry-after"]) == (503, True, "1")
        assert place.call("/gymfast/ready")[0] == 503
        assert place.call("/v1/completions", {})[0] == 200, "the engine has a queue of its own"
    assert place.call("/finish_weight_update", {"weight_version": "8"})[0] == 200
    assert place.ask(min_version=8)[0] == 503, "still paused"
    assert place.call("/resume", {})[0] == 200
    assert place.ask(exact_version=8)[0] == 200


def test_a_refused_update_leaves_the_old_version(place: Place) -> None:
    place.client.pull(FOLLOW, 7)
    place.engine.failures["/update_weights"] = 500, "version 8 is not published yet"
    with pytest.raises(ChainError, match="goes on as before"):
        place.client.pull(FOLLOW, 8)
    assert place.ask(exact_version=7)[0] == 200
    assert place.call("/gymfast/ready")[0] == 200


@pytest.mark.parametrize("text", ["version 8 is not published", f"{FLAGGED}: the load failed"])
def test_an_error_that_is_answered_outside_of_the_middleware_counts(
    place: Place, text: str
) -> None:
    place.client.pull(FOLLOW, 7)
    place.engine.failures["/update_weights"], place.engine.raises = (500, text), True
    place.call("/pause", {})
    with suppress(OSError, HTTPException):
        place.call("/update_weights", {"update_info": {"version": 8, "is_full": False}})
    place.call("/resume", {})
    assert place.ask(exact_version=7)[0] == (503 if FLAGGED in text else 200)


def test_a_flagged_engine_gets_no_request(place: Place) -> None:
    place.client.pull(FOLLOW, 7)
    place.engine.failures["/update_weights"] = 500, f"{FLAGGED}: the load failed"
    with pytest.raises(ChainError, match="flagged"):
        place.client.pull(FOLLOW, 8)
    status, body, _ = place.call("/gymfast/ready")
    assert (status, body["state"], body["served_version"]) == (503, "inconsistent", None)
    assert "the load failed" in body["reason"]
    status, answer, headers = place.call("/v1/completions", {})
    assert (status, answer["retryable"], headers["retry-after"]) == (503, True, "1")
    place.engine.failures.clear()
    place.client.pull(FOLLOW, 8)
    assert place.ask(exact_version=8)[0] == 200


def test_a_request_that_an_update_overtakes_is_told(place: Place) -> None:
    place.client.pull(FOLLOW, 7)
    place.engine.is_open = False
    answers: dict[str, Any] = {}

    def ask(name: str, asked: dict[str, int], **more: Any) -> None:
        body = {"weight_version": asked, **more}
        answers[name] = place.call("/v1/completions", body)

    threads = [
        threading.Thread(target=ask, args=("min", {"min_version": 7})),
        threading.Thread(target=ask, args=("exact", {"exact_version": 7})),
        threading.Thread(target=ask, args=("stream", {"exact_version": 7}), kwargs={"stream": 1}),
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: place.engine.waiting == len(threads))
    place.client.pull(FOLLOW, 8)
    place.engine.is_open = True
    for thread in threads:
        thread.join()
    status, body, headers = answers["min"]
    assert (status, body["version"]) == (200, "8")
    assert (headers["x-gymfast-version-start"], headers["x-gymfast-version-end"]) == ("7", "8")
    status, body, headers = answers["exact"]
    assert (status, body["served_version"], body["retryable"]) == (409, 8, False)
    assert (headers["x-gymfast-version-start"], headers["x-gymfast-version-end"]) == ("7", "8")
    status, text, headers = answers["stream"]
    assert status == 200 and headers["x-gymfast-version-start"] == "7"
    assert text.endswith("data: [DONE]\n\n: x-gymfast-version-end 8\n\n")


def test_a_call_that_no_engine_saw_changes_nothing(place: Place) -> None:
    place.client.pull(FOLLOW, 7)
    for status in (401, 403, 404, 405, 422):
        for path in ("/pause", "/update_weights", "/update_weights_from_disk", "/resume"):
            place.engine.failures[path] = status, "no"
            place.call(path, {"weight_version": "9"})
    assert place.ask(exact_version=7)[0] == 200
    assert place.call("/gymfast/ready")[0] == 200


def test_a_client_waits_for_the_version(place: Place) -> None:
    requests = VersionedRequests([place.url], timeout_s=LIMIT_S)
    place.client.pull(FOLLOW, 7)
    thread = threading.Timer(0.3, place.client.pull, (FOLLOW, 8))
    thread.start()
    answer = requests.post("/v1/completions", {}, min_version=8, patience_s=LIMIT_S)
    thread.join()
    assert (answer.start_version, answer.end_version, answer.body["version"]) == (8, 8, "8")
    with pytest.raises(ChainError, match="no engine serves exactly version 7 any more"):
        requests.post("/v1/completions", {}, exact_version=7, patience_s=LIMIT_S)
    with pytest.raises(DeadlineError, match="no engine took the request within 0 s"):
        requests.post("/v1/completions", {}, min_version=9, patience_s=0)
    place.engine.failures["/v1/completions"] = 400, "no prompt"
    with pytest.raises(ChannelError, match="answered 400: no prompt"):
        requests.post("/v1/completions", {}, min_version=8, patience_s=LIMIT_S)


def test_a_client_finds_the_engine_that_still_has_the_version() -> None:
    engines = [Engine(), Engine()]
    with serving(Admission(engines[0])) as old, serving(Admission(engines[1])) as new:
        VLLMClient(old).pull(FOLLOW, 7)
        VLLMClient(new).pull(FOLLOW, 8)
        requests = VersionedRequests([new, old, "http://127.0.0.1:9"], timeout_s=LIMIT_S)
        for _ in range(4):
            answer = requests.post("/v1/completions", {}, exact_version=7, patience_s=LIMIT_S)
            assert (answer.url, answer.end_version) == (old, 7)


def test_an_engine_without_admission_is_no_answer() -> None:
    with serving(Engine()) as url:
        requests = VersionedRequests([url])
        with pytest.raises(ChannelError, match="does not say which version it serves"):
            requests.post("/v1/completions", {}, min_version=1)
        assert requests.post("/v1/completions", {}).start_version is None


def test_a_server_of_ones_own_tells_what_a_subscriber_holds() -> None:
    store, weights = MemoryStore(), {"w": np.arange(64, dtype=np.float32)}
    live = {"w": np.zeros(64, np.float32)}
    publisher = Publisher(store, "run")
    publisher.publish(weights, version=3)
    with Subscriber(store, "run", LiveTarget(live)) as subscriber:
        app = Admission(Engine(), served=lambda: Served.by(subscriber.status))
        with serving(app) as url:
            assert call(url, "/gymfast/ready")[0] == 503
            subscriber.pull()
            assert call(url, "/gymfast/ready")[1]["served_version"] == 3
            asked = {"weight_version": {"min_version": 4}}
            assert call(url, "/v1/completions", asked)[0] == 409
            publisher.publish({"w": weights["w"] + 1})
            subscriber.pull()
            assert call(url, "/v1/completions", asked)[0] == 200


def test_a_version_that_is_too_old_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMFAST_FRESHNESS_S", "0.000001")
    with serving(Admission(Engine())) as url:
        VLLMClient(url).pull(FOLLOW, 7)
        status, body, _ = call(url, "/gymfast/ready")
        assert (status, body["reason"]) == (503, "version 7 is older than the freshness limit")
        asked = {"weight_version": {"exact_version": 7}}
        assert call(url, "/v1/completions", asked)[0] == 200, "readiness only"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_freshness_limit_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("GYMFAST_FRESHNESS_S", text)
    with pytest.raises(ValueError, match="expected seconds"):
        Admission(Engine())


def test_several_api_processes_say_so() -> None:
    class Arguments:
        api_server_count = 2

    class App:
        class state:  # noqa: N801 - as Starlette names it
            args = Arguments

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Admission(Engine())({**scope, "app": App}, receive, send)

    with serving(app) as url:
        status, body, _ = call(url, "/gymfast/ready")
        assert status == 503 and "--api-server-count 1" in body["reason"]
        asked = {"weight_version": {"min_version": 0}}
        assert call(url, "/v1/completions", asked)[0] == 409


@pytest.mark.parametrize("num_servers", [1, 2])
def test_several_api_processes_end_before_they_listen(num_servers: int) -> None:
    state = SimpleNamespace(args=SimpleNamespace(api_server_count=num_servers))
    scope = {"type": "lifespan", "app": SimpleNamespace(state=state)}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})

    asyncio.run(Admission(engine)(scope, receive, send))
    kind = "complete" if num_servers == 1 else "failed"
    assert [message["type"] for message in sent] == [f"lifespan.startup.{kind}"]
    assert num_servers == 1 or "--api-server-count 1" in sent[0]["message"]


def test_an_engine_that_fails_to_answer_is_not_relied_on() -> None:
    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise RuntimeError("the worker died")

    admission = Admission(engine)
    with serving(admission) as url:
        with pytest.raises(OSError, match=r".*"):
            call(url, "/update_weights", {"update_info": {"names": ["w"]}})
        status, body, _ = call(url, "/gymfast/ready")
    assert (status, body["state"]) == (503, "inconsistent")
