"""A store behind gymfast.stores.store_server: `relay://HOST:PORT`."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from urllib.parse import quote

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.keyed_http import MESSAGE_HEADER, bearer
from gymfast.stores.base import Blob, check_key, check_prefix, check_range, copied
from gymfast.stores.store_server import OBJECTS

TIMEOUT_S = 60.0
"""How long a relay may be silent: it may have to fetch a piece first."""
_MAX_LIST_BYTES = 256 << 20
_MAX_MESSAGE_BYTES = 1 << 16
_EXPECTED = (
    HTTPStatus.OK,
    HTTPStatus.PARTIAL_CONTENT,
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


class RemoteStore:
    """Blobs of the store that a relay serves; connections are kept and used again.

    What may be written is for the relay to say: leases of readers, as a rule.
    """

    has_create_only = True
    num_ahead = 4

    def __init__(
        self, address: str, key: bytes | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise ValueError(f"relay store: {address!a} is no address, expected HOST:PORT")
        self.url = f"relay://{address}"
        self._host, self._port = match[1].strip("[]"), int(match[2])
        self._timeout_s = timeout_s
        self._headers = {} if key is None else {"Authorization": bearer(key).decode()}
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        self._write("put", key, copied(data), {})

    def create(self, key: str, data: Blob) -> None:
        self._write("create", key, copied(data), {"If-None-Match": "*"})

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self._object("get", "GET", key) as answer:
            size = _length_of(answer)
            if size > max_bytes:
                raise StoreError(
                    f"get '{key}' from {self.url}: {size} bytes, over the limit of {max_bytes}"
                )
            return answer.read()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        last = start + length - 1
        if length == 0:
            self._require_size(key, start, length, self.size(key))
            return b""
        headers = {"Range": f"bytes={start}-{last}"}
        with self._object("get_range", "GET", key, headers=headers) as answer:
            if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                answer.read()
                size = answer.getheader("Content-Range", "").rpartition("/")[2]
                self._require_size(key, start, length, int(size) if size.isdecimal() else 0)
            found = _length_of(answer)
            if answer.status != HTTPStatus.PARTIAL_CONTENT or found != length:
                raise StoreError(
                    f"get_range '{key}' from {self.url}: asked for {length} bytes, it sends "
                    f"{found} with status {answer.status}: it is no relay of gymfast"
                )
            return answer.read()

    def size(self, key: str) -> int:
        with self._object("size", "HEAD", key) as answer:
            size = _length_of(answer)
            answer.read()
            return size

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        path = f"/list?prefix={quote(prefix, safe='')}"
        with self._request("list", prefix, "GET", path) as answer:
            if _length_of(answer) > _MAX_LIST_BYTES:
                raise StoreError(f"list '{prefix}' of {self.url}: the list is absurdly long")
            return iter(answer.read().decode().splitlines())

    def delete(self, key: str) -> None:
        with self._object("delete", "DELETE", key) as answer:
            answer.read()

    def free_bytes(self) -> int | None:
        return None

    def status(self) -> dict[str, object]:
        """What the relay says of itself: bytes fetched and served, and the like."""
        with self._request("status", "", "GET", "/status") as answer:
            fields: dict[str, object] = json.loads(answer.read(_MAX_MESSAGE_BYTES))
            return fields

    def _write(self, operation: str, key: str, data: bytes, headers: Mapping[str, str]) -> None:
        with self._object(operation, "PUT", key, data, headers) as answer:
            answer.read()

    def _require_size(self, key: str, start: int, length: int, size: int) -> None:
        if start + length > size:
            raise StoreError(
                f"get_range '{key}' from {self.url}: expected {length} bytes at {start}, but the "
                f"object has only {size} bytes: it is truncated"
            )

    @contextmanager
    def _object(
        self,
        operation: str,
        method: str,
        key: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        check_key(key)
        with self._request(operation, key, method, OBJECTS + key, body, headers) as answer:
            yield answer

    @contextmanager
    def _request(
        self,
        operation: str,
        key: str,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, whose body is read inside; what goes wrong is one StoreError."""
        connection: http.client.HTTPConnection | None = None
        try:
            connection, answer = self._ask(method, path, body, {**self._headers, **(headers or {})})
            self._raise_refusal(operation, key, method, answer)
            yield answer
            if not answer.isclosed() or answer.will_close:
                return
            with self._lock:
                self._idle.append(connection)
            connection = None
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            said = _printable(str(error)) or type(error).__name__
            raise StoreError(
                f"{operation} '{key}' in {self.url}: {said}: check that the relay runs and can be "
                "reached"
            ) from error
        finally:
            if connection is not None:
                connection.close()

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The answer; a kept connection that the relay has closed meanwhile is replaced once."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                kept.request(method, path, body, dict(headers))
                return kept, kept.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                kept.close()
            except BaseException:
                kept.close()
                raise
        new = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            new.request(method, path, body, dict(headers))
            return new, new.getresponse()
        except BaseException:
            new.close()
            raise

    def _raise_refusal(
        self, operation: str, key: str, method: str, answer: http.client.HTTPResponse
    ) -> None:
        status = answer.status
        if status in _EXPECTED:
            return
        is_told_in_head = method == "HEAD"
        said = answer.getheader(MESSAGE_HEADER, "") if is_told_in_head else _message_of(answer)
        said = _printable(said)
        where = f"{operation} '{key}' in {self.url}"
        if status == HTTPStatus.NOT_FOUND:
            raise NotFoundError(f"{where}: no such object" + (f" ({said})" if said else ""))
        if status == HTTPStatus.CONFLICT:
            raise ConflictError(f"{where}: it exists already")
        raise StoreError(f"{where}: {said or _printable(answer.reason)} (status {status})")


def _length_of(answer: http.client.HTTPResponse) -> int:
    text = answer.getheader("Content-Length", "")
    if not text.isdecimal():
        raise StoreError(f"an answer without Content-Length (status {answer.status})")
    return int(text)


def _message_of(answer: http.client.HTTPResponse) -> str:
    """The words of a refusal, as one printable line."""
    body = answer.read(_MAX_MESSAGE_BYTES)
    try:
        text = str(json.loads(body)["message"])
    except (ValueError, TypeError, KeyError):
        text = body.decode("utf-8", "replace")
    return _printable(text)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:1000].strip()
