"""A store over HTTP, for the clients of gymfast.stores.remote: `gymfast relay` serves one.

GET, HEAD, PUT and DELETE of /objects/KEY (GET with Range, PUT with If-None-Match: * for a create),
GET of /list?prefix=PREFIX (a key a line) and of /status (JSON). Errors are JSON, with a message.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

from gymfast.errors import ConflictError, GymfastError, NotFoundError
from gymfast.keyed_http import KeyedHandler, KeyedServer
from gymfast.stores.base import Store, check_key

OBJECTS = "/objects/"
_BINARY = "application/octet-stream"
_PIECE_BYTES = 8 << 20
_MAX_PUT_BYTES = 64 << 20
_RANGE = re.compile(r"bytes=([0-9]{1,20})-([0-9]{1,20})")
_log = logging.getLogger(__name__)
MayWrite = Callable[[str], bool]


class StoreServer(KeyedServer):
    """Serves a store; `may_write` says which keys clients may put and delete (default: all)."""

    def __init__(
        self,
        host: str,
        port: int,
        store: Store,
        key: bytes | None = None,
        *,
        may_write: MayWrite = lambda _: True,
        status: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """A server that listens already; `status` is asked for /status. Errors: see KeyedServer."""
        self.store = store
        self.may_write = may_write
        self.status = status
        self._served = 0
        self._lock = threading.Lock()
        super().__init__(host, port, _Handler, key, "read and, in part, write this store")

    @property
    def url(self) -> str:
        """The address of the store for clients."""
        return f"relay://{self.address}"

    @property
    def served_bytes(self) -> int:
        """Bytes of objects that clients were sent."""
        return self._served

    def count(self, num_bytes: int) -> None:
        """Adds to `served_bytes`."""
        with self._lock:
            self._served += num_bytes


class _RefusedError(Exception):
    """A request that is answered with a status other than OK."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(KeyedHandler):
    server: StoreServer
    protocol_version = "HTTP/1.1"  # connections stay open
    offer = f"GET, HEAD, PUT or DELETE of {OBJECTS}KEY, GET of /list or /status"

    def do_GET(self) -> None:  # noqa: N802 - the names that http.server calls
        self._answer(self._get)

    def do_HEAD(self) -> None:  # noqa: N802
        self._answer(lambda: self._send_head(HTTPStatus.OK, self._store.size(self._key())))

    def do_PUT(self) -> None:  # noqa: N802
        self._answer(self._put)

    def do_DELETE(self) -> None:  # noqa: N802
        self._answer(self._delete)

    @property
    def _store(self) -> Store:
        return self.server.store

    def _answer(self, work: Callable[[], None]) -> None:
        if not self.is_authorized():
            return
        if self._has_unread_body():
            self.close_connection = True
        try:
            work()
        except _RefusedError as refusal:
            self.reply(refusal.status, str(refusal))
        except NotFoundError as error:
            self.reply(HTTPStatus.NOT_FOUND, str(error))
        except ConflictError as error:
            self.reply(HTTPStatus.CONFLICT, str(error))
        except ValueError as error:
            self.reply(HTTPStatus.BAD_REQUEST, str(error))
        except GymfastError as error:
            _log.warning("%s %s: %s", self.command, self.path, error)
            self.reply(HTTPStatus.BAD_GATEWAY, str(error))

    def _has_unread_body(self) -> bool:
        """True if bytes follow that nobody reads here: they must not become the next request."""
        is_put = self.command == "PUT"
        return "Transfer-Encoding" in self.headers or (
            "Content-Length" in self.headers and not is_put
        )

    def _get(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/list":
            prefix = parse_qs(parts.query, keep_blank_values=True).get("prefix", [""])[0]
            body = "".join(f"{key}\n" for key in self._store.list(prefix)).encode()
            self._send(HTTPStatus.OK, len(body), iter([body]), "text/plain; charset=utf-8")
        elif parts.path == "/status":
            fields = {**self.server.status(), "served_bytes": self.server.served_bytes}
            body = json.dumps(fields).encode()
            self._send(HTTPStatus.OK, len(body), iter([body]), "application/json")
        else:
            self._get_object()

    def _get_object(self) -> None:
        key = self._key()
        size = self._store.size(key)
        sent = self.headers.get("Range")
        if sent is None and size <= _PIECE_BYTES:  # in one piece, as it may be replaced meanwhile
            blob = self._store.get(key, max_bytes=_PIECE_BYTES)
            self._send(HTTPStatus.OK, len(blob), iter([blob]), _BINARY)
            return
        if sent is None:
            self._send_object(HTTPStatus.OK, key, range(size), size)
            return
        match = _RANGE.fullmatch(sent)
        if match is None:
            self._refuse(HTTPStatus.BAD_REQUEST, f"Range is {sent!r}, expected bytes=FIRST-LAST")
        first, last = int(match[1]), int(match[2])
        if not first <= last < size:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_header("Content-Range", f"bytes */{size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send_object(HTTPStatus.PARTIAL_CONTENT, key, range(first, last + 1), size)

    def _send_object(self, status: HTTPStatus, key: str, which: range, size: int) -> None:
        """Sends bytes of an object; a store that fails half way ends the connection."""
        pieces = (
            self._store.get_range(key, start, min(_PIECE_BYTES, which.stop - start))
            for start in range(which.start, which.stop, _PIECE_BYTES)
        )
        first = next(pieces, b"")  # before the head, so that a failure has a status of its own
        extra = {"Content-Range": f"bytes {which.start}-{which.stop - 1}/{size}"}

        def all_pieces() -> Iterator[bytes]:
            yield first
            yield from pieces

        self._send(
            status,
            len(which),
            all_pieces(),
            _BINARY,
            extra if status is HTTPStatus.PARTIAL_CONTENT else {},
        )

    def _send(
        self,
        status: HTTPStatus,
        num_bytes: int,
        pieces: Iterator[bytes],
        kind: str,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self._send_head(status, num_bytes, {"Content-Type": kind, **(extra or {})})
        try:
            for piece in pieces:
                self.wfile.write(piece)
                self.server.count(len(piece))
        except GymfastError as error:
            _log.warning("%s %s ends half way: %s", self.command, self.path, error)
            self.close_connection = True
        except OSError as error:
            _log.info("%s is gone: %s", self.client_address[0], error)
            self.close_connection = True

    def _send_head(
        self, status: HTTPStatus, num_bytes: int, extra: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        for name, value in (extra or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def _put(self) -> None:
        key = self._writable_key()
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MAX_PUT_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"Content-Length is {length!r}, expected up to {_MAX_PUT_BYTES} bytes",
            )
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True  # the client is gone
            return
        if self.headers.get("If-None-Match") == "*":
            self._store.create(key, body)
        else:
            self._store.put(key, body)
        self._send_head(HTTPStatus.OK, 0)

    def _delete(self) -> None:
        self._store.delete(self._writable_key())
        self._send_head(HTTPStatus.OK, 0)

    def _writable_key(self) -> str:
        key = self._key()
        if not self.server.may_write(key):
            self._refuse(
                HTTPStatus.FORBIDDEN,
                f"'{key}' may not be written here: a relay passes on leases and statuses of "
                "readers only; publish to the store behind it",
            )
        return key

    def _key(self) -> str:
        path = urlsplit(self.path).path
        if not path.startswith(OBJECTS):
            self._refuse(HTTPStatus.NOT_FOUND, f"{path} is not there, expected {self.offer}")
        return check_key(unquote(path.removeprefix(OBJECTS)))

    def _refuse(self, status: HTTPStatus, message: str) -> NoReturn:
        raise _RefusedError(status, message)
