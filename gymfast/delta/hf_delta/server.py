"""An HTTP server with the engine's pull endpoint: `POST /pull_weights`, the JSON of SGLang's."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gymfast.delta.hf_delta.pull import PullReport
from gymfast.errors import GymfastError

ENDPOINT = "/pull_weights"
_MAX_BODY_BYTES = 2**16
_TIMEOUT_S = 30.0  # for a client that stops in the middle of its request
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PullRequest:
    """What a client asks for."""

    local: Path
    source: Path
    target: int


Puller = Callable[[PullRequest], PullReport]


class PullServer(ThreadingHTTPServer):
    """Answers pull requests, each on a thread of its own; the lock of a directory orders them."""

    def __init__(self, host: str, port: int, puller: Puller, key: bytes | None = None) -> None:
        """A server that listens already; port 0 is any free one.

        Raises ValueError for a host beyond loopback without a key, or a key that no header can
        carry; GymfastError if the address cannot be had.
        """
        self.puller = puller
        self.authorization = None if key is None else b"Bearer " + _check_key(key)
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if key is None and not ipaddress.ip_address(address[0]).is_loopback:
                raise ValueError(
                    f"host {host} is reached from other machines, and whoever reaches it may "
                    "replace checkpoints: give a key (--key-file), or listen on 127.0.0.1"
                )
            self.address_family = family
            super().__init__((str(address[0]), port), _Handler)
        except OSError as error:
            raise GymfastError(
                f"listen on {host} port {port}: {error.strerror or error}: choose another one"
            ) from error

    @property
    def url(self) -> str:
        """Where the endpoint is."""
        host, port = str(self.server_address[0]), self.server_port
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{ENDPOINT}"

    def server_bind(self) -> None:
        """Binds without the look-up of a name that http.server makes."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Logs what ended the answer to a client: its own departure, or a bug."""
        _log.exception("no answer to %s", client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PullServer
    timeout = _TIMEOUT_S

    def do_POST(self) -> None:
        self.close_connection = True
        if self.path != ENDPOINT:
            self._reply(HTTPStatus.NOT_FOUND, f"{self.path} is not there, expected {ENDPOINT}")
        elif not self._is_authorized():
            text = "wrong or missing key: send the header 'Authorization: Bearer KEY'"
            self._reply(HTTPStatus.UNAUTHORIZED, text)
        else:
            self._pull()

    def _pull(self) -> None:
        try:
            request = _parse(self._body())
            report = self.server.puller(request)
        except (GymfastError, ValueError) as error:
            _log.warning("pull failed: %s", error)
            self._reply(HTTPStatus.BAD_REQUEST, f"{type(error).__name__}: {error}")
        else:
            _log.info("%s holds version %d", request.local, report.version)
            self._reply(HTTPStatus.OK, "Success.")

    def _is_authorized(self) -> bool:
        expected = self.server.authorization
        sent = self.headers.get("Authorization", "").encode("latin-1", "replace")
        return expected is None or hmac.compare_digest(sent, expected)

    def _body(self) -> bytes:
        kind = self.headers.get_content_type()
        if kind != "application/json":  # what a page in a browser cannot send to another site
            raise ValueError(f"Content-Type is {kind}, expected application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            raise ValueError(f"Content-Length {length!r}, expected up to {_MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def _reply(self, status: HTTPStatus, message: str) -> None:
        body = json.dumps({"success": status is HTTPStatus.OK, "message": message}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses, other methods than POST among it, in our form."""
        self.close_connection = True
        status = HTTPStatus(code)
        self._reply(status, f"{message or explain or status.phrase}; expected POST {ENDPOINT}")

    def log_message(self, format: str, *args: object) -> None:
        _log.debug("%s: %s", self.client_address[0], format % args)


def _parse(body: bytes) -> PullRequest:
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("the body is no JSON object")  # noqa: TRY004 - a value of the client
    paths = []
    for key in ("local_checkpoint_dir", "source_dir"):
        text = fields.get(key)
        if not isinstance(text, str) or not text or "\0" in text:
            raise ValueError(f"{key} is {text!r}, expected a path")
        paths.append(Path(text))
    target = fields.get("target_version")
    if type(target) is not int or target < 0:
        raise ValueError(f"target_version is {target!r}, expected a number from 0")
    return PullRequest(paths[0], paths[1], target)


def _check_key(key: bytes) -> bytes:
    if not key.isascii() or not key.decode().isprintable() or b" " in key:
        raise ValueError(
            "the key has bytes that no HTTP header carries: use letters, digits and punctuation"
        )
    return key
