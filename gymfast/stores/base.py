"""The store contract: durable named blobs with an atomic put and a create-only commit.

`gymfast.testing.conformance.StoreContract` is this contract as tests; a new store must pass it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

Blob = bytes | bytearray | memoryview

# A segment is also a file name: 255 bytes is the limit of most filesystems, and a temporary
# name must fit beside it. 1,024 bytes is the limit of S3 and GCS for a whole key.
MAX_SEGMENT_CHARS = 200
MAX_KEY_CHARS = 1024

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
_PREFIX_TAIL = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*)?", re.ASCII)


@runtime_checkable
class Store(Protocol):
    """Named blobs that survive a crash; every method is safe to call from several threads.

    Keys are `/`-separated segments of `[A-Za-z0-9._-]+` that do not start with a dot (see
    `check_key`); no key may be a folder of another key. A key that breaks the rules is the
    caller's mistake: ValueError, or TypeError if it is not a str, and nothing is touched.
    Raises StoreError when the world fails: the text names the key, the operation and the place.
    After a StoreError from `put` or `create` the object is absent, old or complete, never torn;
    which of them is unknown, so read it back before relying on either.
    `num_ahead` says how many reads are worth having under way at once, 0 for a store that is near.
    A store that promises that every reader finds what a put has written, whole, once it returned
    may say so with an attribute `shows_puts` (see the function of that name).
    """

    url: str
    has_create_only: bool
    num_ahead: int

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        """Replace the object atomically; durable on return.

        Each chunk is used up before the next is asked for, so a producer may reuse its buffer.
        An error of the iterable passes through and leaves the old object.
        """

    def create(self, key: str, data: Blob) -> None:
        """Create the object, durably; ConflictError if it exists, whoever made it."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object; NotFoundError if absent, StoreError if longer than `max_bytes`."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`; StoreError if the object ends before that."""

    def size(self, key: str) -> int:
        """Bytes of the object; NotFoundError if absent."""

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that start with `prefix` (a plain text prefix, "" for all), in ascending order.

        Objects created or deleted meanwhile may or may not be among them.
        """

    def delete(self, key: str) -> None:
        """Remove the object, durably; no error if it is absent."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None where the store cannot know."""


def shows_puts(store: Store) -> bool:
    """True if the store promises that what was put can be read, by all, once the put returned.

    A store that says nothing is not trusted: whoever relies on an object looks for it first.
    """
    return bool(getattr(store, "shows_puts", False))


def check_key(key: str) -> str:
    """The key itself.

    Raises TypeError if it is not a str, ValueError if it breaks the key rules of `Store`.
    """
    _check_text(key, "key")
    for segment in key.split("/"):
        if len(segment) > MAX_SEGMENT_CHARS or not _SEGMENT.fullmatch(segment):
            raise ValueError(
                f"key {_shown(key)}: segment {_shown(segment)} is not allowed; expected 1 to "
                f"{MAX_SEGMENT_CHARS} of [A-Za-z0-9._-], not starting with a dot"
            )
    return key


def is_key(text: str) -> bool:
    """True if `text` keeps the key rules."""
    return len(text) <= MAX_KEY_CHARS and all(
        len(segment) <= MAX_SEGMENT_CHARS and _SEGMENT.fullmatch(segment)
        for segment in text.split("/")
    )


def check_prefix(prefix: str) -> str:
    """The prefix itself: "" or the beginning of some legal key.

    Raises TypeError if it is not a str, ValueError if no legal key can start with it.
    """
    _check_text(prefix, "prefix")
    folder, _, tail = prefix.rpartition("/")
    if folder:
        check_key(folder)
    if prefix.startswith("/") or not _PREFIX_TAIL.fullmatch(tail):
        raise ValueError(f"prefix {_shown(prefix)}: no legal key starts like this")
    return prefix


def check_range(start: int, length: int) -> None:
    """Nothing; raises ValueError if either is negative."""
    if start < 0 or length < 0:
        raise ValueError(f"range of {length} bytes at {start}: both must be 0 or more")


def chunks_of(data: Blob | Iterable[Blob]) -> Iterator[memoryview]:
    """The bytes of `data` as flat, non-empty views, in order.

    Raises TypeError for anything but bytes-like chunks, a str above all.
    """
    parts: Iterable[Blob] = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    for part in parts:
        if not isinstance(part, bytes | bytearray | memoryview):
            raise TypeError(f"a store takes bytes-like chunks, not {type(part).__name__}")
        view = memoryview(part).cast("B")
        if view.nbytes:
            yield view


def copied(data: Blob | Iterable[Blob]) -> bytes:
    """The bytes of `data`, each chunk copied before the next is asked for."""
    if isinstance(data, bytes):
        return data
    joined = bytearray()
    for chunk in chunks_of(data):
        joined += chunk
    return bytes(joined)


def _check_text(text: str, what: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{what} {_shown(text)} is {type(text).__name__}, not str")
    if len(text) > MAX_KEY_CHARS:
        raise ValueError(f"{what} {_shown(text)} has {len(text)} characters, over {MAX_KEY_CHARS}")


def _shown(text: object) -> str:
    """A hostile key as one short printable line."""
    shown = ascii(text)
    return shown if len(shown) <= 80 else f"{shown[:60]}... ({len(shown)} characters)"
