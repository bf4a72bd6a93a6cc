"""An ASGI application with the calls of vLLM's and SGLang's servers, and requests that can wait."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Engine:
    """Answers with the version that is live when it answers; `failures` are texts by path."""

    def __init__(self) -> None:
        self.version = "default"
        self.failures: dict[str, tuple[int, str]] = {}
        self.bodies: list[tuple[str, bytes]] = []
        self.raises = False  # as vLLM does: its answer is made outside of all middleware
        self.waiting = 0
        self.is_open = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        self.bodies.append((path, body))
        if dict(scope["headers"]).get(b"content-length", b"0") != str(len(body)).encode():
            await _json(send, 400, {"error": "the length is not that of the body"})
        elif self.raises and path in self.failures:
            raise RuntimeError(self.failures[path][1])
        elif path in self.failures:
            status, text = self.failures[path]
            await _json(send, status, {"success": False, "error": {"message": text}})
        elif path == "/v1/completions":
            await self._complete(json.loads(body), send)
        else:
            fields = json.loads(body or b"{}")
            self.version = fields.get("weight_version") or fields.get("new_version", self.version)
            await _json(send, 200, {"success": True})

    async def _complete(self, fields: Any, send: Any) -> None:
        if fields.get("stream"):
            await _start(send, 200, [(b"content-type", b"text/event-stream; charset=utf-8")])
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        self.waiting += 1
        while not self.is_open:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.005)
        self.waiting -= 1
        if fields.get("stream"):
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        else:
            await _json(send, 200, {"version": self.version, "fields": fields})


async def _start(send: Any, status: int, headers: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _json(send: Any, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await _start(send, status, headers)
    await send({"type": "http.response.body", "body": body})
