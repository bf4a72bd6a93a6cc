"""A store inside this process: for tests, demos and trainers that share memory with receivers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores.base import Blob, check_key, check_prefix, check_range, copied

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryStore:
    """Blobs in a dictionary; `limit_bytes` makes it a small disk that can run full."""

    has_create_only = True
    num_ahead = 0

    def __init__(self, name: str = "", *, limit_bytes: int | None = None) -> None:
        self.url = f"memory:{name}"
        self.limit_bytes = limit_bytes
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """The one store of this process with that name; made on first use. "" is always new."""
        if not name:
            return cls()
        with _named_lock:
            return _named.setdefault(name, cls(name))

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        check_key(key)
        blob = copied(data)
        with self._lock:
            self._insert("put", key, blob)

    def create(self, key: str, data: Blob) -> None:
        check_key(key)
        blob = copied(data)
        with self._lock:
            if key in self._objects:
                raise ConflictError(f"create '{key}' in {self.url}: it exists already")
            self._insert("create", key, blob)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        blob = self._blob("get", key)
        if len(blob) > max_bytes:
            raise StoreError(
                f"get '{key}' from {self.url}: {len(blob)} bytes, over the limit of {max_bytes}"
            )
        return blob

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        blob = self._blob("get_range", key)
        if start + length > len(blob):
            raise StoreError(
                f"get_range '{key}' from {self.url}: expected {length} bytes at {start}, "
                f"but the object has only {len(blob)} bytes: it is truncated"
            )
        return blob[start : start + length]

    def size(self, key: str) -> int:
        return len(self._blob("size", key))

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        with self._lock:
            return iter(sorted(key for key in self._objects if key.startswith(prefix)))

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def free_bytes(self) -> int | None:
        with self._lock:
            return None if self.limit_bytes is None else self.limit_bytes - self._used()

    def _blob(self, operation: str, key: str) -> bytes:
        check_key(key)
        with self._lock:
            blob = self._objects.get(key)
        if blob is None:
            raise NotFoundError(f"{operation} '{key}' from {self.url}: no such object")
        return blob

    def _insert(self, operation: str, key: str, blob: bytes) -> None:
        grown = len(blob) - len(self._objects.get(key, b""))
        if self.limit_bytes is not None and self._used() + grown > self.limit_bytes:
            raise StoreError(
                f"{operation} '{key}' in {self.url}: {len(blob)} bytes do not fit, "
                f"{self.limit_bytes - self._used()} of {self.limit_bytes} bytes are free"
            )
        self._objects[key] = blob

    def _used(self) -> int:
        return sum(map(len, self._objects.values()))
