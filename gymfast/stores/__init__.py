"""Durable named blobs: where published versions live."""

from __future__ import annotations

import os
import re

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


def open_store(url: str | os.PathLike[str], *, relay_timeout_s: float | None = None) -> Store:
    """The store behind `memory:NAME`, `file:/PATH`, a plain path, or a URL (docs/stores.md).

    URLs are `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `https://` or
    `http://` to read, `modal-volume://NAME/PREFIX`, `fsspec+PROTOCOL://SERVER/PATH` and
    `relay://HOST:PORT[,STORE]`. A path is taken literally (no percent decoding, no `~`); its folder
    is made by the first put. Nothing is asked of a store here. A relay may be
    silent for `relay_timeout_s` (default: 60 s).
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
    if scheme == "modal-volume":
        return _modal_volume(text, rest)
    if scheme == "relay":
        return _relay(text, rest, relay_timeout_s)
    if scheme.startswith("fsspec+"):
        from gymfast.stores.fsspec_store import FsspecStore

        return FsspecStore(text)
    if is_object_scheme(scheme):
        return HttpStore(text) if scheme.startswith("http") else ObjectStore(text)
    raise ValueError(
        f"store '{redacted(text)}': unknown scheme '{scheme}:'; expected memory:NAME, file:/PATH, "
        "s3://, gs://, az://, https://, modal-volume://, fsspec+PROTOCOL://, relay:// or a plain "
        "path (write ./ before a relative path that holds a colon)"
    )


def _modal_volume(url: str, rest: str) -> Store:
    """The store behind modal-volume://NAME/PREFIX."""
    from gymfast.stores.modal_volume import ModalVolumeStore

    if not rest.startswith("//"):
        raise ValueError(f"store '{url}': expected modal-volume://NAME/PREFIX")
    name, _, prefix = rest[2:].partition("/")
    return ModalVolumeStore(name, prefix.rstrip("/"))


def _relay(url: str, rest: str, timeout_s: float | None) -> Store:
    """The store behind relay://HOST:PORT, or relay://HOST:PORT,STORE with what it fetches from.

    The key of the relay is in the file that GYMFAST_RELAY_KEY_FILE names.
    """
    from gymfast.key_file import read_shared_key_file
    from gymfast.stores.fallback import FallbackStore
    from gymfast.stores.remote import TIMEOUT_S, RemoteStore

    if not rest.startswith("//"):
        raise ValueError(f"store '{url}': expected relay://HOST:PORT or relay://HOST:PORT,STORE")
    address, _, behind = rest[2:].partition(",")
    key_file = os.environ.get("GYMFAST_RELAY_KEY_FILE")
    try:
        key = read_shared_key_file(key_file) if key_file else None
    except OSError as error:
        raise ValueError(
            f"GYMFAST_RELAY_KEY_FILE is '{key_file}', which cannot be read: {error.strerror}"
        ) from error
    relay = RemoteStore(address, key, timeout_s=timeout_s or TIMEOUT_S)
    if not behind:
        return relay
    return FallbackStore(relay, open_store(behind, relay_timeout_s=timeout_s))


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
