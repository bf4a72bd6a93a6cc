"""The HTTP interface of an inference server, as far as an update of weights needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gymfast.errors import ChannelError


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
        """Raises ValueError for an address that is not one of http or https, or names no host."""
        parts = urlsplit(url)
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
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            return replace(_answer(response.status, response.read()), headers=told)
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
