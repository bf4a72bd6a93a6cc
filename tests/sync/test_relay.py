"""A relay of a site: one copy over the long way, exact whatever fails."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gymfast.errors import GymfastError, NotFoundError, StoreError
from gymfast.stores import FileStore, MemoryStore, open_store
from gymfast.stores.store_server import StoreServer
from gymfast.sync import LiveTarget, Publisher, Subscriber, relay_answers
from gymfast.sync.manifest import MAX_OBJECT_BYTES
from gymfast.sync.relay import PIECE_BYTES, RelayCache, is_lease
from gymfast.testing.faults import PassThroughStore
from tests.sync.harness import RUN, assert_same, history, publisher, reader, zeros_like

NUM_READERS = 6


class CountingStore(PassThroughStore):
    """Counts calls and bytes by key; `damage` flips a byte of so many reads of objects."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.damage = 0
        self.is_away = False
        self.lock = threading.Lock()

    def _count(self, operation: str, key: str, blob: bytes = b"") -> bytes:
        if self.is_away:
            raise StoreError("the long way is cut")
        with self.lock:
            self.calls[operation, key] += 1
            self.num_bytes[key] += len(blob)
            if self.damage and "/objects/" in key and blob:
                self.damage -= 1
                return bytes([blob[0] ^ 1]) + blob[1:]
        return blob

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._count("get", key, self.inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._count("get_range", key, self.inner.get_range(key, start, length))

    def size(self, key: str) -> int:
        self._count("size", key)
        return self.inner.size(key)

    def list(self, prefix: str):
        self._count("list", prefix)
        return self.inner.list(prefix)


@contextmanager
def relaying(upstream, **options):
    relay = RelayCache(upstream, max_bytes=MAX_OBJECT_BYTES, freshness_s=0.05, **options)
    with StoreServer("127.0.0.1", 0, relay, may_write=is_lease, status=relay.status) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            relay.close()


def pull_all(url: str, state) -> None:
    """Readers of one site, at once; all end with the state."""

    def pull(_: int) -> None:
        live = zeros_like(state)
        with Subscriber(url, RUN, LiveTarget(live)) as subscriber:
            subscriber.pull()
        assert_same(live, state)

    with ThreadPoolExecutor(NUM_READERS) as pool:
        list(pool.map(pull, range(NUM_READERS)))


def objects_of(counts: Counter[str]) -> dict[str, int]:
    return {key: n for key, n in counts.items() if "/objects/" in key}


def test_each_object_comes_over_the_long_way_once() -> None:
    inner = MemoryStore()
    states = history(4, size=50_000)
    source = publisher(inner)
    for state in states:
        source.publish(state)
    upstream = CountingStore(inner)
    with relaying(upstream) as server:
        pull_all(server.url, states[-1])
        pull_all(server.url, states[-1])
        fetched = objects_of(upstream.num_bytes)
        assert fetched
        assert all(n == inner.size(key) for key, n in fetched.items())
        status = open_store(server.url).status()
    assert status["fetched_bytes"] == sum(upstream.num_bytes.values())
    assert status["served_bytes"] >= 2 * NUM_READERS * sum(fetched.values())


@pytest.mark.ci
def test_objects_of_many_pieces_are_fetched_once_by_readers_at_any_place() -> None:
    inner = MemoryStore()
    blob = np.random.default_rng(0).bytes(3 * PIECE_BYTES + 77)
    digest = hashlib.sha256(blob).hexdigest()
    key = f"r/objects/{1:020d}/{digest}"
    inner.put(key, blob)
    upstream = CountingStore(inner)
    with relaying(upstream) as server:

        def read(seed: int) -> None:
            store, rng = open_store(server.url), np.random.default_rng(seed)
            for _ in range(20):
                start = int(rng.integers(0, len(blob)))
                length = int(rng.integers(0, len(blob) - start))
                assert store.get_range(key, start, length) == blob[start : start + length]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(4)))
        with pytest.raises(StoreError, match=f"only {len(blob)} bytes"):
            open_store(server.url).get_range(key, 5, len(blob))
    assert upstream.num_bytes[key] == len(blob)


@pytest.mark.parametrize("num_damaged", [1, 2])
def test_bytes_damaged_on_the_long_way_are_fetched_anew(num_damaged: int) -> None:
    inner = MemoryStore()
    states = history(2, size=5000)
    source = publisher(inner)
    for state in states:
        source.publish(state)
    upstream = CountingStore(inner)
    upstream.damage = num_damaged
    with relaying(upstream) as server:
        pull_all(server.url, states[-1])
    assert upstream.damage == 0


def test_a_new_version_is_seen_within_the_freshness_limit_and_polls_are_shared() -> None:
    inner = MemoryStore()
    states = history(2)
    source = publisher(inner)
    source.publish(states[0])
    upstream = CountingStore(inner)
    with relaying(upstream) as server:
        live = zeros_like(states[0])
        follower = reader(open_store(server.url), live)
        follower.pull()
        upstream.calls.clear()

        def poll(_: int) -> None:
            with pytest.raises(NotFoundError):
                open_store(server.url).get(f"{RUN}/log/{9:020d}", max_bytes=100)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(poll, range(64)))
        assert upstream.calls["get", f"{RUN}/log/{9:020d}"] < 64
        source.publish(states[1])
        assert follower.wait(1, timeout_s=60).version == 1
        assert_same(live, states[1])


def test_a_lease_reaches_the_store_and_nothing_else_does() -> None:
    inner = MemoryStore()
    source = publisher(inner, keep=1)
    states = history(3)
    source.publish(states[0])
    with relaying(inner) as server:
        store = open_store(server.url)
        live = zeros_like(states[0])
        staged = reader(store, live).fetch()
        assert any("/readers/" in key for key in inner.list(""))
        for state in states[1:]:
            source.publish(state, anchor=True)
        staged.close()
        with pytest.raises(StoreError, match="leases and statuses of readers only"):
            Publisher(store, RUN)


def test_a_tree_of_relays_is_exact_and_each_fetches_once() -> None:
    inner = MemoryStore()
    states = history(3, size=20_000)
    source = publisher(inner)
    for state in states:
        source.publish(state)
    upstream = CountingStore(inner)
    with relaying(upstream) as far, relaying(open_store(far.url)) as near:
        pull_all(near.url, states[-1])
    assert all(n == inner.size(key) for key, n in objects_of(upstream.num_bytes).items())


def test_a_relay_whose_long_way_is_cut_says_so_and_is_exact_afterwards() -> None:
    inner = MemoryStore()
    states = history(2)
    source = publisher(inner)
    source.publish(states[0])
    upstream = CountingStore(inner)
    with relaying(upstream) as server:
        live = zeros_like(states[0])
        follower = reader(open_store(server.url), live)
        follower.pull()
        upstream.is_away = True
        time.sleep(0.1)
        with pytest.raises(StoreError, match="the long way is cut"):
            follower.pull()
        assert_same(live, states[0])
        upstream.is_away = False
        source.publish(states[1])
        assert follower.wait(1, timeout_s=60).version == 1
        assert_same(live, states[1])


class BreakingStore(CountingStore):
    """A long way on which each call breaks `num_breaks` times, without a byte."""

    num_breaks = 0

    def _count(self, operation: str, key: str, blob: bytes = b"") -> bytes:
        with self.lock:
            self.calls["try " + operation, key] += 1
            if self.calls["try " + operation, key] <= self.num_breaks:
                raise StoreError(f"{operation} '{key}': the line broke")
        return super()._count(operation, key, blob)


def test_a_line_that_breaks_is_tried_again_before_readers_are_told(monkeypatch) -> None:
    monkeypatch.setattr("gymfast.sync.relay._PAUSES_S", (0.01, 0.01))
    inner = MemoryStore()
    states = history(2, size=5000)
    source = publisher(inner)
    for state in states:
        source.publish(state)
    upstream = BreakingStore(inner)
    upstream.num_breaks = 2
    with relaying(upstream) as server:
        live = zeros_like(states[0])
        follower = reader(open_store(server.url), live, timeout_s=0.01)
        assert follower.pull().version == 2
        assert_same(live, states[2])
    fetched = objects_of(upstream.num_bytes)
    assert fetched
    assert all(n == inner.size(key) for key, n in fetched.items())


def test_a_line_that_stays_broken_is_told_with_its_reason_also_for_a_size(monkeypatch) -> None:
    monkeypatch.setattr("gymfast.sync.relay._PAUSES_S", (0.01, 0.01))
    upstream = BreakingStore(MemoryStore())
    upstream.inner.put("r/log/x", b"1")
    upstream.num_breaks = 100
    key = f"r/objects/{1:020d}/{'0' * 64}"
    with relaying(upstream) as server:
        store = open_store(server.url)
        for ask in (
            lambda: store.size(key),
            lambda: store.size("r/log/x"),
            lambda: store.get_range(key, 0, 1),
            lambda: list(store.list("r/")),
        ):
            with pytest.raises(StoreError, match=r"the line broke \(status 502\)"):
                ask()
    assert max(upstream.calls.values()) <= 6, "three times for each that asks"


def test_a_silent_line_is_not_waited_for_again(monkeypatch) -> None:
    """Those who wait for a relay have a limit of their own."""
    now = [0.0]
    monkeypatch.setattr("gymfast.sync.relay.time.monotonic", lambda: now[0])
    upstream = CountingStore(MemoryStore())

    def silent(operation: str, key: str, blob: bytes = b"") -> bytes:
        upstream.calls[operation, key] += 1
        now[0] += 20.0
        raise StoreError("timed out")

    monkeypatch.setattr(upstream, "_count", silent)
    relay = RelayCache(upstream, max_bytes=MAX_OBJECT_BYTES)
    with pytest.raises(StoreError, match="timed out"):
        relay.size(f"r/objects/{1:020d}/{'0' * 64}")
    assert sum(upstream.calls.values()) == 1
    relay.close()


def test_R69_objects_let_go_while_they_are_read_stay_whole() -> None:
    inner = MemoryStore()
    keys = []
    for index in range(600):
        blob = index.to_bytes(4, "little") * 1000
        keys.append(f"r/objects/{1:020d}/{__import__('hashlib').sha256(blob).hexdigest()}")
        inner.put(keys[-1], blob)
    relay = RelayCache(inner, max_bytes=MAX_OBJECT_BYTES)

    def read(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(0, 600, 1500):
            assert relay.get(keys[index], max_bytes=4000) == inner.get(keys[index], max_bytes=4000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert relay.status()["kept_objects"] <= 512
    relay.close()


@pytest.mark.parametrize("limit_s", [float("nan"), -1.0])
def test_a_freshness_that_is_none_is_refused(limit_s: float) -> None:
    with pytest.raises(ValueError, match="freshness_s is"):
        RelayCache(MemoryStore(), max_bytes=MAX_OBJECT_BYTES, freshness_s=limit_s)


def test_I11_answers_stay_within_their_bytes_and_the_oldest_unused_goes(monkeypatch) -> None:
    monkeypatch.setattr(relay_answers, "_MAX_BYTES", 10_000)
    monkeypatch.setattr(relay_answers, "_RECORD_FRESHNESS_S", 1000.0)
    store = CountingStore(MemoryStore())
    keys = [f"{RUN}/log/{number:020d}" for number in range(5)]
    for key in keys[:4]:
        store.inner.put(key, bytes(3000))
    relay = RelayCache(store, max_bytes=MAX_OBJECT_BYTES)
    for number in (0, 1, 2, 0, 3, 0, 2):
        relay.get(keys[number], max_bytes=3000)
    assert [store.calls["get", key] for key in keys[:4]] == [1, 1, 1, 1]
    relay.get(keys[1], max_bytes=3000)
    assert store.calls["get", keys[1]] == 2, "it was used before the others"
    store.inner.put(keys[4], bytes(50_000))
    for _ in range(2):
        relay.get(keys[4], max_bytes=50_000)
    assert store.calls["get", keys[4]] == 1, "one that is larger stays alone"
    relay.get(keys[0], max_bytes=3000)
    assert store.calls["get", keys[0]] == 2
    relay.close()


def test_I11_many_records_and_lists_take_bounded_memory() -> None:
    store = CountingStore(MemoryStore())
    keys = [f"{RUN}/log/{number:020d}" for number in range(200)]
    relay = RelayCache(store, max_bytes=MAX_OBJECT_BYTES, freshness_s=1000.0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number, key in enumerate(keys):
            store.inner.put(key, bytes(1 << 20))
            relay.get(key, max_bytes=1 << 20)
            list(relay.list(f"{RUN}/log/{number:017d}"))
            store.inner.delete(key)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 80 << 20
    relay.close()


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    mount = subprocess.run(command, capture_output=True, text=True, check=False)
    if mount.returncode:
        pytest.skip(f"needs kernel feature mount: {mount.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_relay_whose_disk_is_full_lets_go_of_older_objects(tmp_path: Path) -> None:
    inner = MemoryStore()
    states = history(6, num_tensors=2, size=20_000)
    source = publisher(inner)
    upstream = CountingStore(inner)
    with small_disk(tmp_path / "disk", "400k") as disk, relaying(upstream, folder=disk) as server:
        for state in states:
            source.publish(state, anchor=True)
            pull_all(server.url, state)
        fetched = objects_of(upstream.num_bytes)
        assert sum(fetched.values()) > 2 * 400 * 1024, "not all of them fit"
        assert all(n == inner.size(key) for key, n in fetched.items())


def test_where_the_disk_of_a_relay_is_too_small_readers_go_on_with_the_store(
    tmp_path: Path,
) -> None:
    states = history(1, num_tensors=2, size=20_000)
    inner = FileStore(tmp_path / "store")
    publisher(inner).publish(states[1])
    with small_disk(tmp_path / "disk", "64k") as disk, relaying(inner, folder=disk) as server:
        live = zeros_like(states[1])
        follower = reader(open_store(server.url), live, timeout_s=0.5)
        with pytest.raises(GymfastError, match=r"cannot keep .*No space left.*--cache-dir"):
            follower.pull()
        assert_same(live, zeros_like(states[1]))
        pull_all(f"{server.url},{inner.url}", states[1])


@contextmanager
def relay_process(store: Path, port: int = 0):
    command = [sys.executable, "-m", "gymfast", "relay", str(store), "--port", str(port), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def test_readers_go_on_when_their_relay_is_killed(tmp_path: Path) -> None:
    states = history(6, size=20_000)
    source = publisher(FileStore(tmp_path / "store"))
    live = zeros_like(states[0])
    with relay_process(tmp_path / "store") as (process, url):
        follower = Subscriber(f"{url},{tmp_path / 'store'}", RUN, LiveTarget(live))
        for version, state in enumerate(states):
            source.publish(state)
            if version == 3:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            assert follower.wait(version, timeout_s=60).version == version
            assert_same(live, state)
    assert not [p for p in tmp_path.rglob("*") if "relay" in p.name]
