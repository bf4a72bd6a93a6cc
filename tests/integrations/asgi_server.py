"""An ASGI application on a port of loopback: by uvicorn, or by the few lines of HTTP/1.1 below."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

HAS_UVICORN = importlib.util.find_spec("uvicorn") is not None


@contextmanager
def serving(app: Any, *, with_uvicorn: bool = False) -> Iterator[str]:
    """The URL at which the application answers inside the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with _uvicorn(app, listener) if with_uvicorn else _plain(app, listener):
            yield url


@contextmanager
def _uvicorn(app: Any, listener: socket.socket) -> Iterator[None]:
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@contextmanager
def _plain(app: Any, listener: socket.socket) -> Iterator[None]:
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def start() -> None:
        await asyncio.start_server(lambda r, w: _connection(app, r, w), sock=listener.dup())
        ready.set()

    def run() -> None:
        loop.create_task(start())
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _connection(app: Any, reader: asyncio.StreamReader, writer: Any) -> None:
    """One request of one connection; the answer ends where the connection does."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    pairs = [line.split(":", 1) for line in head[1:] if line]
    headers = [(k.strip().lower().encode(), v.strip().encode()) for k, v in pairs]
    left = int(dict(headers).get(b"content-length", b"0"))
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(path),
        "query_string": query.encode(),
        "headers": headers,
        "root_path": "",
    }

    async def receive() -> dict[str, Any]:
        nonlocal left
        part = await reader.read(min(left, 1 << 14)) if left else b""
        left -= len(part)
        return {"type": "http.request", "body": part, "more_body": left > 0}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            lines = [f"HTTP/1.1 {message['status']} -".encode()]
            lines += [k + b": " + v for k, v in message.get("headers", ())]
            writer.write(b"\r\n".join([*lines, b"connection: close", b"", b""]))
        else:
            writer.write(message.get("body", b""))
        await writer.drain()

    try:
        await app(scope, receive, send)
    finally:
        writer.close()
