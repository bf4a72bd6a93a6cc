"""What the folder of a store says about a run that is not found in it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gymfast.errors import NotFoundError


def no_folder(store: str) -> str:
    """What to add to the message that a run is not in `store`; "" if its folder is there."""
    from gymfast.stores import FileStore, open_store

    opened = open_store(store)
    if not isinstance(opened, FileStore) or opened.root.is_dir():
        return ""
    what = "is no folder" if os.path.lexists(opened.root) else "does not exist"
    return f"; {opened.root} {what}: check the path of the store"


def require_parent(store: str) -> None:
    """Raises NotFoundError for a folder that would be made below one that is not there either.

    The path is misspelt then, or its disk is not mounted.
    """
    from gymfast.stores import FileStore, open_store

    opened = open_store(store)
    if not isinstance(opened, FileStore):
        return
    parent = opened.root.parent
    if not os.path.lexists(parent) and not _has_file(parent):
        raise NotFoundError(
            f"{opened.root} cannot be made: {parent} does not exist; check the path of the store "
            f"and that its disk is mounted, or make the folder: mkdir -p {shlex.quote(str(parent))}"
        )


def _has_file(path: Path) -> bool:
    """True if a file is above the path, which the store itself tells."""
    return any(above.is_file() for above in path.parents)


@contextmanager
def naming_folder(store: str) -> Iterator[None]:
    """Inside the block, a run that is not found also says whether the folder of its store is."""
    try:
        yield
    except NotFoundError as error:
        if hint := no_folder(store):
            raise NotFoundError(f"{error}{hint}") from error
        raise
