"""The failing stores fail as they say, and pass the contract where they must."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores import MemoryStore, Store, check_create_only
from gymfast.testing.conformance import StoreContract
from gymfast.testing.faults import (
    DelayedListStore,
    Fault,
    FlakyStore,
    IgnoresConditionsStore,
    ManualClock,
    PassThroughStore,
    TamperStore,
)


class TestPassThroughStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return PassThroughStore(MemoryStore())


class TestFlakyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return FlakyStore(MemoryStore())


class TestDelayedListStoreWithoutDelay(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return DelayedListStore(MemoryStore(), ManualClock(), list_delay_s=0)


class TestTamperStoreWithoutDamage(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return TamperStore(MemoryStore())


def test_a_fault_before_the_effect_leaves_nothing() -> None:
    store = FlakyStore(MemoryStore(), Fault(2))
    store.put("a", b"1")
    with pytest.raises(StoreError, match="before call 2"):
        store.create("b", b"2")
    store.put("c", b"3")
    assert list(store.inner.list("")) == ["a", "c"]
    assert store.calls == [("put", "a"), ("create", "b"), ("put", "c")]


def test_a_lost_reply_leaves_the_effect() -> None:
    store = FlakyStore(MemoryStore(), Fault(1, "after", "create"))
    store.put("a", b"1")
    with pytest.raises(StoreError, match="after call 1"):
        store.create("b", b"2")
    assert store.get("b", max_bytes=1) == b"2"


def test_a_fault_during_a_put_consumes_some_chunks_and_has_no_effect() -> None:
    taken: list[int] = []

    def produce() -> Iterator[bytes]:
        for index in range(10):
            taken.append(index)
            yield b"x"

    store = FlakyStore(MemoryStore(), Fault(1, "during", "put", num_chunks=3))
    with pytest.raises(StoreError):
        store.put("a", produce())
    assert taken == [0, 1, 2]
    assert list(store.inner.list("")) == []


def test_a_fault_can_be_a_crash_of_the_caller() -> None:
    store = FlakyStore(MemoryStore(), Fault(1, "after", error=KeyboardInterrupt("crash")))
    with pytest.raises(KeyboardInterrupt, match="crash"):
        store.delete("a")


def test_I34_a_delayed_list_shows_objects_late_and_deletes_late() -> None:
    clock = ManualClock()
    inner = MemoryStore()
    inner.put("old", b"0")
    store = DelayedListStore(inner, clock, list_delay_s=2)
    store.create("a", b"1")
    store.delete("old")
    assert list(store.list("")) == ["old"]
    assert store.get("a", max_bytes=1) == b"1"
    with pytest.raises(NotFoundError):
        store.get("old", max_bytes=1)
    clock.now_s += 1.9
    assert list(store.list("")) == ["old"]
    clock.now_s += 0.1
    assert list(store.list("")) == ["a"]


def test_I34_delayed_reads_are_stale_but_create_only_is_exact() -> None:
    clock = ManualClock()
    store = DelayedListStore(MemoryStore(), clock, list_delay_s=5, read_delay_s=5)
    store.put("k", b"first")
    with pytest.raises(NotFoundError, match="yet"):
        store.size("k")
    with pytest.raises(ConflictError):
        store.create("k", b"x")
    clock.now_s += 5
    store.put("k", b"second one")
    assert (store.get("k", max_bytes=9), store.size("k")) == (b"first", 5)
    clock.now_s += 5
    assert store.get_range("k", 0, 6) == b"second"


@pytest.mark.parametrize(
    "store",
    [
        IgnoresConditionsStore(MemoryStore()),
        IgnoresConditionsStore(
            MemoryStore(), checks_first=True, pause=threading.Barrier(4, timeout=5).wait
        ),
    ],
    ids=["ignores", "races"],
)
def test_I24_a_store_that_ignores_create_only_is_detected(store: IgnoresConditionsStore) -> None:
    with ThreadPoolExecutor(3) as pool:
        if store.checks_first:
            # The pause takes four at once: company for the creation that comes before the race.
            for index in range(3):
                pool.submit(store.create, f"other/{index}", b"")
        with pytest.raises(StoreError, match=r"created '.*' twice|let 4 of 4 racing writers"):
            check_create_only(store)
    assert list(store.inner.list("probe")) == []


def test_I24_a_store_that_admits_having_no_create_only_is_refused_untouched() -> None:
    store = FlakyStore(MemoryStore())
    store.has_create_only = False
    with pytest.raises(StoreError, match="no create-only"):
        check_create_only(store)
    assert store.calls == []


def test_I24_a_store_that_refuses_every_creation_does_not_pass() -> None:
    class RefusesAll(PassThroughStore):
        def create(self, key: str, data: object) -> None:
            raise ConflictError(f"'{key}' exists")

    with pytest.raises(StoreError):
        check_create_only(RefusesAll(MemoryStore()))


def test_I24_a_store_whose_conflict_overwrites_is_detected() -> None:
    class OverwritesAndRefuses(PassThroughStore):
        def create(self, key: str, data: bytes) -> None:
            exists = key in self.inner.list(key)
            self.inner.put(key, data)
            if exists:
                raise ConflictError(f"'{key}' exists")

    with pytest.raises(StoreError, match="returned b'second'"):
        check_create_only(OverwritesAndRefuses(MemoryStore()))


def test_tampered_reads_are_damaged_in_every_method_and_heal() -> None:
    store = TamperStore(MemoryStore())
    store.put("a", b"\x00\x01")
    store.put("b", b"bbb")
    store.flip("a", 9)
    assert store.get("a", max_bytes=2) == b"\x00\x03"
    assert store.get_range("a", 1, 1) == b"\x03"
    store.truncate("a", 1)
    assert (store.size("a"), store.get("a", max_bytes=2)) == (1, b"\x00")
    with pytest.raises(StoreError, match="truncated"):
        store.get_range("a", 0, 2)
    store.extend("a", b"!")
    with pytest.raises(StoreError, match="3 bytes, over the limit of 2"):
        store.get("a", max_bytes=2)
    store.swap("a", "b")
    assert store.get("a", max_bytes=9) == b"bbb"
    assert store.get("b", max_bytes=9) == b"\x00\x01"
    store.heal("a")
    assert store.get("a", max_bytes=9) == b"\x00\x01"
    assert store.size("b") == 2
    store.heal()
    assert store.size("b") == 3


def test_a_memory_store_can_run_full() -> None:
    store = MemoryStore(limit_bytes=10)
    store.put("a", b"12345678")
    assert store.free_bytes() == 2
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="3 bytes do not fit, 2 of 10 bytes are free"):
            write("b", b"123")
    store.put("a", b"1")
    store.put("b", b"123")
