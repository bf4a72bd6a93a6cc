"""File operations that survive crashes, lost replies and symlinks; they raise OSError.

Everything is relative to an open folder descriptor and no symlink below the store root is
followed, so a name can be swapped under us without leading outside.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

TEMPORARY_PREFIX = ".tmp-"

# Linux transfers at most 0x7ffff000 bytes per call; 64 MiB keeps a read interruptible.
_READ_BYTES = 64 << 20

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ShortReadError(OSError):
    """A file that ended before the bytes that were asked for."""


class SymlinkError(OSError):
    """A symlink or device where a plain file or folder belongs."""


def open_root(root: Path, *, make: bool) -> int:
    """A descriptor of the store root; symlinks in the path to it are the user's choice.

    `make` creates missing folders, each made durable before the next.
    """
    try:
        return os.open(root, _FOLDER_FLAGS)
    except FileNotFoundError:
        if not make:
            raise
    parent_fd = open_root(root.parent, make=True)
    try:
        _mkdir(root.name, parent_fd)
        os.fsync(parent_fd)
    finally:
        os.close(parent_fd)
    return os.open(root, _FOLDER_FLAGS)


def open_folder(name: str, parent_fd: int, *, make: bool = False) -> int:
    """A descriptor of a folder in `parent_fd`; SymlinkError if it is a symlink.

    `make` creates a missing folder; to make it durable, sync `parent_fd`.
    """
    try:
        return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent_fd)
    except FileNotFoundError:
        if not make:
            raise
    except NotADirectoryError as error:
        _refuse_symlink(name, parent_fd, error)
    _mkdir(name, parent_fd)
    return open_folder(name, parent_fd)


def open_file(name: str, folder_fd: int) -> int:
    """A descriptor to read a plain file; never blocks.

    Raises IsADirectoryError for a folder, SymlinkError for a symlink or device.
    """
    try:
        fd = os.open(name, _FILE_FLAGS, dir_fd=folder_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            _refuse(name, error)
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return _refuse(name, None)


def read_exactly(fd: int, start: int, length: int) -> bytes:
    """`length` bytes from `start`; ShortReadError with the numbers if the file ends before.

    Read, never mapped: a file truncated meanwhile is this error, not a bus error (R48).
    """
    parts: list[bytes] = []
    done = 0
    while done < length:
        part = os.pread(fd, min(length - done, _READ_BYTES), start + done)
        if not part:
            size = os.fstat(fd).st_size
            raise ShortReadError(
                errno.EIO,
                f"expected {length} bytes at {start}, but the file ends after {done} of them "
                f"({size} bytes long): it is truncated",
            )
        parts.append(part)
        done += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_temporary(folder_fd: int, chunks: Iterable[memoryview]) -> tuple[str, os.stat_result]:
    """Name and status of a new temporary file that holds all chunks, durably.

    Whatever goes wrong, also in the iterable, the temporary is removed.
    """
    name = f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(name, _NEW_FLAGS, 0o666, dir_fd=folder_fd)
    try:
        try:
            size = sum(_write_all(fd, chunk) for chunk in chunks)
            os.fsync(fd)
            status = os.fstat(fd)
        finally:
            os.close(fd)
        if status.st_size != size:
            raise OSError(errno.EIO, f"wrote {size} bytes, the file holds {status.st_size}")
        return name, status
    except BaseException:
        remove_quietly(name, folder_fd)
        raise


def replace(temporary: str, name: str, folder_fd: int) -> None:
    """Give the temporary its final name, replacing what was there, durably."""
    try:
        os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        remove_quietly(temporary, folder_fd)
        raise
    os.fsync(folder_fd)


def link_new(temporary: str, status: os.stat_result, name: str, folder_fd: int) -> None:
    """Give the temporary its final name unless that exists (FileExistsError), durably.

    A server may execute the link and lose the reply; the retry then says "exists", or a timeout
    says nothing. So after any error the final name decides: our own file there means success.
    The folder is synced in every case, so that what a loser finds there is durable too.
    """
    try:
        try:
            os.link(
                temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False
            )
        except OSError:
            if not _is_same_file(name, folder_fd, status):
                raise
    finally:
        remove_quietly(temporary, folder_fd)
        os.fsync(folder_fd)


def remove_quietly(name: str, folder_fd: int) -> None:
    """Remove a file if possible; a temporary that stays is swept later."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder_fd)


def entries(folder_fd: int) -> Iterator[tuple[str, bool]]:
    """Name and is-folder of each plain file and folder, in the order of the keys below them."""
    found: list[tuple[str, bool]] = []
    with os.scandir(folder_fd) as scan:
        for entry in scan:
            if entry.is_dir(follow_symlinks=False):
                found.append((entry.name, True))
            elif entry.is_file(follow_symlinks=False):
                found.append((entry.name, False))
    # "a-b" sorts before "a/c" and "a.b" after it, so a folder counts as its name plus "/".
    return iter(sorted(found, key=lambda item: item[0] + "/" if item[1] else item[0]))


def sweep_temporaries(folder_fd: int, min_age_s: float) -> int:
    """Number of removed temporaries that nobody has written to for `min_age_s`."""
    oldest_s = time.time() - min_age_s
    num_removed = 0
    for name, is_folder in entries(folder_fd):
        if is_folder or not name.startswith(TEMPORARY_PREFIX):
            continue
        try:
            if os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mtime <= oldest_s:
                os.unlink(name, dir_fd=folder_fd)
                num_removed += 1
        except FileNotFoundError:
            continue
    return num_removed


def _mkdir(name: str, parent_fd: int) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, 0o777, dir_fd=parent_fd)


def _refuse_symlink(name: str, parent_fd: int, error: NotADirectoryError) -> NoReturn:
    """Tell a symlink, which Linux also reports as "not a directory", from a file."""
    if stat.S_ISLNK(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
        _refuse(name, error)
    raise error


def _refuse(name: str, cause: OSError | None) -> NoReturn:
    text = f"'{name}' is a symlink or device; a store follows none"
    raise SymlinkError(errno.ELOOP, text) from cause


def _write_all(fd: int, chunk: memoryview) -> int:
    done = 0
    while done < chunk.nbytes:
        done += os.write(fd, chunk[done:])
    return done


def _is_same_file(name: str, folder_fd: int, status: os.stat_result) -> bool:
    try:
        found = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(found, status)
