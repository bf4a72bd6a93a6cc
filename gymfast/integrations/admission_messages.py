"""What an ASGI middleware does with the messages of a request and its answer, for admission."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from gymfast.integrations.admission_rules import (
    END_HEADER,
    START_HEADER,
    Constraint,
    Refusal,
    Served,
    mixed,
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
MAX_BODY_BYTES = 64 << 20
"""The longest body that is read to see which version it asks for: no key was asked for yet."""


class BodyTooLongError(ValueError):
    """A body is over the limit."""


@dataclass
class Reply:
    """The answer of the engine, with what was served at its start and at its end.

    An answer with a length is complete when it starts. A stream tells its end in a comment, which
    readers of events skip, if its request asked for a version.
    """

    to_client: Send
    constraint: Constraint
    at_start: Served
    now: Callable[[], Served]
    _is_replaced: bool = field(default=False, init=False)
    _is_stream: bool = field(default=False, init=False)

    async def send(self, message: Message) -> None:
        """Passes a message of the application on."""
        if message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] == "http.response.body" and self._is_replaced:
            return
        elif self._is_stream and not message.get("more_body") and "body" in message:
            end = _text_of(self.now().exact_since(self.at_start))
            comment = f": {END_HEADER} {end}\n\n".encode()
            await self.to_client({**message, "body": message["body"] + comment})
        else:
            await self.to_client(message)

    async def _start(self, message: Message) -> None:
        headers = list(message.get("headers", ()))
        names = {name.lower(): value for name, value in headers}
        start = self.at_start.exact
        headers.append((START_HEADER.encode(), _text_of(start).encode()))
        now = self.now()
        served = (END_HEADER.encode(), _text_of(now.exact_since(self.at_start)).encode())
        refusal = mixed(self.constraint, self.at_start, now)
        if refusal is not None and message["status"] == HTTPStatus.OK:
            self._is_replaced = True
            await refuse(self.to_client, refusal, [headers[-1], served])
            return
        if b"content-length" in names:
            headers.append(served)
        elif b"text/event-stream" in names.get(b"content-type", b""):
            self._is_stream = bool(self.constraint)
        await self.to_client({**message, "headers": headers})


async def body_of(headers: Headers, receive: Receive) -> bytes | None:
    """The whole body; None if its client went away. Raises BodyTooLongError, where told unread."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            _check_length(int(value[:20]))
    parts, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        _check_length(num_bytes)
        if not message.get("more_body"):
            return b"".join(parts)


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise BodyTooLongError(
            f"the body is longer than {MAX_BODY_BYTES} bytes, the limit of admission"
        )


def again(body: bytes, receive: Receive) -> Receive:
    """Gives the body once more, then whatever comes."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return left.pop() if left else await receive()

    return received


def with_length(headers: Headers, num_bytes: int) -> list[tuple[bytes, bytes]]:
    """The headers of a request whose body has another length now."""
    others = [(name, value) for name, value in headers if name != b"content-length"]
    return [*others, (b"content-length", str(num_bytes).encode())]


def _text_of(version: int | None) -> str:
    return "unknown" if version is None else str(version)


async def refuse(send: Send, refusal: Refusal, more: Headers = ()) -> None:
    """Sends a refusal; `more` are headers that say what was served."""
    served = (START_HEADER.encode(), _text_of(refusal.served_version).encode())
    headers = list(more) or [served]
    await answer(send, refusal.status, refusal.body, retry_s=refusal.retry_s, more=headers)


async def close_socket(receive: Receive, send: Send, reason: str) -> None:
    """Refuses a websocket before it is opened; its client may come again."""
    await receive()
    await send({"type": "websocket.close", "code": 1013, "reason": reason[:100]})


async def refuse_to_start(receive: Receive, send: Send, reason: str) -> None:
    """Has the server end before it listens, with the reason in its log."""
    await receive()
    await send({"type": "lifespan.startup.failed", "message": f"gymfast: {reason}"})


async def answer(
    send: Send, status: HTTPStatus, body: bytes, *, retry_s: int = 0, more: Headers = ()
) -> None:
    """Sends JSON as the whole answer."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    if retry_s:
        headers.append((b"retry-after", str(retry_s).encode()))
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
