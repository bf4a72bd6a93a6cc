"""Durable named blobs: where published versions live."""

from __future__ import annotations

import os
import re

from gymfast.stores.addresses import is_object_scheme, redacted
from gymfast.stores.base import Blob, Store, check_key, check_prefix
from gymfast.stores.filesystem import FileStore
from gymfast.stores.memory import MemoryStore
from gymfast.stores.objects import RETRY_S, TIMEOUT_S, ObjectStore
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


def open_store(
    url: str | os.PathLike[str],
    *,
    relay_timeout_s: float | None = None,
    silence_s: float | None = None,
) -> Store:
    """The store behind `memory:NAME`, `file:/PATH`, a plain path, or a URL (docs/stores.md).

    URLs are `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `https://` or
    `http://` to read, `modal-volume://NAME/PREFIX`, `fsspec+PROTOCOL://SERVER/PATH` and
    `relay://HOST:PORT[,STORE]`. A path is taken literally (no percent decoding, no `~`); its folder
    is made by the first put. Nothing is asked of a store here. A relay may be
    silent for `relay_timeout_s` (default: 60 s). With `silence_s` no request to any store waits
    longer for an answer, repetitions included: it is an error then that names its object.
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
        return _modal_volume(text, rest, silence_s)
    if scheme == "relay":
        return _relay(text, rest, relay_timeout_s, silence_s)
    if scheme.startswith("fsspec+"):
        from gymfast.stores import fsspec_store

        return fsspec_store.FsspecStore(text, timeout_s=_least(silence_s, fsspec_store.TIMEOUT_S))
    if is_object_scheme(scheme):
        kind = HttpStore if scheme.startswith("http") else ObjectStore
        # A request is repeated for so long, and its last repetition may take as long again.
        half_s = None if silence_s is None else silence_s / 2
        return kind(text, timeout_s=_least(half_s, TIMEOUT_S), retry_s=_least(half_s, RETRY_S))
    raise ValueError(
        f"store '{redacted(text)}': unknown scheme '{scheme}:'; expected memory:NAME, file:/PATH, "
        "s3://, gs://, az://, https://, modal-volume://, fsspec+PROTOCOL://, relay:// or a plain "
        "path (write ./ before a relative path that holds a colon)"
    )


def _least(silence_s: float | None, default_s: float) -> float:
    return default_s if silence_s is None else min(silence_s, default_s)


def _modal_volume(url: str, rest: str, silence_s: float | None) -> Store:
    """The store behind modal-volume://NAME/PREFIX."""
    from gymfast.stores.modal_volume import TIMEOUT_S, ModalVolumeStore

    if not rest.startswith("//"):
        raise ValueError(f"store '{url}': expected modal-volume://NAME/PREFIX")
    name, _, prefix = rest[2:].partition("/")
    return ModalVolumeStore(name, prefix.rstrip("/"), timeout_s=_least(silence_s, TIMEOUT_S))


def _relay(url: str, rest: str, timeout_s: float | None, silence_s: float | None) -> Store:
    """The store behind relay://HOST:PORT, or relay://HOST:PORT,STORE with what it fetches from.

    The key of the relay is in the file that GYMFAST_RELAY_KEY_FILE names. Of two that may be silent
    each has half of the time.
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
    if behind and silence_s is not None:
        silence_s /= 2
    relay = RemoteStore(address, key, timeout_s=_least(silence_s, timeout_s or TIMEOUT_S))
    if not behind:
        return relay
    then = open_store(behind, relay_timeout_s=timeout_s, silence_s=silence_s)
    return FallbackStore(relay, then)


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
