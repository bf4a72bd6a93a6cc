"""Budgets of bytes a second: exact in time that tests move, and over a real server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from object_double import Bucket, serve_bucket
from object_settings import s3_settings
from sync.harness import RUN, assert_same, history, publisher, reader, zeros_like

from gymfast.errors import DeadlineError, StoreError
from gymfast.stores import ObjectStore
from gymfast.stores.memory import MemoryStore
from gymfast.sync.bandwidth import Bandwidth, LimitedStore, limited
from gymfast.sync.relay import RelayCache
from gymfast.testing.conformance import StoreContract
from gymfast.testing.faults import Fault, FlakyStore, ManualClock

RATE = 1 << 20
MIB = 1 << 20


class SharedClock:
    """Time of several threads: it moves on once all of them sleep, to the next that wakes."""

    def __init__(self, num_threads: int) -> None:
        self.now_s = 0.0
        self._num_awake = num_threads
        self._wakes: list[float] = []
        self._condition = threading.Condition()

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_us(self) -> int:
        return int(self.now_s * 1e6)

    def sleep(self, seconds: float) -> None:
        with self._condition:
            end_s = self.now_s + seconds
            self._wakes.append(end_s)
            self._leave()
            self._condition.wait_for(lambda: self.now_s >= end_s, timeout=60)
            self._num_awake += 1

    def end(self) -> None:
        with self._condition:
            self._leave()

    def _leave(self) -> None:
        self._num_awake -= 1
        if self._num_awake == 0 and self._wakes:
            self.now_s = min(self._wakes)
            self._wakes.remove(self.now_s)
            self._condition.notify_all()


class NotingStore(MemoryStore):
    """Notes each request that carries bytes: when, and how many."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.seen: list[tuple[float, int]] = []

    def put(self, key, data) -> None:
        if isinstance(data, bytes | bytearray | memoryview):
            self.seen.append((self.clock.now_s, len(data)))
            super().put(key, data)
            return

        def noted():
            for chunk in data:
                self.seen.append((self.clock.now_s, len(chunk)))
                yield chunk

        super().put(key, noted())

    def get_range(self, key, start, length) -> bytes:
        self.seen.append((self.clock.now_s, length))
        return super().get_range(key, start, length)


def most_in(seen: list[tuple[float, int]], seconds: float) -> int:
    """The most bytes that went in any stretch of time of that length."""
    starts = [at for at, _ in seen]
    return max(sum(n for at, n in seen if start <= at < start + seconds) for start in starts)


class TestLimitedMemoryStore(StoreContract):
    """A store within a budget is a store."""

    @pytest.fixture
    def store(self) -> LimitedStore:
        return LimitedStore(MemoryStore(), Bandwidth(1 << 40))


def test_bytes_take_their_time_and_no_longer() -> None:
    clock = ManualClock()
    budget, start_s = Bandwidth(RATE, clock), clock.now_s
    for num_bytes in (10, 3 * MIB, 1, 5 * MIB, 123_456):
        budget.take(num_bytes)
    total = 10 + 3 * MIB + 1 + 5 * MIB + 123_456
    budget.take(1)  # begins when all before it are through
    assert clock.now_s - start_s == pytest.approx(total / RATE, abs=1e-3)
    assert budget.num_bytes == total + 1


def test_idle_time_is_not_saved_up() -> None:
    clock = ManualClock()
    budget = Bandwidth(RATE, clock)
    budget.take(MIB)
    clock.now_s += 1000
    start_s = clock.now_s
    budget.take(10 * MIB)
    assert clock.now_s - start_s >= 10 - 0.5 - 1e-6


def test_threads_share_a_budget_evenly_and_exactly() -> None:
    num_threads, per_thread = 5, 4 * MIB
    clock = SharedClock(num_threads)
    budget, ends = Bandwidth(RATE, clock), []

    def work() -> None:
        budget.take(per_thread)
        ends.append(clock.now_s)
        clock.end()

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    total_s = num_threads * per_thread / RATE
    assert budget.num_bytes == num_threads * per_thread
    assert max(ends) == pytest.approx(total_s - 0.25, abs=0.01)
    # The first slice of all does not wait, so one thread is a round ahead of the others.
    assert min(ends) >= total_s - 2 * 0.25 * num_threads - 0.01


def test_a_publisher_and_a_subscriber_keep_their_budgets_both_ways() -> None:
    clock = ManualClock()
    store = NotingStore(clock)
    states = history(2, size=200_000)
    source = publisher(store, clock=clock, max_bytes_per_s=RATE, object_bytes=3 * MIB)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock, max_bytes_per_s=RATE)
    for weights in states:
        for action in (lambda weights=weights: source.publish(weights), follower.pull):
            store.seen.clear()
            start_s = clock.now_s
            action()
            num_bytes = sum(n for _, n in store.seen)
            assert num_bytes > 0
            assert clock.now_s - start_s >= num_bytes / RATE - 1.5
            for seconds in (0.001, 1.0, 3.0):
                # A read of up to a second's worth goes at once, after its bytes were granted.
                assert most_in(store.seen, seconds) <= RATE * (seconds + 2.0) + 64_000
    assert_same(live, states[-1])
    assert clock.slept_s > 2.0


def test_a_retry_counts_too() -> None:
    clock = ManualClock()
    store = FlakyStore(MemoryStore(), Fault(1, "after", "put"), Fault(2, "after", "put"))
    budget = Bandwidth(RATE, clock)
    within = LimitedStore(store, budget)
    blob = os.urandom(2 * MIB)
    for _ in range(2):
        with pytest.raises(StoreError):
            within.put("a", blob)
    within.put("a", blob)
    assert within.get_range("a", 0, len(blob)) == blob
    assert budget.num_bytes == 4 * len(blob)


def test_a_slow_budget_is_no_time_out() -> None:
    """Both take far longer than `timeout_s`, and so does a lease last less than the fetch."""
    clock = ManualClock()
    store = MemoryStore()
    states = history(1, size=400_000)
    source = publisher(store, clock=clock, max_bytes_per_s=64 << 10, timeout_s=5.0)
    live = zeros_like(states[0])
    follower = reader(
        store, live, clock=clock, max_bytes_per_s=64 << 10, timeout_s=5.0, lease_s=30.0
    )
    for weights in states:
        source.publish(weights, anchor=True)
        start_s = clock.now_s
        follower.pull()
        assert clock.now_s - start_s > 30
        assert_same(live, weights)


class FailingReads(MemoryStore):
    """Each time it fails, it does so `step` reads later than the time before."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.num_failures = 0
        self._num_allowed, self._num_reads = 1, 0

    def get_range(self, key, start, length) -> bytes:
        self._num_reads += 1
        if self._num_reads > self._num_allowed:
            self._num_reads, self.num_failures = 0, self.num_failures + 1
            self._num_allowed += self.step
            raise StoreError("injected")
        return super().get_range(key, start, length)


def test_a_reader_that_gets_on_may_take_any_time_and_one_that_does_not_gives_up() -> None:
    weights = history(0, size=400_000)[0]
    for step in (1, 0):
        clock, store = ManualClock(), FailingReads(step)
        publisher(store, object_bytes=256 << 10).publish(weights)
        live = zeros_like(weights)
        follower = reader(store, live, clock=clock, timeout_s=5.0)
        if step == 0:
            with pytest.raises(DeadlineError):
                follower.pull()
            assert clock.slept_s <= 15
            continue
        follower.pull()
        assert_same(live, weights)
        assert store.num_failures > 10
        assert clock.slept_s > 30


def test_a_relay_fetches_within_its_budget() -> None:
    clock = ManualClock()
    store = NotingStore(clock)
    states = history(0, size=200_000)
    publisher(store).publish(states[0])
    store.seen.clear()
    cache = RelayCache(limited(store, 2 * RATE, clock), max_bytes=1 << 30)
    live = zeros_like(states[0])
    start_s = clock.now_s
    reader(cache, live, clock=clock).pull()
    cache.close()
    assert_same(live, states[0])
    num_bytes = sum(n for _, n in store.seen)
    assert num_bytes > 2 * MIB
    assert clock.now_s - start_s >= num_bytes / (2 * RATE) - 1.5


@pytest.mark.parametrize("number", [0, 1, (64 << 10) - 1, -5])
def test_a_budget_that_is_too_small_is_refused(number: int) -> None:
    for make in (publisher, lambda **options: reader(MemoryStore(), {}, **options)):
        with pytest.raises(ValueError, match="expected at least 65536"):
            make(max_bytes_per_s=number)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with serve_bucket() as served:
        for name, value in s3_settings(served.endpoint).items():
            monkeypatch.setenv(name, value)
        yield served


def test_an_object_store_keeps_the_budget_and_says_the_same(bucket: Bucket) -> None:
    """Each byte that goes over the line was granted, in the time of a clock that is moved."""
    clock, states = ManualClock(), history(1, size=1_000_000)
    store = ObjectStore("s3://bucket/a")
    source = publisher(store, clock=clock, max_bytes_per_s=4 * RATE)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock, max_bytes_per_s=4 * RATE)
    start_s = clock.now_s
    for weights in states:
        source.publish(weights)
    sent = sum(len(held.body) for held in bucket.objects.values())
    assert sent > 14 * MIB
    assert clock.now_s - start_s >= sent / (4 * RATE) - 1.0
    start_s = clock.now_s
    assert follower.pull().version == 1
    assert_same(live, states[1])
    assert clock.now_s - start_s >= follower_bytes(bucket) / (4 * RATE) - 2.0


def follower_bytes(bucket: Bucket) -> int:
    """Bytes of the objects of the run: a fresh reader needs them all."""
    return sum(len(held.body) for key, held in bucket.objects.items() if f"{RUN}/objects" in key)


def test_parts_are_uploaded_while_the_budget_holds_back_the_next(bucket: Bucket) -> None:
    """So a request never waits for the budget, whatever time-out the store has."""
    store, arrived = ObjectStore("s3://bucket/a"), []

    def slices() -> Iterator[bytes]:
        for number in range(4):
            yield bytes([number]) * (8 * MIB)
            if number in (1, 2):
                arrived.append(wait_for_parts(bucket, number))

    store.put("a", slices())
    assert arrived == [True, True]
    assert store.size("a") == 32 * MIB


def wait_for_parts(bucket: Bucket, count: int) -> bool:
    """True once so many parts are there; the deadline is generous, as it is never needed."""
    pause = threading.Event()
    for _ in range(6000):
        with bucket.lock:
            if any(len(parts) >= count for _, parts in bucket.uploads.values()):
                return True
        pause.wait(0.01)
    return False
