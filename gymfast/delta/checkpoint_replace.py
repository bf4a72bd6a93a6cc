"""A checkpoint directory in the place of another one: the old is removed when the new is there.

The old directory is renamed aside, the new one takes its name, then the old one is removed. Killed
between the two renames the output is absent and the old one beside it: `put_back`, which every
writer of that output begins with, gives it its name again. Nothing is removed but files of a
checkpoint that opens, and files that the new one has too.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from gymfast.delta.files import sync_directory
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.temporary import find_leftovers, lock_directory, name_temporary, remove, sweep
from gymfast.errors import FormatError, GymfastError, NotFoundError

_OLD = "old-"
_log = logging.getLogger(__name__)


def files_to_replace(out: Path, also: Iterable[str]) -> set[str]:
    """The names of the files of a checkpoint directory; it may also hold those that are given.

    An interrupted in-place update of it is completed. Raises GymfastError if it holds anything
    else, or no checkpoint that opens.
    """
    try:
        with Checkpoint.open(out) as old:
            known = {shard.name for shard in old.shards} | set(also)
            known |= {old.index.name} if old.index else set()
    except (FormatError, NotFoundError) as error:
        raise GymfastError(
            f"{out} is no checkpoint that could be replaced ({error}): remove it yourself, or "
            "choose another name"
        ) from error
    _require_only(out, known)
    return known


def replace_directory(new: Path, out: Path, known: set[str]) -> None:
    """Gives the complete directory new the name of out, whose files are all known, and removes out.

    Raises GymfastError, with out as it was, if it holds other files by now; OSError.
    """
    with _locked(out):
        aside = name_temporary(out, _OLD)
        out.rename(aside)
        try:
            _require_only(aside, known)
            new.rename(out)
        except BaseException:
            aside.rename(out)
            raise
        sync_directory(out.parent)
        garbage = name_temporary(out)  # from here on it is not to be put back
        aside.rename(garbage)
        remove(garbage)


def put_back(out: Path) -> None:
    """Completes or undoes what a killed replacement of out was about; raises OSError."""
    if not os.path.lexists(out):
        for aside in find_leftovers(out, _OLD):
            with contextlib.suppress(BlockingIOError, FileNotFoundError), _locked(aside):
                _log.info("putting %s back, which a killed process was to replace", out)
                aside.rename(out)
                sync_directory(out.parent)
                return
    sweep(out, _OLD)


def _require_only(directory: Path, known: set[str]) -> None:
    for path in sorted(directory.iterdir()):
        if path.name not in known or path.is_symlink() or not path.is_file():
            raise GymfastError(
                f"{directory} holds {path.name!r}, which is no file of its checkpoint: nothing was "
                "replaced; move it elsewhere, or choose another name"
            )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = lock_directory(directory)
    try:
        yield
    finally:
        os.close(fd)
