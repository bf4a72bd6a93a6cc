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
    BodyTooLongError,
    Message,
    Receive,
    Reply,
    Send,
    again,
    answer,
    body_of,
    close_socket,
    refuse,
    refuse_to_start,
    with_length,
)
from gymfast.integrations.admission_rules import (
    EXACT_HEADER,
    FIELD,
    MIN_HEADER,
    UPDATE_RETRY_S,
    Refusal,
    Served,
    constraint_of,
    decide,
    take_constraint,
)
from gymfast.integrations.engine_calls import Ends, is_watched
from gymfast.integrations.engine_watch import EngineWatch

READY, VERSION = "/gymfast/ready", "/gymfast/version"
FRESHNESS = "GYMFAST_FRESHNESS_S"
_INFERENCE = (
    "/v1/",
    "/v2/",
    "/inference/",
    "/generate",
    "/generative_scoring",
    "/invocations",
    "/vertex_generate",
    "/api/chat",
    "/api/generate",
    "/classify",
    "/cohere/",
    "/encode",
    "/pooling",
    "/rerank",
    "/score",
)
_METHODS = ("POST", "PUT")
_ASKING = (MIN_HEADER.encode(), EXACT_HEADER.encode())
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
        kind = scope["type"]
        path = _path_of(scope) if kind in ("http", "websocket") else ""
        self._num_servers = _num_servers(scope)
        if kind == "websocket":
            await self._admit_socket(scope, receive, send)
        elif kind == "lifespan" and self._blind:
            await refuse_to_start(receive, send, self._blind)
        elif kind != "http":
            await self._app(scope, receive, send)
        elif path in (READY, VERSION):
            await self._tell(path, send)
        elif is_watched(path, scope["method"]):
            await self._observe(path, scope, receive, send)
        elif _asks(scope) or (scope["method"] in _METHODS and _is_inference(path)):
            await self._admit(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @property
    def _blind(self) -> str:
        """Why nothing can be known of what is served; "" if it can."""
        if self._given is not None or self._num_servers == 1:
            return ""
        return (
            f"the server has {self._num_servers} API processes, and each update passes through one "
            "of them only: start it with --api-server-count 1, or without "
            "gymfast.integrations.admission"
        )

    def _served(self) -> Served:
        if self._given is not None:
            return self._given()
        return Served(error=self._blind) if self._blind else self._watch.served

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

    async def _admit_socket(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            refusal = decide(constraint_of(_headers_of(scope)), self._served())
            reason = refusal.text if refusal else ""
        except ValueError as error:
            reason = str(error)
        if reason:
            await close_socket(receive, send, reason)
        else:
            await self._app(scope, receive, send)

    async def _admit(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = _headers_of(scope)
        body: bytes | None = None
        try:
            constraint = constraint_of(headers)
            if scope["method"] in _METHODS and _may_be_json(headers):
                body = await body_of(scope["headers"], receive)
                if body is None:
                    return  # the client is gone
                asked, shorter = take_constraint(body)
                if asked and constraint and asked != constraint:
                    raise ValueError(f"the header asks for {constraint}, {FIELD} for {asked}")
                constraint = constraint or asked
        except ValueError as error:
            is_long = isinstance(error, BodyTooLongError)
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE if is_long else HTTPStatus.BAD_REQUEST
            await refuse(send, Refusal(status, str(error), None, False))
            return
        served = self._served()
        if refusal := decide(constraint, served):
            await refuse(send, refusal)
            return
        if body is not None:
            if shorter is not body:
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


def _asks(scope: Message) -> bool:
    return any(name in _ASKING for name, _ in scope["headers"])


def _headers_of(scope: Message) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), v.decode("latin-1")) for name, v in scope["headers"]]


def _may_be_json(headers: list[tuple[str, str]]) -> bool:
    """True if a server may read the body as JSON: some do so where no type is given."""
    kinds = [value.lower() for name, value in headers if name == "content-type"]
    return not any(kinds) or any("json" in kind for kind in kinds)


def _num_servers(scope: Message) -> int:
    """How many processes answer at this address, where vLLM says so."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    return int(getattr(arguments, "api_server_count", None) or 1)


def _path_of(scope: Message) -> str:
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path
