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
Kind = Literal[
    *("answer", "answer late", "drop", "lose", "stall", "stall late", "cut", "flip"),
    *("say", "short", "shifted", "whole", "endless", "lie"),
]


@dataclass
class Trouble:
    """What happens to the next `count` requests with that method whose path holds `path`.

    answer: the store never sees it, the client gets `status` and `code`; answer late: it does,
    and the client gets that answer all the same. drop, lose: the connection ends before, after
    the store has seen it. stall, stall late: no answer for `seconds`, before, after. cut: half of
    the body. flip: one bit of it. say: `body` is the answer. short: a range shorter than asked for,
    that says so. shifted: another range than asked for. whole: all bytes in place of a range.
    endless: a body without length and end. lie: a length that is twice the true one. `skip` such
    requests pass first.
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
    body: bytes = b""


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
        elif kind == "say":
            self.answer(trouble.status, trouble.body)
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
            self._spoil(kind, *self._forward(data, is_whole=kind == "whole"))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PROPFIND = _route  # noqa: N815

    def _forward(self, data: bytes, *, is_whole: bool = False) -> tuple[int, dict[str, str], bytes]:
        sent = dict(self.headers.items())
        if is_whole:
            sent = {name: value for name, value in sent.items() if name.lower() != "range"}
        connection = http.client.HTTPConnection(self.target_host, timeout=60)
        try:
            connection.request(self.command, self.path, data, sent)
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
        elif kind == "short":
            start, _, size = _range_of(headers)
            body = body[: len(body) // 2]
            headers["content-range"] = f"bytes {start}-{start + len(body) - 1}/{size}"
        elif kind == "shifted":
            start, stop, size = _range_of(headers)
            headers["content-range"] = f"bytes {start + 1}-{stop}/{size}"
        elif kind == "lie":
            length = headers.get("content_length", str(len(body)))
            headers["content_length"] = str(2 * int(length))
            self.close_connection = True
        elif kind == "endless":
            self._send_for_ever(status, headers)
            return
        elif kind == "cut":
            headers["content_length"] = str(len(body))
            body = body[: len(body) // 2]
            self.close_connection = True
        self._reply(status, headers, body)

    def _send_for_ever(self, status: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while not self.stop.is_set():
            self.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")


def _range_of(headers: dict[str, str]) -> tuple[int, int, str]:
    """First and last byte of a range, and the size of the object, as they stand in its header."""
    found = {name.lower(): name for name in headers}
    span, _, size = headers.pop(found["content-range"]).removeprefix("bytes ").partition("/")
    start, _, stop = span.partition("-")
    return int(start), int(stop), size
