"""A proxy before an object store: loses requests and replies, gives other answers, cuts, flips."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from object_double import Quiet, serve

_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}
Kind = Literal["answer", "answer late", "drop", "lose", "stall", "stall late", "cut", "flip"]


@dataclass
class Trouble:
    """What happens to the next `count` requests with that method whose path holds `path`.

    answer: the store never sees it, the client gets `status` and `code`; answer late: it does,
    and the client gets that answer all the same. drop, lose: the connection ends before, after
    the store has seen it. stall, stall late: no answer for `seconds`, before, after. cut: half of
    the body. flip: one bit of it. `skip` such requests pass first.
    """

    kind: Kind
    method: str
    path: str = ""
    status: int = 500
    code: str = "InternalError"
    count: int = 1
    skip: int = 0
    seconds: float = 0.0
    text: str = ""


@dataclass
class Proxy:
    """What the proxy does; `seen` are the requests, with the trouble each had ("" for none)."""

    troubles: list[Trouble] = field(default_factory=list)
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    endpoint: str = ""

    def take(self, method: str, path: str) -> Trouble | None:
        """The trouble of this request."""
        with self.lock:
            found = None
            for trouble in self.troubles:
                if trouble.method == method and trouble.path in path and trouble.count:
                    if trouble.skip:
                        trouble.skip -= 1
                        continue
                    trouble.count -= 1
                    found = trouble
                    break
            self.seen.append((method, path, found.kind if found else ""))
            return found


@contextmanager
def serve_proxy(target: str) -> Iterator[Proxy]:
    """A proxy before the server at that address."""
    proxy = Proxy()
    host = urlsplit(target).netloc

    class Handler(_Handler):
        state = proxy
        target_host = host
        stop = threading.Event()

    with serve(Handler) as proxy.endpoint:
        try:
            yield proxy
        finally:
            Handler.stop.set()


class _Handler(Quiet):
    state: Proxy
    target_host: str
    stop: threading.Event

    def _route(self) -> None:
        data = self.body()
        trouble = self.state.take(self.command, self.path)
        kind = trouble.kind if trouble else ""
        if trouble is None:
            self._reply(*self._forward(data))
        elif kind == "answer":
            self.fail(trouble.status, trouble.code, Message=trouble.text)
        elif kind == "answer late":
            self._forward(data)
            self.fail(trouble.status, trouble.code, Message=trouble.text)
        elif kind in ("drop", "lose"):
            if kind == "lose":
                self._forward(data)
            self.close_connection = True
        elif kind.startswith("stall"):
            if kind == "stall late":
                self._forward(data)
            self.stop.wait(trouble.seconds)
            self.close_connection = True
        else:
            self._spoil(kind, *self._forward(data))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PROPFIND = _route  # noqa: N815

    def _forward(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.target_host, timeout=60)
        try:
            connection.request(self.command, self.path, data, dict(self.headers.items()))
            reply = connection.getresponse()
            headers = {n: v for n, v in reply.getheaders() if n.lower() not in _HOP}
            if self.command == "HEAD":
                headers["content_length"] = reply.getheader("content-length", "0")
            return reply.status, headers, reply.read()
        finally:
            connection.close()

    def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        length = headers.pop("content_length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", length)
        self.end_headers()
        self.wfile.write(body)

    def _spoil(self, kind: str, status: int, headers: dict[str, str], body: bytes) -> None:
        if kind == "flip":
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 4]) + body[middle + 1 :]
        else:
            headers["content_length"] = str(len(body))
            body = body[: len(body) // 2]
            self.close_connection = True
        self._reply(status, headers, body)
