"""What the folder of a store says about a run that is not found in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gymfast.errors import NotFoundError


def no_folder(store: str) -> str:
    """What to add to the message that a run is not in `store`; "" if its folder is there."""
    from gymfast.stores import FileStore, open_store

    opened = open_store(store)
    if not isinstance(opened, FileStore) or opened.root.is_dir():
        return ""
    what = "is no folder" if os.path.lexists(opened.root) else "does not exist"
    return f"; {opened.root} {what}: check the path of the store"


@contextmanager
def naming_folder(store: str) -> Iterator[None]:
    """Inside the block, a run that is not found also says whether the folder of its store is."""
    try:
        yield
    except NotFoundError as error:
        if hint := no_folder(store):
            raise NotFoundError(f"{error}{hint}") from error
        raise
