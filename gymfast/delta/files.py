"""Plain reads and writes of files at offsets: no memory maps, whole or an error, durable."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gymfast.errors import FormatError, GymfastError, NotFoundError

Buffer = bytes | bytearray | memoryview
_MOST_PER_CALL = 2**30
LOCK_S = 1800.0
"""How long a lock is waited for: for longer than its holder works on the largest checkpoint."""
_LOCK_LOOK_S = 0.02, 0.5  # between looks at a lock: first, longest


@contextmanager
def os_errors(doing: str, path: Path | str) -> Iterator[None]:
    """Turns OSErrors into GymfastErrors that say what was being done to which path."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"{doing} {path}: there is no such file or directory") from error
    except OSError as error:
        which = f"{error.filename}: " if error.filename not in (None, str(path)) else ""
        raise GymfastError(f"{doing} {path}: {which}{error.strerror or error}") from error


def open_regular(path: Path, *, writable: bool = False, follow: bool = True) -> int:
    """A descriptor of a regular file; symbolic links are followed only if `follow`.

    Raises FormatError if it is anything else (a pipe, a device, a directory).
    """
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(f"{path} is not a regular file: name a safetensors file or a directory")
    return fd


def wait_for_lock(
    fd: int, path: Path, *, is_shared: bool = False, timeout_s: float = LOCK_S
) -> None:
    """Takes the lock (flock) of an open file; it is free when the file is closed.

    Raises GymfastError if another process has it until the deadline.
    """
    operation = (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    end_s, (look_s, longest_s) = time.monotonic() + timeout_s, _LOCK_LOOK_S
    while True:
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError as error:
            if time.monotonic() >= end_s:
                raise GymfastError(
                    f"the lock {path} was not free for {timeout_s:g} s: another process works with "
                    "these files, or was stopped while it did; end it (`fuser` names it)"
                ) from error
            time.sleep(look_s)
            look_s = min(1.5 * look_s, longest_s)
        else:
            return


def read_into(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fills a buffer from an offset of a file.

    Raises FormatError, with both sizes, if the file ends before that.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done : done + _MOST_PER_CALL]], offset + done)
        if count == 0:
            raise FormatError(
                f"{path}: ends at byte {os.fstat(fd).st_size}, expected at least "
                f"{offset + len(buffer)}: truncated, or being written; copy it again"
            )
        done += count


def read_whole(path: Path) -> memoryview:
    """All bytes of a regular file, in memory of our own.

    Raises NotFoundError, GymfastError for what the system says, FormatError if it is no file.
    """
    with os_errors("read", path):
        fd = open_regular(path)
        try:
            data = memoryview(bytearray(os.fstat(fd).st_size))
            read_into(fd, data, 0, path)
        finally:
            os.close(fd)
    return data


def write_all(fd: int, data: Buffer, offset: int) -> None:
    """Writes all of data at an offset of a file."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _MOST_PER_CALL], offset + done)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
