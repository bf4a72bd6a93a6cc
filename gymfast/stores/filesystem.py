"""A store in a folder: local disks, and shared filesystems that have hard links and rename.

put:    temporary, fsync, rename, fsync of the folder
create: temporary, fsync, link, unlink of the temporary, fsync of the folder
Link refuses an existing name where rename does not; obstore's local store does the same but never
syncs (reliability.md section 3). Folders are made and synced one by one, and never removed.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores import posix
from gymfast.stores.base import Blob, check_key, check_prefix, check_range, chunks_of, is_key

_log = logging.getLogger(__name__)

# A live writer touches its temporary with every chunk. One that stalls for longer loses it and
# fails with a clear error; a crashed one gives its space back.
TEMPORARY_MAX_AGE_S = 3600.0

_HINTS = {
    errno.ENOSPC: "no room for data or for one more file: free space, or keep fewer versions",
    errno.EDQUOT: "the quota is used up: free space, or keep fewer versions",
    errno.EROFS: "the filesystem is mounted read-only",
    errno.EACCES: "check owner and mode of the folder",
    errno.EPERM: "check owner and mode, and that the filesystem has hard links",
    errno.EOPNOTSUPP: "the filesystem has no hard links, so it cannot hold a store",
    errno.EIO: "the device or server failed: check the system log, then retry",
    errno.ESTALE: "the server replaced the folder: retry",
    errno.ENAMETOOLONG: "use a shorter store path",
    errno.EISDIR: "a folder has the name of this key",
    errno.ENOTDIR: "a file has the name of a folder of this key",
}


class FileStore:
    """Blobs as files below `root`, which is made by the first put or create.

    Nothing outside `root` is read or written, whatever the keys and symlinks below it say (I83).
    Dot files, symlinks, devices and names that are no keys do not exist for this store.
    """

    has_create_only = True
    num_ahead = 0

    def __init__(self, root: str | os.PathLike[str]) -> None:
        path = os.fspath(root)
        if not path or "\0" in path:
            raise ValueError(f"file store: {path!r} is not a path")
        self.root = Path(path).absolute()
        self.url = f"file:{self.root}"
        self._settled: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        source = _Source(data)
        try:
            with self._folder_of("put", key, make=True) as (folder_fd, name):
                temporary, _ = posix.write_temporary(folder_fd, source)
                posix.replace(temporary, name, folder_fd)
        except StoreError:
            if source.error is not None:
                raise source.error from None
            raise

    def create(self, key: str, data: Blob) -> None:
        with self._folder_of("create", key, make=True) as (folder_fd, name):
            temporary, status = posix.write_temporary(folder_fd, chunks_of(data))
            try:
                posix.link_new(temporary, status, name, folder_fd)
            except FileExistsError as error:
                raise ConflictError(f"create '{key}' in {self.url}: it exists already") from error

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self._file("get", key) as fd:
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise StoreError(
                    f"get '{key}' from {self.url}: {size} bytes, over the limit of {max_bytes}"
                )
            blob = posix.read_exactly(fd, 0, size)
            if os.fstat(fd).st_size != size:
                raise StoreError(
                    f"get '{key}' from {self.url}: {size} bytes became {os.fstat(fd).st_size} "
                    "while they were read; objects must only be written through a store"
                )
            return blob

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        with self._file("get_range", key) as fd:
            size = os.fstat(fd).st_size
            if start + length > size:
                raise StoreError(
                    f"get_range '{key}' from {self.url}: expected {length} bytes at {start}, "
                    f"but the object has only {size} bytes: it is truncated"
                )
            return posix.read_exactly(fd, start, length)

    def size(self, key: str) -> int:
        with self._file("size", key) as fd:
            return os.fstat(fd).st_size

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        return self._list(prefix)

    def delete(self, key: str) -> None:
        try:
            with self._folder_of("delete", key, make=False) as (folder_fd, name):
                os.unlink(name, dir_fd=folder_fd)
                os.fsync(folder_fd)
        except NotFoundError:
            return

    def free_bytes(self) -> int | None:
        path = self.root
        while True:
            try:
                status = os.statvfs(path)
            except (FileNotFoundError, NotADirectoryError):
                path = path.parent
            except OSError as error:
                raise StoreError(f"free_bytes of {self.url}: {error.strerror}") from error
            else:
                return status.f_bavail * status.f_frsize

    def sweep_temporaries(self, min_age_s: float = TEMPORARY_MAX_AGE_S) -> int:
        """Number of temporaries removed below the root that nobody wrote to for `min_age_s`.

        The first write into a folder sweeps that folder by itself.
        """
        try:
            with self._folder("sweep", "", make=False) as root_fd:
                return _sweep(root_fd, min_age_s)
        except NotFoundError:
            return 0

    def _list(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        try:
            with self._folder("list", folder, make=False) as folder_fd:
                yield from _keys(folder_fd, f"{folder}/" if folder else "", prefix)
        except NotFoundError:
            return

    @contextmanager
    def _file(self, operation: str, key: str) -> Iterator[int]:
        with self._folder_of(operation, key, make=False) as (folder_fd, name):
            fd = posix.open_file(name, folder_fd)
            try:
                yield fd
            finally:
                os.close(fd)

    @contextmanager
    def _folder_of(self, operation: str, key: str, *, make: bool) -> Iterator[tuple[int, str]]:
        folder, _, name = check_key(key).rpartition("/")
        with self._folder(operation, folder, make=make, key=key) as folder_fd:
            yield folder_fd, name

    @contextmanager
    def _folder(
        self, operation: str, folder: str, *, make: bool, key: str | None = None
    ) -> Iterator[int]:
        """A descriptor of the folder; inside the block an OSError becomes a StoreError."""
        try:
            folder_fd = self._open_folder(folder, make=make)
            try:
                yield folder_fd
            finally:
                os.close(folder_fd)
        except OSError as error:
            raise self._error(operation, folder if key is None else key, error, make) from error

    def _open_folder(self, folder: str, *, make: bool) -> int:
        folder_fd = posix.open_root(self.root, make=make)
        try:
            if make:
                self._settle(folder_fd, None)
            for segment in filter(None, folder.split("/")):
                parent_fd = folder_fd
                folder_fd = posix.open_folder(segment, parent_fd, make=make)
                try:
                    if make:
                        self._settle(folder_fd, parent_fd)
                finally:
                    os.close(parent_fd)
        except BaseException:
            os.close(folder_fd)
            raise
        return folder_fd

    def _settle(self, folder_fd: int, parent_fd: int | None) -> None:
        """Once per folder: make its entry in the parent durable and sweep its temporaries.

        Also for a folder that was there: whoever made it may have died before the sync.
        """
        status = os.fstat(folder_fd)
        identity = (status.st_dev, status.st_ino)
        with self._lock:
            if identity in self._settled:
                return
        if parent_fd is not None:
            os.fsync(parent_fd)
        try:
            posix.sweep_temporaries(folder_fd, TEMPORARY_MAX_AGE_S)
        except OSError as error:
            _log.warning("%s: temporaries are not swept: %s", self.url, error)
        with self._lock:
            self._settled.add(identity)

    def _file_in_the_way(self) -> Path | None:
        """The root, or the folder above it, that is a file; None if there is none."""
        paths = (self.root, *self.root.parents)
        return next((path for path in paths if path.exists() and not path.is_dir()), None)

    def _error(self, operation: str, key: str, error: OSError, writing: bool) -> StoreError:
        where = f"{operation} '{key}' in {self.url}"
        if writing and isinstance(error, NotADirectoryError) and (file := self._file_in_the_way()):
            return StoreError(
                f"{where}: {file} is a file, and a store is a folder [ENOTDIR]: name another path"
            )
        is_absent = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
        if is_absent and not writing:
            return NotFoundError(f"{where}: no such object")
        code = error.errno or 0
        text = f"{where}: {error.strerror} [{errno.errorcode.get(code, code)}]"
        with suppress(StoreError):
            text += f", {self.free_bytes()} bytes free"
        return StoreError(f"{text}; {_HINTS[code]}" if code in _HINTS else text)


class _Source:
    """The chunks of the caller; remembers the error that the caller's own iterable raised."""

    def __init__(self, data: Blob | Iterable[Blob]) -> None:
        self.error: Exception | None = None
        self._data = data

    def __iter__(self) -> Iterator[memoryview]:
        chunks = chunks_of(self._data)
        while True:
            try:
                chunk = next(chunks)
            except StopIteration:
                return
            except Exception as error:
                self.error = error
                raise
            yield chunk


def _keys(folder_fd: int, base: str, prefix: str) -> Iterator[str]:
    """Keys at and below a folder whose own key is `base`, in ascending order."""
    for name, is_folder in posix.entries(folder_fd):
        path = base + name
        if not is_key(path) or not path.startswith(prefix[: len(path)]):
            continue
        if not is_folder:
            if path.startswith(prefix):
                yield path
            continue
        try:
            child_fd = posix.open_folder(name, folder_fd)
        except (FileNotFoundError, posix.SymlinkError):
            continue
        try:
            yield from _keys(child_fd, f"{path}/", prefix)
        finally:
            os.close(child_fd)


def _sweep(folder_fd: int, min_age_s: float) -> int:
    num_removed = posix.sweep_temporaries(folder_fd, min_age_s)
    for name, is_folder in posix.entries(folder_fd):
        if is_folder:
            child_fd = posix.open_folder(name, folder_fd)
            try:
                num_removed += _sweep(child_fd, min_age_s)
            finally:
                os.close(child_fd)
    return num_removed
