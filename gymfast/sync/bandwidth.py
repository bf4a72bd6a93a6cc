"""A budget of bytes a second, for all that one publisher, subscriber or relay transfers.

Source: docs/stores.md, section Budgets.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from gymfast.errors import NotFoundError
from gymfast.stores import ObjectStore
from gymfast.stores.base import (
    Blob,
    Store,
    check_range,
    chunks_of,
    put_memory_bytes,
    shows_puts,
)
from gymfast.sync.clock import Clock, SystemClock

MIN_BYTES_PER_S = 64 << 10
"""Below it a piece takes longer than a third of a lease."""
_SLICE_S = 0.25
_MIN_SLICE_BYTES = 16 << 10
_MAX_PIECE_BYTES = 8 << 20
_PIECE_S = 1.0


class Bandwidth:
    """Grants bytes in slices, first come, first served, so parallel transfers share it evenly.

    In any `t` seconds at most `max_bytes_per_s` x (t + 0.5 s) are granted. Thread-safe.
    """

    def __init__(self, max_bytes_per_s: int, clock: Clock | None = None) -> None:
        """Raises ValueError for less than 64 KiB a second."""
        if max_bytes_per_s < MIN_BYTES_PER_S:
            raise ValueError(
                f"the budget is {max_bytes_per_s} bytes a second, expected at least "
                f"{MIN_BYTES_PER_S}: leases of readers would end while a piece is under way"
            )
        self.max_bytes_per_s = max_bytes_per_s
        self.slice_bytes = max(_MIN_SLICE_BYTES, int(max_bytes_per_s * _SLICE_S))
        self.num_bytes = 0
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._free_at_s = self._clock.monotonic_s()

    def take(self, num_bytes: int) -> None:
        """Returns once so many bytes may go; those that come later wait behind each slice."""
        while num_bytes > 0:
            part = min(num_bytes, self.slice_bytes)
            pause_s = self._reserve(part)
            if pause_s > 0:
                self._clock.sleep(pause_s)
            num_bytes -= part

    def give_back(self, num_bytes: int) -> None:
        """So many bytes were granted and did not go."""
        with self._lock:
            self._free_at_s -= num_bytes / self.max_bytes_per_s
            self.num_bytes -= num_bytes

    def _reserve(self, num_bytes: int) -> float:
        """Seconds until the bytes may go. Time that nobody used counts for a quarter second."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            start_s = max(self._free_at_s, now_s - _SLICE_S)
            self._free_at_s = start_s + num_bytes / self.max_bytes_per_s
            self.num_bytes += num_bytes
            return start_s - now_s


class LimitedStore:
    """The wrapped store within a budget that counts the bytes of objects, both ways.

    A put takes its bytes slice by slice as the store asks for them, a read of a range before it
    asks, and one of a whole object, if its length is not known before (`get_known`), after it: so
    the budget never keeps a request open that has begun.
    """

    def __init__(self, inner: Store, bandwidth: Bandwidth) -> None:
        self.url = inner.url
        self.has_create_only = inner.has_create_only
        pieces_per_s = bandwidth.max_bytes_per_s // _MAX_PIECE_BYTES
        self.num_ahead = min(inner.num_ahead, pieces_per_s)
        self.put_memory_bytes = put_memory_bytes(inner)
        self.shows_puts = shows_puts(inner)
        self._inner = inner
        self._bandwidth = bandwidth
        whole = int(bandwidth.max_bytes_per_s * _PIECE_S)
        self._piece_bytes = min(whole, _MAX_PIECE_BYTES)

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        if isinstance(data, bytes | bytearray | memoryview):
            num_bytes = memoryview(data).nbytes
            if num_bytes <= self._bandwidth.slice_bytes:
                self._bandwidth.take(num_bytes)
                self._inner.put(key, data)
                return
        self._inner.put(key, self._slices(data))

    def create(self, key: str, data: Blob) -> None:
        self._bandwidth.take(memoryview(data).nbytes)
        self._inner.create(key, data)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        blob = self._inner.get(key, max_bytes=max_bytes)
        self._bandwidth.take(len(blob))
        return blob

    def get_known(self, key: str, num_bytes: int) -> bytes:
        """A whole object of that length, which is granted before the request."""
        self._bandwidth.take(num_bytes)
        try:
            return get_known(self._inner, key, num_bytes)
        except NotFoundError:
            self._bandwidth.give_back(num_bytes)
            raise

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        if length <= self._piece_bytes:
            self._bandwidth.take(length)
            return self._inner.get_range(key, start, length)
        whole, step = bytearray(), self._piece_bytes
        for at in range(start, start + length, step):
            part = min(step, start + length - at)
            self._bandwidth.take(part)
            whole += self._inner.get_range(key, at, part)
        return bytes(whole)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def list(self, prefix: str) -> Iterator[str]:
        keys = list(self._inner.list(prefix))
        self._bandwidth.take(sum(map(len, keys)))
        return iter(keys)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()

    def _slices(self, data: Blob | Iterable[Blob]) -> Iterator[Blob]:
        for chunk in chunks_of(data):
            for at in range(0, chunk.nbytes, self._bandwidth.slice_bytes):
                part = chunk[at : at + self._bandwidth.slice_bytes]
                self._bandwidth.take(part.nbytes)
                yield part


def get_known(store: Store, key: str, num_bytes: int) -> bytes:
    """A whole object whose length is known, as `get`: a budget grants its bytes first, and a store
    with connections for what is large takes one of those.
    """
    if isinstance(store, LimitedStore | ObjectStore):
        return store.get_known(key, num_bytes)
    return store.get(key, max_bytes=num_bytes)


def limited(store: Store, max_bytes_per_s: int | None, clock: Clock | None = None) -> Store:
    """The store within a budget of its own; the store itself if there is none.

    Raises ValueError for a budget that is too small.
    """
    if max_bytes_per_s is None:
        return store
    return LimitedStore(store, Bandwidth(max_bytes_per_s, clock))
