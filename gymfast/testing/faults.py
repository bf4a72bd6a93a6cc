"""Stores that fail on purpose: wrap a real store, say what goes wrong, test what is built on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from gymfast.errors import NotFoundError, StoreError
from gymfast.stores.base import Blob, Store, check_key, check_range, chunks_of, put_memory_bytes
from gymfast.sync.clock import Clock


class PassThroughStore:
    """The wrapped store, unchanged: the base of the others."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.has_create_only = inner.has_create_only
        self.num_ahead = inner.num_ahead
        self.put_memory_bytes = put_memory_bytes(inner)

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        self.inner.put(key, data)

    def create(self, key: str, data: Blob) -> None:
        self.inner.create(key, data)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self.inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.inner.get_range(key, start, length)

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def list(self, prefix: str) -> Iterator[str]:
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()


@dataclass(frozen=True)
class Fault:
    """One failure of one call.

    `call` counts from 1, over the calls of `method` or over all calls if that is None.
    `before`: no effect. `during`: a put consumes `num_chunks` chunks and has no effect.
    `after`: a lost reply, the effect is there and the caller gets the error all the same.
    `error` may be a BaseException, to play a crash of the caller.
    """

    call: int
    when: Literal["before", "during", "after"] = "before"
    method: str | None = None
    error: BaseException | None = None
    num_chunks: int = 1


class FlakyStore(PassThroughStore):
    """Fails at chosen calls; `calls` is the log of (method, key or prefix)."""

    def __init__(self, inner: Store, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = list(faults)
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        fault = self._enter("put", key)
        if fault is not None and fault.when == "during":
            for _ in islice(chunks_of(data), fault.num_chunks):
                pass
            raise _error_of(fault, "put", key)
        self.inner.put(key, data)
        _leave(fault, "put", key)

    def create(self, key: str, data: Blob) -> None:
        fault = self._enter("create", key)
        self.inner.create(key, data)
        _leave(fault, "create", key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        fault = self._enter("get", key)
        blob = self.inner.get(key, max_bytes=max_bytes)
        _leave(fault, "get", key)
        return blob

    def get_range(self, key: str, start: int, length: int) -> bytes:
        fault = self._enter("get_range", key)
        blob = self.inner.get_range(key, start, length)
        _leave(fault, "get_range", key)
        return blob

    def size(self, key: str) -> int:
        fault = self._enter("size", key)
        size = self.inner.size(key)
        _leave(fault, "size", key)
        return size

    def list(self, prefix: str) -> Iterator[str]:
        fault = self._enter("list", prefix)
        yield from self.inner.list(prefix)
        _leave(fault, "list", prefix)

    def delete(self, key: str) -> None:
        fault = self._enter("delete", key)
        self.inner.delete(key)
        _leave(fault, "delete", key)

    def _enter(self, method: str, key: str) -> Fault | None:
        """Logs the call; the fault that is still to come, after raising one that is due now."""
        with self._lock:
            self.calls.append((method, key))
            num_all = len(self.calls)
            num_same = sum(1 for called, _ in self.calls if called == method)
        for fault in self.faults:
            if fault.method in (None, method):
                count = num_all if fault.method is None else num_same
                if count == fault.call:
                    if fault.when == "before" or (fault.when == "during" and method != "put"):
                        raise _error_of(fault, method, key)
                    return fault
        return None


class ManualClock:
    """A clock that moves only when it is told to, or slept through.

    `monotonic_s` is `now_s`, the wall clock `wall_offset_s` ahead of it. `slept_s` is the sum of
    all sleeps; `on_sleep` is called after each.
    """

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.wall_offset_s = 1_700_000_000.0
        self.slept_s = 0.0
        self.on_sleep: Callable[[], object] | None = None

    def wall_us(self) -> int:
        return int((self.now_s + self.wall_offset_s) * 1e6)

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 1e-6)
        self.slept_s += seconds
        if self.on_sleep is not None:
            self.on_sleep()


class DelayedListStore(PassThroughStore):
    """Shows writes and deletes late: `list_delay_s` in lists, `read_delay_s` in reads.

    Until then a reader sees the object as it was before: absent, old, or not yet deleted.
    Create-only stays exact, as it is on real stores. Keeps all bytes ever written in memory.
    """

    def __init__(
        self,
        inner: Store,
        clock: Clock,
        *,
        list_delay_s: float,
        read_delay_s: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._list_delay_s = list_delay_s
        self._read_delay_s = read_delay_s
        self._history: dict[str, list[tuple[float, bytes | None]]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        blob = b"".join(bytes(chunk) for chunk in chunks_of(data))
        with self._lock:
            self._remember_old(key)
            self.inner.put(key, blob)
            self._history[key].append((self._clock.monotonic_s(), blob))

    def create(self, key: str, data: Blob) -> None:
        with self._lock:
            self._remember_old(key)
            self.inner.create(key, data)
            self._history[key].append((self._clock.monotonic_s(), bytes(data)))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        blob = self._visible("get", key)
        if len(blob) > max_bytes:
            raise StoreError(f"get '{key}': {len(blob)} bytes, over the limit of {max_bytes}")
        return blob

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return _range_of(self._visible("get_range", key), key, start, length)

    def size(self, key: str) -> int:
        return len(self._visible("size", key))

    def list(self, prefix: str) -> Iterator[str]:
        with self._lock:
            keys = set(self.inner.list(prefix)) | {k for k in self._history if k.startswith(prefix)}
            visible = [key for key in keys if self._at(key, self._list_delay_s) is not None]
        return iter(sorted(visible))

    def delete(self, key: str) -> None:
        with self._lock:
            self._remember_old(key)
            self.inner.delete(key)
            self._history[key].append((self._clock.monotonic_s(), None))

    def _visible(self, method: str, key: str) -> bytes:
        check_key(key)
        with self._lock:
            blob = self._at(key, self._read_delay_s)
        if blob is None:
            raise NotFoundError(f"{method} '{key}' from {self.url}: no such object (yet)")
        return blob

    def _at(self, key: str, delay_s: float) -> bytes | None:
        """What a reader sees whose view is `delay_s` old."""
        self._remember_old(key)
        time_s = self._clock.monotonic_s() - delay_s
        return [blob for since_s, blob in self._history[key] if since_s <= time_s][-1]

    def _remember_old(self, key: str) -> None:
        """Start the history with what was there before the first call through this shim."""
        if key not in self._history:
            try:
                old = self.inner.get(key, max_bytes=1 << 40)
            except NotFoundError:
                old = None
            self._history[key] = [(float("-inf"), old)]


class IgnoresConditionsStore(PassThroughStore):
    """Claims create-only writes and has none: the second create wins, as with s3rver 3.7.

    With `checks_first` it refuses an existing object but checks and writes in two steps; `pause`
    is called in between, so that a test can make the race certain.
    """

    def __init__(
        self, inner: Store, *, checks_first: bool = False, pause: Callable[[], object] | None = None
    ) -> None:
        super().__init__(inner)
        self.checks_first = checks_first
        self._pause = pause

    def create(self, key: str, data: Blob) -> None:
        if self.checks_first and key in self.inner.list(key):
            self.inner.create(key, data)
        if self._pause is not None:
            self._pause()
        self.inner.put(key, data)


class TamperStore(PassThroughStore):
    """Returns damaged bytes for chosen keys; the wrapped store stays intact."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._damages: dict[str, Callable[[bytes], bytes]] = {}

    def damage(self, key: str, change: Callable[[bytes], bytes]) -> None:
        """Reads of `key` return `change(true bytes)` until `heal`."""
        self._damages[check_key(key)] = change

    def flip(self, key: str, bit: int) -> None:
        """One bit inverted, counted from the start of the object (modulo its size)."""

        def change(blob: bytes) -> bytes:
            damaged = bytearray(blob)
            position = bit % (8 * len(blob))
            damaged[position // 8] ^= 1 << position % 8
            return bytes(damaged)

        self.damage(key, change)

    def truncate(self, key: str, size: int) -> None:
        """Only the first `size` bytes."""
        self.damage(key, lambda blob: blob[:size])

    def extend(self, key: str, tail: bytes) -> None:
        """Extra bytes at the end."""
        self.damage(key, lambda blob: blob + tail)

    def swap(self, key: str, other: str) -> None:
        """Each of two objects in the place of the other."""
        self.damage(key, lambda _: self._true(other))
        self.damage(other, lambda _: self._true(key))

    def heal(self, *keys: str) -> None:
        """True bytes again, for the keys given or for all."""
        for key in keys or tuple(self._damages):
            self._damages.pop(key, None)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if key not in self._damages:
            return self.inner.get(key, max_bytes=max_bytes)
        blob = self._damages[key](self._true(key))
        if len(blob) > max_bytes:
            raise StoreError(f"get '{key}': {len(blob)} bytes, over the limit of {max_bytes}")
        return blob

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if key not in self._damages:
            return self.inner.get_range(key, start, length)
        return _range_of(self._damages[key](self._true(key)), key, start, length)

    def size(self, key: str) -> int:
        if key not in self._damages:
            return self.inner.size(key)
        return len(self._damages[key](self._true(key)))

    def _true(self, key: str) -> bytes:
        return self.inner.get(key, max_bytes=1 << 40)


def _leave(fault: Fault | None, method: str, key: str) -> None:
    if fault is not None:
        raise _error_of(fault, method, key)


def _error_of(fault: Fault, method: str, key: str) -> BaseException:
    if fault.error is not None:
        return fault.error
    return StoreError(f"{method} '{key}': injected fault ({fault.when} call {fault.call})")


def _range_of(blob: bytes, key: str, start: int, length: int) -> bytes:
    check_range(start, length)
    if start + length > len(blob):
        raise StoreError(
            f"get_range '{key}': expected {length} bytes at {start}, "
            f"but the object has only {len(blob)} bytes: it is truncated"
        )
    return blob[start : start + length]
