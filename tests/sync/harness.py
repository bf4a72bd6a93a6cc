"""Clocks, faulty stores and small weights for tests of publishers and subscribers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from gymfast.errors import NotFoundError, StoreError
from gymfast.stores.base import Blob, Store
from gymfast.stores.memory import MemoryStore
from gymfast.sync import LiveTarget, Publisher, Subscriber
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import MAX_RECORD_BYTES, LogRecord, parse_log_record
from gymfast.testing.faults import ManualClock, PassThroughStore

RUN = "run-a"
Weights = dict[str, np.ndarray]


class FaultyStore(PassThroughStore):
    """Fails calls: `fault(number, operation, key)` says "" (none), "before" or "after" the effect.

    Numbers count the calls since `arm`, from 1; `calls` lists them.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.fault: Callable[[int, str, str], str] | None = None
        self.calls: list[tuple[str, str]] = []

    def arm(self, fault: Callable[[int, str, str], str] | None) -> None:
        self.fault, self.calls = fault, []

    def _do(self, operation: str, key: str, call: Callable[[], Any]) -> Any:
        self.calls.append((operation, key))
        how = self.fault(len(self.calls), operation, key) if self.fault else ""
        if how == "before":
            raise StoreError(f"injected: {operation} '{key}' failed")
        result = call()
        if how == "after":
            raise StoreError(f"injected: reply of {operation} '{key}' lost")
        return result

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        self._do("put", key, lambda: self.inner.put(key, data))

    def create(self, key: str, data: Blob) -> None:
        self._do("create", key, lambda: self.inner.create(key, data))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._do("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._do("get_range", key, lambda: self.inner.get_range(key, start, length))

    def size(self, key: str) -> int:
        return self._do("size", key, lambda: self.inner.size(key))

    def list(self, prefix: str) -> Iterator[str]:
        return self._do("list", prefix, lambda: iter(list(self.inner.list(prefix))))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self.inner.delete(key))


class DelayedStore(PassThroughStore):
    """What is written becomes visible to readers only `delay_s` later, each key on its own.

    `create` still knows what exists: conditional writes are consistent, reads are not.
    """

    def __init__(self, inner: Store, clock: ManualClock, delay_of: Callable[[str], float]) -> None:
        super().__init__(inner)
        self.clock = clock
        self.delay_of = delay_of
        self._visible_at: dict[str, float] = {}
        self._before: dict[str, bytes | None] = {}

    def _note(self, key: str) -> None:
        try:
            self._before[key] = self.inner.get(key, max_bytes=1 << 30)
        except NotFoundError:
            self._before[key] = None
        self._visible_at[key] = self.clock.monotonic_s() + self.delay_of(key)

    def _old(self, key: str) -> tuple[bool, bytes | None]:
        is_old = self.clock.monotonic_s() < self._visible_at.get(key, 0.0)
        return is_old, self._before.get(key)

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        self._note(key)
        self.inner.put(key, data)

    def create(self, key: str, data: Blob) -> None:
        try:
            self.inner.size(key)
        except NotFoundError:
            self._note(key)
        self.inner.create(key, data)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        is_old, blob = self._old(key)
        if not is_old:
            return self.inner.get(key, max_bytes=max_bytes)
        if blob is None:
            raise NotFoundError(f"get '{key}': not visible yet")
        return blob

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key, max_bytes=1 << 30)[start : start + length]

    def size(self, key: str) -> int:
        return len(self.get(key, max_bytes=1 << 30))

    def list(self, prefix: str) -> Iterator[str]:
        return iter([k for k in self.inner.list(prefix) if self._old(k) != (True, None)])


def make_weights(seed: int = 0, num_tensors: int = 4, size: int = 600) -> Weights:
    """A few tensors of several dtypes with all sorts of bits."""
    rng = np.random.default_rng(seed)
    dtypes = (np.uint16, np.float32, np.int64, np.uint8)
    weights: Weights = {}
    for i in range(num_tensors):
        dtype = np.dtype(dtypes[i % len(dtypes)])
        raw = rng.integers(0, 256, size=size * dtype.itemsize, dtype=np.uint8)
        weights[f"layers.{i}.weight"] = raw.view(dtype).reshape(-1, 20)
    return weights


def step(weights: Weights, seed: int, density: float = 0.02) -> Weights:
    """New weights: some units changed, in place of nothing."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, value in weights.items():
        new = value.copy()
        flat = new.view(np.uint8).reshape(-1)
        count = max(1, int(density * flat.size))
        flat[rng.integers(0, flat.size, count)] ^= rng.integers(1, 256, count, dtype=np.uint8)
        out[name] = new
    return out


def zeros_like(weights: Weights) -> Weights:
    return {name: np.zeros_like(value) for name, value in weights.items()}


def copy_of(weights: Weights) -> Weights:
    return {name: value.copy() for name, value in weights.items()}


def assert_same(found: Weights, expected: Weights) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name


def addresses(weights: Weights) -> dict[str, int]:
    return {name: value.ctypes.data for name, value in weights.items()}


def publisher(store: Store | None = None, run: str = RUN, **options: Any) -> Publisher:
    """A publisher whose tiny weights still travel as deltas."""
    options = {"anchor_ratio": 100.0, "backend": "auto", "threads": 1, **options}
    return Publisher(MemoryStore() if store is None else store, run, **options)


def reader(store: Store, live: Weights, run: str = RUN, **options: Any) -> Subscriber:
    return Subscriber(store, run, LiveTarget(live, threads=1), **options)


def history(num_versions: int, seed: int = 0, **options: Any) -> list[Weights]:
    """Weights of versions 0..num_versions."""
    states = [make_weights(seed, **options)]
    for version in range(1, num_versions + 1):
        states.append(step(states[-1], seed * 1000 + version))
    return states


def records_of(store: Store, run: str = RUN) -> list[LogRecord]:
    """The log of the run, oldest first."""
    keys = RunKeys(run)
    blobs = [store.get(key, max_bytes=MAX_RECORD_BYTES) for key in store.list(keys.log_prefix)]
    return [parse_log_record(blob, "log") for blob in blobs]
