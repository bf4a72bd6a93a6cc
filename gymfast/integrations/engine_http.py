"""The HTTP interface of an inference server, as far as an update of weights needs it."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gymfast.errors import ChannelError

_PART_BYTES = 64 << 10


@dataclass(frozen=True)
class Answer:
    """Status code, JSON value (None if there is none), and the text that says what happened.

    The names of the headers are in lower case.
    """

    code: int
    body: Any
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_success(self) -> bool:
        """True if the server says so in the code, and does not deny it in the body."""
        denied = isinstance(self.body, dict) and self.body.get("success") is False
        return self.code == 200 and not denied


class EngineHttp:
    """One server. Not thread-safe; each call is one connection."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        """`timeout_s` bounds each wait, and the whole of an answer's body.

        Raises ValueError for an address that is not one of http or https, names no host, or holds
        a user's name.
        """
        parts = urlsplit(url)
        if "@" in parts.netloc:  # not shown: what is before it may be a password
            raise ValueError(
                f"a url of {parts.hostname!r} has a user's name before the host, which is not "
                "sent: leave it out, and give a key as api_key"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {url!r}, expected http://HOST:PORT or https://HOST:PORT")
        if _is_wildcard(parts.hostname):
            raise ValueError(
                f"url is {url!r}, an address to listen on and not one to connect to: name the host "
                "as the trainer reaches it, http://localhost:PORT if it is this one"
            )
        self.url = url.rstrip("/")
        self._parts, self._timeout_s = parts, timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call(
        self,
        path: str,
        fields: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """What the server answers to a POST of the fields, or a GET if there are none.

        Bytes go as base64. Raises ChannelError if there is no answer.
        """
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)
        method, body = ("GET", None) if fields is None else ("POST", msgspec.json.encode(fields))
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise ChannelError(
                f"{self.url}{path} gave no answer: no connection ({error}), so this call was not "
                "sent: check that the server is up and the address right, then repeat the update"
            ) from error
        try:
            sent = {**self._headers, **(headers or {})}
            connection.request(method, self._parts.path.rstrip("/") + path, body, sent)
            held = connection.sock  # the connection lets go of it if this is its last answer
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            data = _body(response, held, self._timeout_s)
            return replace(_answer(response.status, data), headers=told)
        except (OSError, HTTPException) as error:
            raise ChannelError(
                f"{self.url}{path} gave no answer (limit {self._timeout_s:g} s): {error!r}; what "
                "it did is not known, so repeat the update"
            ) from error
        finally:
            connection.close()

    def require(self, path: str, fields: Mapping[str, object] | None = None) -> Any:
        """The JSON value of an answer of success. Raises ChannelError for any other."""
        answer = self.call(path, fields)
        if not answer.is_success:
            raise ChannelError(f"{self.url}{path} answered {answer.code}: {answer.text}")
        return answer.body


def _body(response: HTTPResponse, held: socket.socket, limit_s: float) -> bytes:
    """The whole body. Raises TimeoutError for one that drips in for longer than the limit."""
    parts, left, end_s = [], response.length, time.monotonic() + limit_s
    while left is None or left > 0:  # None: in chunks, or to the end of the connection
        part = response.read1(_PART_BYTES if left is None else min(left, _PART_BYTES))
        if not part:
            break
        parts.append(part)
        left = None if left is None else left - len(part)
        left_s = end_s - time.monotonic()
        if left_s <= 0 and left != 0:
            raise TimeoutError("the body of the answer did not end")
        held.settimeout(max(left_s, 0.001))
    data = b"".join(parts)
    if left:
        raise IncompleteRead(data, left)
    return data


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _answer(code: int, data: bytes) -> Answer:
    text = data[:500].decode(errors="replace")
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):  # some calls are answered with plain text
        return Answer(code, None, text)
    fields = body if isinstance(body, dict) else {}
    error = fields.get("error")  # vLLM nests its message, or gives it as text
    message = error.get("message") if isinstance(error, dict) else error or fields.get("message")
    return Answer(code, body, message if isinstance(message, str) else text)
