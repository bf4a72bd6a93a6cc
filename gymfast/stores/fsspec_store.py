"""A store in a file system of fsspec: SFTP, HDFS, SMB and others that obstore does not reach.

put:    a temporary in the same folder, then a rename; one upload where files appear whole anyway
create: a conditional upload, where the file system has one; elsewhere a look, then a put
fsspec promises little: which of its file systems replace a file in one step, or create one only if
it is absent, is known of a few and not assumed of the others.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gymfast.errors import ConflictError, MissingDependencyError, NotFoundError, StoreError
from gymfast.stores.addresses import parse_fsspec_address, redacted
from gymfast.stores.base import (
    Blob,
    check_key,
    check_prefix,
    check_range,
    chunks_of,
    copied,
    is_key,
)
from gymfast.stores.fsspec_calls import ABSENT, CallFailedError, Connection, Connections, Work
from gymfast.stores.fsspec_errors import is_absence, store_error

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

TIMEOUT_S = 60.0
"""How long one call may take; more for uploads, by their length."""
TEMPORARY_MAX_AGE_S = 86400.0
_PIECE_BYTES = 8 << 20
_SLOWEST_BYTES_PER_S = 256 << 10
_MAX_OFFSET = 1 << 53
_NUM_READS = 8
_TEMPORARY = ".tmp-"

# Packages whose files are objects: they appear whole, and pipe_file(mode="create") is a condition.
# Source: s3fs 2026.9 (If-None-Match), gcsfs 2026.10 (ifGenerationMatch), adlfs 2026.8 (overwrite).
_OBJECT_STORES = ("s3fs", "gcsfs", "adlfs")
_NEAR = ("file", "local", "memory")
# The memory of fsspec looks and stores in two steps, all in this process.
_memory_lock = threading.Lock()
_T = TypeVar("_T")


class FsspecStore:
    """Objects as files below a URL `fsspec+PROTOCOL://SERVER/PATH`.

    Users, passwords and other settings come from those of fsspec: FSSPEC_<PROTOCOL>_<SETTING> in
    the environment, or its files. `timeout_s` bounds each call.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._protocol, self._address = parse_fsspec_address(url)
        self.url = f"fsspec+{self._address}"
        self._class = _load(self._protocol, self.url)
        self._root = self._class._strip_protocol(self._address).rstrip("/")
        package = self._class.__module__.partition(".")[0]
        self._is_memory = self._class.__module__ == "fsspec.implementations.memory"
        self._writes_whole = self._is_memory or package in _OBJECT_STORES
        self._has_rename = _has_rename(self._class)
        self.has_create_only = self._writes_whole
        self.num_ahead = 0 if self._protocol in _NEAR else 4
        self._connections = Connections(self._connect, timeout_s, self.url)
        self._settled: set[str] = set()
        self._is_clipped = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        check_key(key)
        if self._writes_whole:
            blob = copied(data)
            path, extra_s = self._path(key), len(blob) / _SLOWEST_BYTES_PER_S
            self._ask("put", key, lambda fs: fs.pipe_file(path, blob), extra_s)
            return
        self._require_rename("put", key)
        chunks = chunks_of(data)
        try:
            with self._connections.lend() as connection:
                self._put_by_rename(connection, key, chunks)
        except CallFailedError as failure:
            self._settled.discard(self._folder(key))
            raise self._failure("put", key, failure) from None

    def create(self, key: str, data: Blob) -> None:
        check_key(key)
        if not self._writes_whole:
            if self._is_there(key):
                raise self._conflict(key)
            self.put(key, data)
            return
        path, blob = self._path(key), copied(data)

        def create(fs: AbstractFileSystem) -> None:
            lock: AbstractContextManager[object] = nullcontext()
            if self._is_memory:
                lock = _memory_lock
            with lock:
                fs.pipe_file(path, blob, mode="create")

        try:
            # Once: after a lost answer, a second one would find the first and call it a conflict.
            with self._connections.lend() as connection:
                connection.call(create, len(blob) / _SLOWEST_BYTES_PER_S)
        except CallFailedError as failure:
            # s3fs says "invalid argument"; who made it is for the caller to read.
            if isinstance(failure.error, FileExistsError) or self._is_there(key):
                raise self._conflict(key) from None
            raise self._failure("create", key, failure) from None

    def get(self, key: str, *, max_bytes: int) -> bytes:
        size = self._size("get", check_key(key))
        for _ in range(_NUM_READS):
            if size > max_bytes:
                raise StoreError(
                    f"get '{key}' from {self.url}: {size} bytes, over the limit of {max_bytes}"
                )
            if size == 0 and self._writes_whole:
                return b""  # an empty object has no range that could be asked for
            # A byte more than allowed, so that one that never ends is noticed.
            blob = self._read("get", key, range(max_bytes + 1), size)
            if len(blob) == size and not self._is_clipped:
                return blob
            size = self._size("get", key)
            if len(blob) == size <= max_bytes:
                return blob  # it was replaced meanwhile, or could have been
        raise StoreError(
            f"get '{key}' from {self.url}: expected {size} bytes, {len(blob)} came: they were cut "
            "on the way, or the object changes all the time"
        )

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_key(key)
        check_range(start, length)
        if length == 0 or start + length > _MAX_OFFSET:
            self._require_inside(key, start, length)
            return b""
        failed: StoreError | None = None
        try:
            piece = self._read("get_range", key, range(start, start + length), length)
        except NotFoundError:
            raise
        except StoreError as error:  # some file systems refuse what lies beyond the end
            piece, failed = b"", error
        if len(piece) == length:
            return piece
        self._require_inside(key, start, length)
        raise failed or StoreError(
            f"get_range '{key}' from {self.url}: expected {length} bytes at {start}, {len(piece)} "
            "came: they were cut on the way"
        )

    def size(self, key: str) -> int:
        return self._size("size", check_key(key))

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        folders, keys = [prefix.rpartition("/")[0]], []
        while folders:
            folder = folders.pop()
            for name, is_folder in self._entries(prefix, folder):
                path = f"{folder}/{name}" if folder else name
                if not is_key(path) or not path.startswith(prefix[: len(path)]):
                    continue
                if is_folder:
                    folders.append(path)
                elif path.startswith(prefix):
                    keys.append(path)
        return iter(sorted(keys))

    def delete(self, key: str) -> None:
        check_key(key)
        if self._is_there(key, "delete"):
            path = self._path(key)
            with suppress(NotFoundError):
                self._ask("delete", key, lambda fs: fs.rm_file(path))

    def free_bytes(self) -> int | None:
        return None

    def _connect(self) -> AbstractFileSystem:
        """A file system of our own that remembers no listing."""
        settings = self._class._get_kwargs_from_urls(self._address)
        fs: Any = self._class(**settings, skip_instance_cache=True)
        with suppress(AttributeError):
            fs.dircache.use_listings_cache = False
        return fs

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _folder(self, key: str) -> str:
        return self._path(key.rpartition("/")[0])

    def _put_by_rename(
        self, connection: Connection, key: str, chunks: Iterator[memoryview]
    ) -> None:
        folder, path = self._folder(key), self._path(key)
        now_us = time.time_ns() // 1000
        temporary = f"{folder}/{_TEMPORARY}{now_us:016x}-{secrets.token_hex(8)}"
        if folder not in self._settled:
            connection.call(lambda fs: _settle(fs, folder, now_us))
            self._settled.add(folder)
        file: Any = connection.call(lambda fs: _open_new(fs, temporary))
        try:
            num_bytes = 0
            for chunk in chunks:
                for at in range(0, chunk.nbytes, _PIECE_BYTES):
                    piece = bytes(chunk[at : at + _PIECE_BYTES])
                    connection.call(partial(_write_all, file, piece))
                num_bytes += chunk.nbytes
            connection.call(lambda _: file.close())
            connection.call(lambda fs: _rename(fs, temporary, path, num_bytes))
        except BaseException:
            # A connection that hangs would hang again: what stays there is swept later.
            with suppress(CallFailedError):
                connection.call(lambda fs: _discard(fs, file, temporary))
            raise

    def _read(self, operation: str, key: str, wanted: range, num_expected: int) -> bytes:
        """The bytes of that range that are there."""
        from fsspec.spec import AbstractBufferedFile

        path = self._path(key)

        def read(fs: AbstractFileSystem) -> bytes:
            if self._writes_whole:
                blob: bytes = fs.cat_file(path, start=wanted.start, end=wanted.stop)
                return blob
            with fs.open(path, "rb") as file:
                # Such files end where they did when they were opened.
                self._is_clipped = isinstance(file, AbstractBufferedFile)
                file.seek(wanted.start)
                return _read_up_to(file, len(wanted))

        return self._ask(operation, key, read, num_expected / _SLOWEST_BYTES_PER_S)

    def _size(self, operation: str, key: str) -> int:
        path = self._path(key)
        info = self._ask(operation, key, lambda fs: _fresh(fs).info(path))
        if info["type"] != "file":
            raise self._missing(operation, key)
        if info["size"] is None:
            raise StoreError(f"{operation} '{key}' in {self.url}: it does not tell lengths")
        return int(info["size"])

    def _is_there(self, key: str, operation: str = "create") -> bool:
        try:
            self._size(operation, key)
        except NotFoundError:
            return False
        return True

    def _entries(self, prefix: str, folder: str) -> Iterator[tuple[str, bool]]:
        """Names in a folder, and whether each is a folder itself; none if it is absent."""
        path = self._path(folder)
        try:
            entries = self._ask("list", prefix, lambda fs: _fresh(fs).ls(path or "/", detail=True))
        except NotFoundError:
            return
        for entry in entries:
            name = entry["name"].rstrip("/")
            if name.strip("/") != path.strip("/") and entry["type"] in ("file", "directory"):
                yield name.rpartition("/")[2], entry["type"] == "directory"

    def _require_inside(self, key: str, start: int, length: int) -> None:
        size = self._size("get_range", key)
        if start + length > size:
            raise StoreError(
                f"get_range '{key}' from {self.url}: expected {length} bytes at {start}, but the "
                f"object has only {size} bytes: it is truncated"
            )

    def _require_rename(self, operation: str, key: str) -> None:
        if not self._has_rename:
            raise StoreError(
                f"{operation} '{key}' in {self.url}: the file system of fsspec for "
                f"'{self._protocol}' cannot replace a file in one step, so it is only read: "
                "publish to another store"
            )

    def _ask(self, operation: str, key: str, work: Work[_T], extra_s: float = 0.0) -> _T:
        """What the work gives; on a new connection if the first one failed, which may be old."""
        for is_last in (False, True):
            try:
                with self._connections.lend() as connection:
                    return connection.call(work, extra_s)
            except CallFailedError as failure:
                if is_last or failure.is_answer or isinstance(failure.error, TimeoutError):
                    self._fail(operation, key, failure)
        raise AssertionError("not reached")

    def _fail(self, operation: str, key: str, failure: CallFailedError) -> NoReturn:
        if is_absence(failure.error) and operation != "put":
            raise self._missing(operation, key) from None
        raise self._failure(operation, key, failure) from None

    def _failure(self, operation: str, key: str, failure: CallFailedError) -> StoreError:
        return store_error(failure.error, f"{operation} '{key}' in {self.url}")

    def _missing(self, operation: str, key: str) -> NotFoundError:
        return NotFoundError(f"{operation} '{key}' from {self.url}: no such object")

    def _conflict(self, key: str) -> ConflictError:
        return ConflictError(f"create '{key}' in {self.url}: it exists already")


def _load(protocol: str, url: str) -> type[Any]:
    """The class of a file system; ValueError for one that is unknown or hides what is new."""
    try:
        import fsspec
    except ImportError as error:
        raise MissingDependencyError(
            f"store {url}: needs fsspec: pip install 'gymfast[fsspec]'"
        ) from error
    try:
        found: type[Any] = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise MissingDependencyError(f"store {url}: fsspec says: {redacted(str(error))}") from error
    except ValueError as error:
        raise ValueError(f"store '{url}': fsspec knows no protocol '{protocol}'") from error
    if found.__module__ == "fsspec.implementations.cached":
        raise ValueError(
            f"store '{url}': a cache would hide new versions; name what lies behind it"
        )
    return found


def _has_rename(found: type[Any]) -> bool:
    """True if the class moves files by itself: that of fsspec copies them, then deletes."""
    from fsspec import AbstractFileSystem

    return hasattr(found, "_mv") or found.mv is not AbstractFileSystem.mv


def _fresh(fs: AbstractFileSystem) -> AbstractFileSystem:
    """The file system without what it remembers of listings."""
    fs.invalidate_cache()
    return fs


def _settle(fs: AbstractFileSystem, folder: str, now_us: int) -> None:
    """Makes the folder; deletes temporaries in it that somebody left a day ago."""
    try:
        fs.makedirs(folder, exist_ok=True)
    except Exception:
        if not _fresh(fs).isdir(folder):  # else another one was faster
            raise
    oldest_us = now_us - int(TEMPORARY_MAX_AGE_S * 1e6)
    for entry in _fresh(fs).ls(folder, detail=True):
        name = entry["name"].rpartition("/")[2]
        written, dash, _ = name.removeprefix(_TEMPORARY).partition("-")
        if name.startswith(_TEMPORARY) and dash and written <= f"{oldest_us:016x}":
            with suppress(*ABSENT):
                fs.rm_file(f"{folder}/{name}")


def _open_new(fs: AbstractFileSystem, path: str) -> Any:
    file: Any = fs.open(path, "wb")
    if hasattr(file, "set_pipelined"):  # paramiko waits for an answer to every 32 KiB otherwise
        file.set_pipelined(True)
    return file


def _rename(fs: AbstractFileSystem, temporary: str, path: str, num_bytes: int) -> None:
    found = _fresh(fs).info(temporary)["size"]
    if found != num_bytes:
        raise EOFError(f"{found} of {num_bytes} bytes arrived")
    fs.mv(temporary, path)


def _discard(fs: AbstractFileSystem, file: Any, temporary: str) -> None:
    close: Callable[[], None] = file.close
    with suppress(Exception):
        close()
    with suppress(*ABSENT):
        fs.rm_file(temporary)


def _write_all(file: Any, piece: bytes, _: AbstractFileSystem) -> None:
    """Writes the piece; files without a buffer say how much they took."""
    view = memoryview(piece)
    while view.nbytes:
        taken = file.write(bytes(view) if view.nbytes < len(piece) else piece)
        view = view[view.nbytes if taken is None else taken :]


def _read_up_to(file: Any, length: int) -> bytes:
    blob = bytearray()
    while len(blob) < length and (part := file.read(min(_PIECE_BYTES, length - len(blob)))):
        blob += part
    return bytes(blob)
