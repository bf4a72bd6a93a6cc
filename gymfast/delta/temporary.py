"""Temporary files and directories beside an output, locked as long as somebody works on them.

The lock (flock) ends with the process, whatever ended it: a temporary that is not locked is one
that a killed process left, and the next writer of the same output removes it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # then nothing is ever removed either
_MAX_NAME = 200  # characters of the output's name that stay in the temporary's
_TRIES = 100
_log = logging.getLogger(__name__)


def name_temporary(out: Path, word: str = "") -> Path:
    """A new name beside out that `find_leftovers` finds with the same word."""
    return out.parent / f"{_prefix(out, word)}{secrets.token_hex(4)}"


def make_temporary(out: Path, *, is_directory: bool = False) -> tuple[Path, int]:
    """A new temporary beside out and its descriptor, which holds the lock until it is closed.

    A file is open for reading and writing. Raises OSError.
    """
    for _ in range(_TRIES):
        path = name_temporary(out)
        if is_directory:
            path.mkdir()
            flags = os.O_RDONLY | os.O_DIRECTORY
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            fd = _open_locked(path, flags)
        except (FileNotFoundError, BlockingIOError):  # swept before it was locked
            continue
        except BaseException:
            remove(path)
            raise
        if _is_at(fd, path):
            return path, fd
        os.close(fd)
    raise FileExistsError(errno.EEXIST, "others remove what is written there", str(out))


def lock_directory(path: Path) -> int:
    """A descriptor of a directory that holds its lock; BlockingIOError if another one does."""
    return _open_locked(path, os.O_RDONLY | os.O_DIRECTORY)


def sweep(out: Path, word: str = "") -> None:
    """Removes what killed writers of out left beside it; what a live one works on is locked.

    What cannot be removed (it is another user's) stays, and is logged.
    """
    for path in find_leftovers(out, word):
        try:
            fd = _open_locked(path, os.O_RDONLY | os.O_NONBLOCK, needs_lock=True)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError as error:
            _log.info("%s stays, which a process has left: %s", path, error)
            continue
        try:
            if not _is_file_or_directory(fd):  # no writer makes anything else
                continue
            _log.info("removing %s, which a killed process left", path)
            remove(path)
        except OSError as error:
            _log.info("%s stays, which a process has left: %s", path, error)
        finally:
            os.close(fd)


def find_leftovers(out: Path, word: str = "") -> list[Path]:
    """The temporaries of out, those of live processes too; by the whole name, journals are none."""
    pattern = re.compile(re.escape(_prefix(out, word)) + "[0-9a-f]{8}")
    return sorted(path for path in out.parent.iterdir() if pattern.fullmatch(path.name))


def remove(path: Path) -> None:
    """Removes a file, or a directory with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _prefix(out: Path, word: str) -> str:
    return f".{out.name[:_MAX_NAME]}.gymfast-{word}"


def _open_locked(path: Path, flags: int, *, needs_lock: bool = False) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if needs_lock or error.errno not in _NO_LOCKS:
            os.close(fd)
            raise
    return fd


def _is_file_or_directory(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
