"""An HTTP server with the engine's pull endpoint: `POST /pull_weights`, the JSON of SGLang's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from gymfast.delta.hf_delta.pull import PullReport
from gymfast.errors import GymfastError
from gymfast.keyed_http import KeyedHandler, KeyedServer

ENDPOINT = "/pull_weights"
_MAX_BODY_BYTES = 2**16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PullRequest:
    """What a client asks for."""

    local: Path
    source: Path
    target: int


Puller = Callable[[PullRequest], PullReport]


class PullServer(KeyedServer):
    """Answers pull requests, each on a thread of its own; the lock of a directory orders them."""

    def __init__(self, host: str, port: int, puller: Puller, key: bytes | None = None) -> None:
        """A server that listens already; see KeyedServer for its errors."""
        self.puller = puller
        super().__init__(host, port, _Handler, key, "replace checkpoints")

    @property
    def url(self) -> str:
        """Where the endpoint is."""
        return f"http://{self.address}{ENDPOINT}"


class _Handler(KeyedHandler):
    server: PullServer
    offer = f"POST {ENDPOINT}"

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        if not self.is_authorized():
            return
        if self.path != ENDPOINT:
            self.reply(HTTPStatus.NOT_FOUND, f"{self.path} is not there, expected {ENDPOINT}")
        else:
            self._pull()

    def _pull(self) -> None:
        try:
            request = _parse(self._body())
            report = self.server.puller(request)
        except (GymfastError, ValueError) as error:
            _log.warning("pull failed: %s", error)
            self.reply(HTTPStatus.BAD_REQUEST, f"{type(error).__name__}: {error}")
        else:
            _log.info("%s holds version %d", request.local, report.version)
            self.reply(HTTPStatus.OK, "Success.")

    def _body(self) -> bytes:
        kind = self.headers.get_content_type()
        if kind != "application/json":  # what a page in a browser cannot send to another site
            raise ValueError(f"Content-Type is {kind}, expected application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            raise ValueError(f"Content-Length {length!r}, expected up to {_MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))


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
