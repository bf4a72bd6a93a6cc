"""Durable named blobs: where published versions live."""

from __future__ import annotations

import os
import re

from gymfast.errors import MissingDependencyError
from gymfast.stores.addresses import is_object_scheme, redacted
from gymfast.stores.base import Blob, Store, check_key, check_prefix
from gymfast.stores.filesystem import FileStore
from gymfast.stores.memory import MemoryStore
from gymfast.stores.objects import ObjectStore
from gymfast.stores.probe import check_create_only
from gymfast.stores.web import HttpStore

__all__ = [
    "Blob",
    "FileStore",
    "HttpStore",
    "MemoryStore",
    "ObjectStore",
    "Store",
    "check_create_only",
    "check_key",
    "check_prefix",
    "open_store",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(.*)", re.DOTALL)

_PLANNED = {"modal": "gymfast[modal]"}


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store behind `memory:NAME`, `file:/PATH`, a plain path, or a URL (docs/stores.md).

    URLs are `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, and `https://` or
    `http://` to read. A path is taken literally (no percent decoding, no `~`); its folder is made
    by the first put. Nothing is asked of a store here.
    Raises ValueError for an unusable address, MissingDependencyError for a store that is not
    installed: the text says what it needs, StoreError for unusable settings in the environment.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise TypeError(f"store address {text!r} is {type(text).__name__}, not str")
    match = _SCHEME.fullmatch(text)
    if match is None:
        return FileStore(text)
    scheme, rest = match.group(1).lower(), match.group(2)
    if scheme == "memory":
        return MemoryStore.named(rest)
    if scheme == "file":
        return FileStore(_file_path(text, rest))
    if is_object_scheme(scheme):
        return HttpStore(text) if scheme.startswith("http") else ObjectStore(text)
    if scheme in _PLANNED:
        raise MissingDependencyError(
            f"store '{redacted(text)}': '{scheme}:' is not in this version; it is planned as the "
            f"extra {_PLANNED[scheme]}. Use file:/PATH or memory:NAME"
        )
    raise ValueError(
        f"store '{redacted(text)}': unknown scheme '{scheme}:'; expected memory:NAME, file:/PATH, "
        "s3://, gs://, az://, https:// or a plain path (write ./ before a relative path that holds "
        "a colon)"
    )


def _file_path(url: str, rest: str) -> str:
    """The path of a file: address; file:/p, file:///p and file:relative all work."""
    if not rest.startswith("//"):
        return rest
    host, slash, path = rest[2:].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(
            f"store '{url}': 'file://' is followed by a host name ('{host}'); "
            "write file:/PATH with one slash, or file:///PATH"
        )
    return f"/{path}"
