"""What admission looks at: paths, methods, headers, bodies and websockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gymfast.integrations.admission import Admission
from gymfast.integrations.admission_messages import MAX_BODY_BYTES
from gymfast.integrations.admission_rules import Served
from gymfast.sync import State


async def asked_of(
    app: Admission,
    path: str,
    body: bytes = b"{}",
    *headers: tuple[bytes, bytes],
    method: str = "POST",
    kind: str = "http",
) -> list[Any]:
    """What the application says to one request whose headers are only these."""
    said: list[Any] = []
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return left.pop() if left else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        said.append(message)

    await app({"type": kind, "path": path, "method": method, "headers": headers}, receive, send)
    return said


def status_of(app: Admission, path: str, *rest: Any, **more: Any) -> int:
    return int(asyncio.run(asked_of(app, path, *rest, **more))[0]["status"])


async def anything(scope: Any, receive: Any, send: Any) -> None:
    """An engine that answers each request with success."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def serving_state(state: State, version: int | None = 7) -> Admission:
    return Admission(anything, served=lambda: Served(state, version))


@pytest.mark.parametrize("state", [State.INCONSISTENT, State.HEALING])
def test_weights_that_may_be_anything_answer_nothing(state: State) -> None:
    app = serving_state(state)
    for method in ("POST", "PUT"):
        for path in PATHS:
            assert status_of(app, path, method=method) == 503, path
    assert status_of(app, "/v1/load_lora_adapter") == status_of(app, "/health") == 200


PATHS = [
    "/v1/completions",
    "/v2/embed",
    "/inference/v1/generate",
    "/generate",
    "/generative_scoring",
    "/invocations",
    "/vertex_generate",
    "/api/chat",
    "/api/generate",
    "/classify",
    "/cohere/v2/chat",
    "/encode",
    "/pooling",
    "/rerank",
    "/score",
]


@pytest.mark.parametrize("path", [*PATHS, "/a/route/of/a/plug-in"])
def test_a_header_is_heard_at_any_path(path: str) -> None:
    app = serving_state(State.CLEAN)
    for method in ("POST", "PUT", "GET"):
        for version, status in ((b"7", 200), (b"3", 409)):
            header = (b"x-gymfast-exact-version", version)
            assert status_of(app, path, b"{}", header, method=method) == status


def test_a_websocket_is_closed_where_a_request_would_be_refused() -> None:
    header = (b"x-gymfast-exact-version", b"3")
    for app, headers, kind in (
        (serving_state(State.CLEAN), (), "websocket.accept"),
        (serving_state(State.CLEAN), (header,), "websocket.close"),
        (serving_state(State.CLEAN), (header, header), "websocket.close"),
        (serving_state(State.HEALING), (), "websocket.close"),
        (serving_state(State.INCONSISTENT), (), "websocket.close"),
    ):
        (said,) = asyncio.run(asked_of(app, "/v1/realtime", b"", *headers, kind="websocket"))
        assert said["type"] == kind


@pytest.mark.parametrize("kind", [b"application/json", b"Application/JSON", b"", None])
def test_a_body_that_may_be_json_is_read(kind: bytes | None) -> None:
    app, asks = serving_state(State.CLEAN), b'{"weight_version": {"exact_version": 3}}'
    headers = () if kind is None else ((b"content-type", kind),)
    assert status_of(app, "/v1/completions", asks, *headers) == 409
    assert status_of(app, "/v1/completions", asks, (b"content-type", b"text/plain")) == 200


def test_a_header_that_is_given_twice_is_a_bad_request() -> None:
    headers = [(b"x-gymfast-exact-version", version) for version in (b"3", b"7")]
    assert status_of(serving_state(State.CLEAN), "/v1/completions", b"{}", *headers) == 400


def test_a_body_is_not_read_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    app, num_read = serving_state(State.CLEAN), 0
    told = ((b"content-length", str(MAX_BODY_BYTES + 1).encode()),)
    assert status_of(app, "/v1/completions", b"{}", *told) == 413
    monkeypatch.setattr("gymfast.integrations.admission_messages.MAX_BODY_BYTES", 1000)

    async def receive() -> Any:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def send(message: Any) -> None:
        assert message.get("status", 413) == 413

    scope = {"type": "http", "path": "/generate", "method": "POST", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert num_read == 11


def test_an_answer_says_unknown_if_its_version_went_and_came_back() -> None:
    async def engine(scope: Any, receive: Any, send: Any) -> None:
        status, path = 200, scope["path"]
        body = (await receive())["body"]
        if path == "/update_weights_from_disk" and b'"8"' in body:
            status = 500
        elif path == "/generate":
            for version in (b"8", b"7"):
                update = b'{"weight_version": "' + version + b'"}'
                await asked_of(app, "/update_weights_from_disk", update)
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    app = Admission(engine)
    status_of(app, "/update_weights_from_disk", b'{"weight_version": "7"}')
    (start, _) = asyncio.run(asked_of(app, "/generate"))
    headers = dict(start["headers"])
    assert headers[b"x-gymfast-version-start"] == b"7"
    assert headers[b"x-gymfast-version-end"] == b"unknown"
    assert status_of(app, "/generate", b'{"weight_version": {"exact_version": 7}}') == 409


def test_an_exact_answer_without_a_length_is_replaced_before_it_starts() -> None:
    served = Served(State.CLEAN, 7)

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        nonlocal served
        served = Served(State.CLEAN, 8)
        await anything(scope, receive, send)

    app = Admission(engine, served=lambda: served)
    assert status_of(app, "/generate", b'{"weight_version": {"exact_version": 7}}') == 409
