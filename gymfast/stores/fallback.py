"""A store that is tried first, such as the relay of a site, and the one to use where it fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores.base import Blob, Store, copied, put_memory_bytes

RETRY_AFTER_S = 10.0
"""How long the first store is left alone after it failed."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class FallbackStore:
    """Asks `first`; what that cannot do is asked of `second`, and for a while everything is.

    That an object is absent, or there already, is an answer and no failure. Both show the same
    objects, perhaps later.
    """

    has_create_only = False

    def __init__(self, first: Store, second: Store) -> None:
        self.url = f"{first.url},{second.url}"
        self.num_ahead = first.num_ahead
        self.put_memory_bytes = max(map(put_memory_bytes, (first, second)))
        self._first = first
        self._second = second
        self._not_before_s = 0.0

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        blob = copied(data)
        self._ask(lambda store: store.put(key, blob))

    def create(self, key: str, data: Blob) -> None:
        self._second.create(key, data)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._ask(lambda store: store.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._ask(lambda store: store.get_range(key, start, length))

    def size(self, key: str) -> int:
        return self._ask(lambda store: store.size(key))

    def list(self, prefix: str) -> Iterator[str]:
        return iter(self._ask(lambda store: tuple(store.list(prefix))))

    def delete(self, key: str) -> None:
        self._ask(lambda store: store.delete(key))

    def free_bytes(self) -> int | None:
        return self._second.free_bytes()

    def _ask(self, work: Callable[[Store], _T]) -> _T:
        if time.monotonic() >= self._not_before_s:
            try:
                return work(self._first)
            except (NotFoundError, ConflictError):
                raise
            except StoreError as error:
                _log.warning("for %g s %s is used: %s", RETRY_AFTER_S, self._second.url, error)
                self._not_before_s = time.monotonic() + RETRY_AFTER_S
        return work(self._second)
