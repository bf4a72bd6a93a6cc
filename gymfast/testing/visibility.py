"""A store that shows what was written late, out of order, or never; create-only stays exact."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores.base import Blob, check_key, check_prefix, check_range, copied
from gymfast.stores.memory import MemoryStore
from gymfast.sync.clock import Clock


@dataclass(frozen=True)
class Lags:
    """By how much, at most, each kind of look is behind what was written."""

    list_s: float = 0.0
    size_s: float = 0.0
    read_s: float = 0.0


@dataclass
class _Fate:
    """What becomes of the next writes whose key holds `part`: they come late, or go."""

    part: str
    count: int
    late_s: float = 0.0
    gone_after_s: float | None = None


class BadVisibilityStore:
    """Objects in memory; each look at each key sees a moment of its own in the past.

    The lag is drawn per call and key, from `seed`, up to that of `lags`: keys appear in any order,
    and what one look showed may be missing in the next. Lists, lengths and bytes lag on their own.
    """

    has_create_only = True
    num_ahead = 0

    def __init__(self, clock: Clock, lags: Lags, *, seed: int = 0) -> None:
        self.url = "memory:bad-visibility"
        self.lags = lags
        self._clock = clock
        self._chance = random.Random(seed)  # noqa: S311 - for tests
        self._history: dict[str, list[tuple[float, bytes | None]]] = {}
        self._fates: list[_Fate] = []
        self._lock = threading.Lock()

    def lose(self, part: str, *, after_s: float = 0.0, count: int = 1) -> None:
        """The next writes of keys that hold `part` succeed, and are gone `after_s` later."""
        self._fates.append(_Fate(part, count, gone_after_s=after_s))

    def delay(self, part: str, by_s: float, *, count: int = 1) -> None:
        """The next writes of keys that hold `part` succeed, and take effect `by_s` later."""
        self._fates.append(_Fate(part, count, late_s=by_s))

    def truth(self) -> MemoryStore:
        """What is there now, as a store without faults."""
        store = MemoryStore()
        with self._lock:
            found = {key: self._at(key, 0.0) for key in self._history}
        for key, blob in found.items():
            if blob is not None:
                store.put(key, blob)
        return store

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        check_key(key)
        blob = copied(data)
        with self._lock:
            self._write(key, blob)

    def create(self, key: str, data: Blob) -> None:
        check_key(key)
        blob = copied(data)
        with self._lock:
            if self._at(key, 0.0) is not None:
                raise ConflictError(f"create '{key}' in {self.url}: it exists already")
            self._write(key, blob)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        blob = self._seen("get", key, self.lags.read_s)
        if len(blob) > max_bytes:
            raise StoreError(
                f"get '{key}' from {self.url}: {len(blob)} bytes, over the limit of {max_bytes}"
            )
        return blob

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        blob = self._seen("get_range", key, self.lags.read_s)
        if start + length > len(blob):
            raise StoreError(
                f"get_range '{key}' from {self.url}: expected {length} bytes at {start}, "
                f"but the object has only {len(blob)} bytes: it is truncated"
            )
        return blob[start : start + length]

    def size(self, key: str) -> int:
        return len(self._seen("size", key, self.lags.size_s))

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        with self._lock:
            keys = [key for key in self._history if key.startswith(prefix)]
            seen = [key for key in keys if self._look(key, self.lags.list_s) is not None]
        return iter(sorted(seen))

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            if key in self._history:
                self._write(key, None)

    def free_bytes(self) -> int | None:
        return None

    def _write(self, key: str, blob: bytes | None) -> None:
        now_s, old = self._clock.monotonic_s(), self._at(key, 0.0)
        history = self._history.setdefault(key, [(float("-inf"), None)])
        history[:] = [entry for entry in history if entry[0] <= now_s]
        fate = None if blob is None else next((f for f in self._fates if f.part in key), None)
        if fate is None:
            history.append((now_s, blob))
            return
        fate.count -= 1
        if fate.count == 0:
            self._fates.remove(fate)
        if fate.gone_after_s is None:
            history.append((now_s + fate.late_s, blob))
        elif fate.gone_after_s > 0:
            history += [(now_s, blob), (now_s + fate.gone_after_s, old)]

    def _seen(self, operation: str, key: str, lag_s: float) -> bytes:
        check_key(key)
        with self._lock:
            blob = self._look(key, lag_s)
        if blob is None:
            raise NotFoundError(f"{operation} '{key}' from {self.url}: no such object")
        return blob

    def _look(self, key: str, lag_s: float) -> bytes | None:
        return self._at(key, self._chance.uniform(0, lag_s) if lag_s else 0.0)

    def _at(self, key: str, lag_s: float) -> bytes | None:
        """What was there so long ago."""
        time_s = self._clock.monotonic_s() - lag_s
        newest_first = reversed(self._history.get(key, []))
        return next((blob for since_s, blob in newest_first if since_s <= time_s), None)
