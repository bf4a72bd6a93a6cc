"""An HTTP server that listens on loopback, or asks for a key, and refuses in one form of JSON."""

from __future__ import annotations

import hmac
import io
import ipaddress
import json
import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gymfast.errors import GymfastError

_TIMEOUT_S = 30.0  # for a client that stops in the middle of its request
_MAX_WAITING = 512  # connections without a whole head of a request
_MAX_HEAD_BYTES = 64 << 10
MESSAGE_HEADER = "Gymfast-Message"
_MAX_MESSAGE_CHARS = 1000
_log = logging.getLogger(__name__)


class KeyedServer(ThreadingHTTPServer):
    """Answers each client on a thread of its own.

    With a key only requests with the header `Authorization: Bearer KEY` are answered. Who sends
    the head of a request too slowly, or leaves many connections without one, is disconnected: such
    connections keep nobody else out.
    """

    request_queue_size = 128

    def __init__(
        self, host: str, port: int, handler: type[KeyedHandler], key: bytes | None, danger: str
    ) -> None:
        """A server that listens already; port 0 is any free one.

        `danger` says what whoever reaches it may do.
        Raises ValueError for a host beyond loopback without a key, or a key that no header can
        carry; GymfastError if the address cannot be had.
        """
        self.authorization = None if key is None else bearer(key)
        self._waiting: dict[socket.socket, float] = {}
        self._waiting_lock = threading.Lock()
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if key is None and not ipaddress.ip_address(address[0]).is_loopback:
                raise ValueError(
                    f"host {host} is reached from other machines, and whoever reaches it may "
                    f"{danger}: give a key (--key-file), or listen on 127.0.0.1"
                )
            self.address_family = family
            super().__init__((str(address[0]), port), handler)
        except OSError as error:
            raise GymfastError(
                f"listen on {host} port {port}: {error.strerror or error}: choose another one"
            ) from error

    @property
    def address(self) -> str:
        """Host and port, as a URL has them."""
        host = str(self.server_address[0])
        return f"{f'[{host}]' if ':' in host else host}:{self.server_port}"

    def server_bind(self) -> None:
        """Binds without the look-up of a name that http.server makes."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def begin_head(self, connection: socket.socket) -> None:
        """Notes that a connection has to send the head of a request; too many, the oldest goes."""
        with self._waiting_lock:
            self._waiting.pop(connection, None)
            self._waiting[connection] = time.monotonic()
            while len(self._waiting) > _MAX_WAITING:
                self._disconnect(next(iter(self._waiting)))

    def end_head(self, connection: socket.socket) -> None:
        """Notes that the head is there, or that the connection ends."""
        with self._waiting_lock:
            self._waiting.pop(connection, None)

    def service_actions(self) -> None:
        """Disconnects those whose head takes too long; called now and then by serve_forever."""
        before_s = time.monotonic() - _TIMEOUT_S
        with self._waiting_lock:
            for connection in [c for c, since_s in self._waiting.items() if since_s < before_s]:
                self._disconnect(connection)

    def _disconnect(self, connection: socket.socket) -> None:
        """Ends a connection under the thread that reads it."""
        del self._waiting[connection]
        with suppress(OSError):  # it has just gone by itself
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Logs what ended the answer to a client: its own departure, or a bug."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            _log.info("%s is gone: %s", client_address, error)
        else:
            _log.exception("no answer to %s", client_address)


class KeyedHandler(BaseHTTPRequestHandler):
    """Answers of a KeyedServer; a subclass has the methods do_GET, do_POST and so on."""

    server: KeyedServer
    raw_requestline: bytes
    timeout = _TIMEOUT_S
    offer = ""

    def handle_one_request(self) -> None:
        """Answers a request; its head has to be there in time, however it is cut into packets."""
        self.server.begin_head(self.connection)
        try:
            super().handle_one_request()
        finally:
            self.server.end_head(self.connection)

    def parse_request(self) -> bool:
        """Reads the head, as the base class does; one that is too long is refused."""
        whole = self.rfile
        self.rfile = _Head(whole, _MAX_HEAD_BYTES - len(self.raw_requestline))
        try:
            is_whole = super().parse_request()
        except _HeadTooLongError:
            self.send_error(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the head of the request is over {_MAX_HEAD_BYTES} bytes",
            )
            is_whole = False
        finally:
            self.rfile = whole
        self.server.end_head(self.connection)
        return is_whole

    def is_authorized(self) -> bool:
        """True if the request has the key, or none is needed; else it is refused here."""
        expected = self.server.authorization
        sent = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if expected is None or hmac.compare_digest(sent, expected):
            return True
        text = "wrong or missing key: send the header 'Authorization: Bearer KEY'"
        self.reply(HTTPStatus.UNAUTHORIZED, text)
        return False

    def reply(self, status: HTTPStatus, message: str) -> None:
        """Sends what became of the request, and ends the connection."""
        self.close_connection = True
        body = json.dumps({"success": status is HTTPStatus.OK, "message": message}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if self.command == "HEAD":  # its answer has no body
            self.send_header(MESSAGE_HEADER, one_line(message))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses, other methods among it, in our form."""
        status = HTTPStatus(code)
        self.reply(status, f"{message or explain or status.phrase}; expected {self.offer}")

    def log_message(self, format: str, *args: object) -> None:
        """Logs a line of the base class."""
        _log.debug("%s: %s", self.client_address[0], format % args)


class _HeadTooLongError(Exception):
    """The head of a request has more bytes than are read."""


class _Head(io.BufferedIOBase):
    """Lines of a stream, up to so many bytes in all."""

    def __init__(self, stream: io.BufferedIOBase, num_bytes: int) -> None:
        self._stream = stream
        self._num_left = num_bytes

    def readline(self, size: int | None = -1, /) -> bytes:
        most = self._num_left + 1
        line = self._stream.readline(most if size is None or size < 0 else min(size, most))
        self._num_left -= len(line)
        if self._num_left < 0:
            raise _HeadTooLongError
        return line


def bearer(key: bytes) -> bytes:
    """The value of the header `Authorization`.

    Raises ValueError for a key that it cannot carry.
    """
    if not key.isascii() or not key.decode().isprintable() or b" " in key:
        raise ValueError(
            "the key has bytes that no HTTP header carries: use letters, digits and punctuation, "
            "as openssl rand -hex 32 gives"
        )
    return b"Bearer " + key


def one_line(text: str) -> str:
    """The text as ASCII that a header or an error can carry, cut off where it is long."""
    ascii_text = text.encode("ascii", "backslashreplace").decode()
    line = "".join(char if char.isprintable() else " " for char in ascii_text)
    return line[:_MAX_MESSAGE_CHARS].strip()
