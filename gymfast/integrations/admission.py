"""An ASGI middleware that admits requests by the version of the weights: 409 and try again.

`vllm serve MODEL --middleware gymfast.integrations.admission.Admission`. See docs/serving.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from gymfast.integrations.admission_messages import (
    App,
    Message,
    Receive,
    Reply,
    Send,
    again,
    answer,
    body_of,
    refuse,
    with_length,
)
from gymfast.integrations.admission_rules import (
    FIELD,
    UPDATE_RETRY_S,
    Refusal,
    Served,
    constraint_of,
    decide,
    take_constraint,
)
from gymfast.integrations.engine_watch import CALLS, Ends, EngineWatch

READY, VERSION = "/gymfast/ready", "/gymfast/version"
FRESHNESS = "GYMFAST_FRESHNESS_S"
_INFERENCE = ("/v1/", "/inference/", "/generate", "/invocations")
_NO_INFERENCE = "lora_adapter"  # calls that load and unload adapters


class Admission:
    """Stands before an engine's HTTP server, or any ASGI application.

    What is served is what `served` says; without it, what the calls that update an engine tell.
    """

    def __init__(self, app: App, served: Callable[[], Served] | None = None) -> None:
        """Raises ValueError if GYMFAST_FRESHNESS_S is no number of seconds."""
        self._app = app
        self._watch = EngineWatch(_freshness_s())
        self._given = served
        self._num_servers = 1

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request, or has the application answer it."""
        path = _path_of(scope) if scope["type"] == "http" else ""
        self._num_servers = _num_servers(scope)
        if path in (READY, VERSION):
            await self._tell(path, send)
        elif path in CALLS and scope["method"] == "POST":
            await self._observe(path, scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and _is_inference(path):
            await self._admit(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _served(self) -> Served:
        if self._given is not None:
            return self._given()
        if self._num_servers > 1:
            return Served(
                error=f"the server has {self._num_servers} API processes, and updates pass "
                "through one of them only: start it with --api-server-count 1"
            )
        return self._watch.served

    async def _tell(self, path: str, send: Send) -> None:
        served = self._served()
        problem = served.problem
        fields = {
            "ready": not problem,
            "reason": problem,
            "state": served.state.value,
            "served_version": served.exact,
            "age_s": served.age_s,
        }
        is_refused = path == READY and bool(problem)
        status = HTTPStatus.SERVICE_UNAVAILABLE if is_refused else HTTPStatus.OK
        retry_s = UPDATE_RETRY_S if is_refused else 0
        await answer(send, status, msgspec.json.encode(fields), retry_s=retry_s)

    async def _observe(self, path: str, scope: Message, receive: Receive, send: Send) -> None:
        """Lets a call through that may change what is served, and learns what became of it."""
        request, said, status = Ends(), Ends(), None
        is_told = False
        call = self._watch.begin(path)

        async def received() -> Message:
            message = await receive()
            request.add(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            nonlocal status, is_told
            if message["type"] == "http.response.start":
                status = int(message["status"])
            said.add(message.get("body", b""))
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and not is_told:  # before the client can ask for the new version
                is_told = True
                self._watch.end(call, request.data, status, said.data)
            await send(message)

        try:
            await self._app(scope, received, sent)
        except Exception as error:  # its answer is made outside of all middleware
            if not is_told:
                is_told, text = True, str(error).encode()
                self._watch.end(call, request.data, HTTPStatus.INTERNAL_SERVER_ERROR, text)
            raise
        finally:
            if not is_told:
                self._watch.end(call, request.data, None, b"")

    async def _admit(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        body: bytes | None = None
        try:
            constraint = constraint_of(headers)
            if "json" in headers.get("content-type", ""):
                body = await body_of(receive)
                if body is None:
                    return  # the client is gone
                asked, shorter = take_constraint(body)
                if asked and constraint and asked != constraint:
                    raise ValueError(f"the header asks for {constraint}, {FIELD} for {asked}")
                constraint = constraint or asked
        except ValueError as error:
            await refuse(send, Refusal(HTTPStatus.BAD_REQUEST, str(error), None, False))
            return
        served = self._served()
        if refusal := decide(constraint, served):
            await refuse(send, refusal)
            return
        if body is not None:
            if len(shorter) != len(body):
                scope = {**scope, "headers": with_length(scope["headers"], len(shorter))}
            receive = again(shorter, receive)
        reply = Reply(send, constraint, served, self._served)
        await self._app(scope, receive, reply.send)


def _freshness_s() -> float | None:
    text = os.environ.get(FRESHNESS)
    try:
        value = float(text) if text else None
    except ValueError:
        value = -1.0
    if value is not None and not value > 0:
        raise ValueError(f"{FRESHNESS} is {text!r}, expected seconds, more than 0")
    return value


def _is_inference(path: str) -> bool:
    return path.startswith(_INFERENCE) and _NO_INFERENCE not in path


def _num_servers(scope: Message) -> int:
    """How many processes answer at this address, where vLLM says so."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    return int(getattr(arguments, "api_server_count", None) or 1)


def _path_of(scope: Message) -> str:
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path
