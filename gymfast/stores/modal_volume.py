"""A store in a Modal Volume, over the calls of the unmodified `modal` package.

put:    upload, which takes the name in one step and is committed when the call returns
create: upload that refuses a name that exists
No mount is used, not even inside a container: what is written to a mounted Volume is invisible to
others until a commit, what is read is stale until a reload, and the last writer of a name wins.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, TypeVar

from gymfast.errors import ConflictError, MissingDependencyError, NotFoundError, StoreError
from gymfast.stores.base import (
    Blob,
    check_key,
    check_prefix,
    check_range,
    chunks_of,
    copied,
    is_key,
)

TIMEOUT_S = 120.0
"""How long one call may go without an answer; for uploads and reads this is the whole of a file,
or a block of 8 MiB."""
_MAX_STREAMS = 4
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_HINTS = {
    "AuthError": "run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET",
    "PermissionDeniedError": "check the environment (MODAL_ENVIRONMENT) and rights of the token",
    "ResourceExhaustedError": "the rate limit or quota of the account is used up: wait, then retry",
    "ConnectionError": "check the network, then retry",
    "TimeoutError": "check the network and status.modal.com, then retry",
}


@dataclass
class _Stream:
    """A file that is being read from front to back; `rest` was read beyond `position`."""

    chunks: AsyncIterator[bytes]
    position: int = 0
    rest: bytearray = field(default_factory=bytearray)


class ModalVolumeStore:
    """Blobs as files of the Volume `name`, below `prefix`; made by the first put, as version 2.

    An object that is put from chunks is spooled to a temporary file first. `get_range` is quick
    where ranges follow one another: a Volume is read from the front.
    """

    has_create_only = True
    num_ahead = 0  # the package reads ahead itself

    def __init__(self, name: str, prefix: str = "", *, timeout_s: float = TIMEOUT_S) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"modal-volume store: {name!a} is no name of a Volume; expected 1 to 64 of "
                "[A-Za-z0-9._-], as in modal-volume://NAME/PREFIX"
            )
        if prefix:
            check_key(prefix)
        try:
            import modal
        except ImportError as error:
            raise MissingDependencyError(
                f"store 'modal-volume://{name}' needs the package modal: pip install "
                "'gymfast[modal]'"
            ) from error
        self.name = name
        self.prefix = f"{prefix}/" if prefix else ""
        self.url = f"modal-volume://{name}" + (f"/{prefix}" if prefix else "")
        self._modal = modal
        self._timeout_s = timeout_s
        self._volume: Any = None
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()
        self._loop = _LoopThread()

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        check_key(key)
        with _uploadable(data) as file:
            self._upload("put", key, file, force=True)

    def create(self, key: str, data: Blob) -> None:
        check_key(key)
        with _uploadable(data) as file:
            self._upload("create", key, file, force=False)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        check_key(key)
        blob = bytearray()
        with self._errors("get", key):
            stream = self._open_stream("get", key)
            try:
                while chunk := self._next(stream):
                    blob += chunk
                    if len(blob) > max_bytes:
                        break
            finally:
                self._close(stream)
        if len(blob) > max_bytes:
            raise StoreError(
                f"get '{key}' from {self.url}: {self.size(key)} bytes, over the limit of "
                f"{max_bytes}"
            )
        return bytes(blob)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_key(key)
        check_range(start, length)
        if length == 0:
            self._require_size(key, start, 0)
            return b""
        with self._errors("get_range", key):
            stream = self._take(key, start) or self._open_stream("get_range", key)
            try:
                self._read(stream, start - stream.position)
                piece = self._read(stream, length) if stream.position == start else b""
            except BaseException:
                self._close(stream)
                raise
        if len(piece) < length:
            self._close(stream)
            self._require_size(key, start, length)
            raise StoreError(f"get_range '{key}' from {self.url}: it was replaced meanwhile; retry")
        self._keep(key, stream)
        return piece

    def size(self, key: str) -> int:
        check_key(key)
        with self._errors("size", key):
            for path, size in self._entries("size", key, key, recursive=False):
                if path == key:
                    return size
        raise self._missing("size", key)

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        with self._errors("list", prefix):
            try:
                entries = self._entries("list", prefix, folder, recursive=True)
            except NotFoundError:
                return iter(())
        keys = (path for path, _ in entries if path.startswith(prefix) and is_key(path))
        return iter(sorted(keys))

    def delete(self, key: str) -> None:
        try:
            self.size(key)
        except NotFoundError:
            return  # or a folder, which is no object
        with self._errors("delete", key):
            volume = self._hydrated("delete", key)
            try:
                self._call(lambda: volume.remove_file.aio(self._path(key)))
            except (FileNotFoundError, self._modal.exception.NotFoundError):
                return

    def free_bytes(self) -> int | None:
        return None

    def _path(self, key: str) -> str:
        return f"/{self.prefix}{key}"

    def _upload(self, operation: str, key: str, file: BytesIO | str, *, force: bool) -> None:
        async def upload() -> None:
            async with volume.batch_upload(force=force) as batch:
                batch.put_file(file, self._path(key))

        with self._errors(operation, key):
            volume = self._hydrated(operation, key, make=True)
            try:
                self._call(upload)
            except FileExistsError as error:
                raise ConflictError(
                    f"{operation} '{key}' in {self.url}: it exists already"
                ) from error

    def _entries(
        self, operation: str, key: str, folder: str, *, recursive: bool
    ) -> tuple[tuple[str, int], ...]:
        """Keys and sizes of the files at or below a path; NotFoundError if it is absent."""
        volume = self._hydrated(operation, key)
        path = self._path(folder).rstrip("/") or "/"
        try:
            found = self._call(lambda: volume.listdir.aio(path, recursive=recursive))
        except (FileNotFoundError, self._modal.exception.NotFoundError) as error:
            raise self._missing(operation, key) from error
        return tuple(
            (path.removeprefix(self.prefix), entry.size)
            for entry in found
            if entry.type == entry.type.FILE
            and (path := entry.path.lstrip("/")).startswith(self.prefix)
        )

    def _require_size(self, key: str, start: int, length: int) -> None:
        size = self.size(key)
        if start + length > size:
            raise StoreError(
                f"get_range '{key}' from {self.url}: expected {length} bytes at {start}, but the "
                f"object has only {size} bytes: it is truncated"
            )

    def _hydrated(self, operation: str, key: str, *, make: bool = False) -> Any:
        """The handle of the Volume, known to exist."""
        if self._volume is not None:
            return self._volume
        from_name = self._modal.Volume.from_name
        volume = from_name(self.name)
        try:
            self._call(volume.hydrate.aio)
        except self._modal.exception.NotFoundError as error:
            if not make:
                raise NotFoundError(
                    f"{operation} '{key}' in {self.url}: there is no Volume '{self.name}'"
                ) from error
            volume = from_name(self.name, create_if_missing=True, version=2)
            self._call(volume.hydrate.aio)
            _log.info("made the Volume '%s', version 2", self.name)
        self._volume = volume
        return volume

    def _open_stream(self, operation: str, key: str) -> _Stream:
        """A stream whose first chunk is there, so that an absent file is noticed here."""
        volume = self._hydrated(operation, key)
        stream = _Stream(aiter(volume.read_file.aio(self._path(key))))
        try:
            stream.rest += self._next(stream)
        except (FileNotFoundError, self._modal.exception.NotFoundError) as error:
            raise self._missing(operation, key) from error
        return stream

    def _next(self, stream: _Stream) -> bytes:
        """The next chunk; b"" at the end."""
        chunk = bytes(stream.rest)
        stream.rest.clear()
        if not chunk:
            chunk = self._call(lambda: anext(stream.chunks, b""))
        return chunk

    def _read(self, stream: _Stream, length: int) -> bytes:
        """The next `length` bytes, fewer at the end."""
        taken = bytearray()
        while len(taken) < length and (chunk := self._next(stream)):
            rest = length - len(taken)
            taken += chunk[:rest]
            stream.rest += chunk[rest:]
        stream.position += len(taken)
        if not stream.rest:
            stream.rest += self._next(stream)  # so that the end is known once it is reached
        return bytes(taken)

    def _take(self, key: str, start: int) -> _Stream | None:
        """The stream that goes on at `start`; one that stands elsewhere is closed."""
        with self._lock:
            stream = self._streams.pop(key, None)
        if stream is not None and stream.position != start:
            self._close(stream)
            return None
        return stream

    def _keep(self, key: str, stream: _Stream) -> None:
        if not stream.rest:
            self._close(stream)
            return
        with self._lock:
            others = [self._streams.pop(key)] if key in self._streams else []
            self._streams[key] = stream
            if len(self._streams) > _MAX_STREAMS:
                others.append(self._streams.pop(next(iter(self._streams))))
        for other in others:
            self._close(other)

    def _close(self, stream: _Stream) -> None:
        self._call(stream.chunks.aclose)  # type: ignore[attr-defined]

    def _call(self, make: Callable[[], Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(make(), self._timeout_s)

        return self._loop.run(bounded())

    def _missing(self, operation: str, key: str) -> NotFoundError:
        return NotFoundError(f"{operation} '{key}' from {self.url}: no such object")

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        """What goes wrong inside is one StoreError that names operation, key and store."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            kind = type(error).__name__
            said = str(error) or f"no answer within {self._timeout_s:g} s"
            hint = _HINTS.get(kind)
            raise StoreError(
                f"{operation} '{key}' in {self.url}: {kind}: {said}" + (f"; {hint}" if hint else "")
            ) from error


class _LoopThread:
    """An event loop in a thread of its own, begun at the first call; calls come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What the coroutine returns; it is cancelled if the wait for it is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            return future.result()
        finally:
            future.cancel()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=self._loop.run_forever, name="gymfast-modal-volume", daemon=True
                )
                thread.start()
            return self._loop


@contextmanager
def _uploadable(data: Blob | Iterable[Blob]) -> Iterator[BytesIO | str]:
    """The bytes in memory for a buffer, the path of a temporary file for chunks.

    Not the open file: modal 1.6 reads several blocks of one at a time with one position for all.
    """
    if isinstance(data, bytes | bytearray | memoryview):
        yield BytesIO(copied(data))
        return
    with tempfile.NamedTemporaryFile(prefix="gymfast-") as file:
        for chunk in chunks_of(data):
            file.write(chunk)
        file.flush()
        yield file.name
