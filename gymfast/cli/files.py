"""Files of commands: outputs complete or absent, never in place of another by accident."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def check_output(
    path: Path,
    *,
    inputs: Mapping[str, Path],
    is_forced: bool,
    is_directory: bool = False,
    hint: str = "choose another name",
) -> None:
    """Refuse an output that is one of the inputs, exists (unless forced) or has no folder.

    is_directory tells what it will be; one that exists has to be of that sort. Whether a directory
    holds nothing but a checkpoint that may be replaced is for its writer to say.

    Raises ValueError or FileExistsError with what to do.
    """
    for name, source in inputs.items():
        if _is_same(path, source):
            raise ValueError(f"the output {path} is {name} itself: {hint}")
    if is_directory and os.path.lexists(path):
        _check_directory(path, is_forced=is_forced)
    elif path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "a directory, and the output is a file: choose another name", str(path)
        )
    elif path.exists() and not is_forced:
        raise FileExistsError(errno.EEXIST, "the output exists already: give --force", str(path))
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))


def _check_directory(path: Path, *, is_forced: bool) -> None:
    if path.is_symlink() or not path.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, "not a directory, and the output is one: choose another name", str(path)
        )
    if any(path.iterdir()) and not is_forced:
        raise FileExistsError(
            errno.EEXIST,
            "a directory that is not empty: choose another name, or give --force to replace the "
            "checkpoint in it",
            str(path),
        )


@contextmanager
def new_file(path: Path, *, is_forced: bool) -> Iterator[BinaryIO]:
    """A stream whose bytes become the file `path`, durably, when the block ends well.

    Whatever goes wrong, also a full disk, leaves `path` as it was. What a killed process left of
    an earlier try is removed. Raises FileExistsError if somebody made `path` meanwhile and it is
    not to be replaced.
    """
    from gymfast.delta.temporary import make_temporary, sweep

    temporary = path
    try:
        sweep(path)
        temporary, fd = make_temporary(path)
        with os.fdopen(fd, "wb") as stream:
            try:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
                if is_forced:
                    temporary.replace(path)
                else:
                    _rename_new(temporary, path)
                _sync_folder(path.absolute().parent)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _with_name(error, path, temporary) from error


def _rename_new(temporary: Path, path: Path) -> None:
    try:
        path.hardlink_to(temporary)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS or path.exists():
            raise
        temporary.replace(path)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _with_name(error: OSError, path: Path, temporary: Path) -> OSError:
    """The error, told with the name that the user gave instead of the temporary's."""
    if error.errno is None or (error.filename and str(temporary) != str(error.filename)):
        return error
    hint = {errno.ENOSPC: "; free some space", errno.EDQUOT: "; free some space"}
    return type(error)(
        error.errno, f"{os.strerror(error.errno)}{hint.get(error.errno, '')}", str(path)
    )


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return path.absolute() == other.absolute()
