"""Stores far away: what a publisher and its retention ask goes side by side, within budgets."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
from sync.folding import KEYS, compact, published
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    Weights,
    assert_same,
    history,
    publisher,
    reader,
    records_of,
    zeros_like,
)

from gymfast.stores import MemoryStore
from gymfast.sync import Compactor, objects, staging
from gymfast.sync import budget as budgets
from gymfast.sync.bandwidth import limited
from gymfast.sync.manifest import ObjectRef
from gymfast.sync.objects import FrameReads
from gymfast.sync.staging import Stager

MIB = 1 << 20
OBJECT_BYTES = 16 << 10
TIMEOUT_S = 60.0
NUM_TOGETHER = 4


class FarStore(FaultyStore):
    """A store far away; `begin` and `end` are told of each call, and may hold it up."""

    def __init__(self, *, shows_puts: bool = True) -> None:
        super().__init__(MemoryStore())
        self.num_ahead = 4
        self.shows_puts = shows_puts
        self.begin: Callable[[str, str], None] = lambda operation, key: None
        self.end: Callable[[str, str], None] = lambda operation, key: None

    def _do(self, operation: str, key: str, call: Callable[[], object]) -> object:
        self.begin(operation, key)
        try:
            return super()._do(operation, key, call)
        finally:
            self.end(operation, key)

    def asked(self, operation: str, part: str) -> list[str]:
        return [key for found, key in self.calls if found == operation and f"/{part}/" in key]


class Together:
    """Holds calls of one sort up until some are under way at once: in turn, they wait for ever."""

    def __init__(self, operation: str, part: str) -> None:
        self.what = (operation, part)
        self.seen = 0
        self._changed = threading.Condition()

    def begin(self, operation: str, key: str) -> None:
        if (operation, key.split("/")[1]) == self.what:
            with self._changed:
                self.seen += 1
                self._changed.notify_all()
                enough = self._changed.wait_for(lambda: self.seen >= NUM_TOGETHER, TIMEOUT_S)
            assert enough, f"{operation} '{key}' is alone"


def noise(seed: int, num_bytes: int = 200_000) -> Weights:
    rng = np.random.default_rng(seed)
    return {"w": rng.integers(0, 2**16, size=(num_bytes // 40, 20), dtype=np.uint16)}


# Retention


def test_retention_deletes_objects_side_by_side_and_asks_no_length_that_a_record_says() -> None:
    store = FarStore()
    source = publisher(store, keep=1, object_bytes=OBJECT_BYTES)
    source.publish(noise(0))
    old = set(store.inner.list(KEYS.objects_prefix))
    num_bytes = sum(store.inner.size(key) for key in old)
    store.arm(None)
    together = Together("delete", "objects")
    store.begin = together.begin
    report = source.publish(noise(1), anchor=True).cleaned
    assert report is not None
    assert (report.num_objects, report.num_bytes) == (len(old), num_bytes)
    assert together.seen == len(old) > NUM_TOGETHER
    assert not old & set(store.inner.list(""))
    assert store.asked("size", "objects") == []
    assert source._upkeep.doomed == set()


def test_objects_that_no_record_names_are_asked_for_their_lengths_side_by_side() -> None:
    store = FarStore()
    publisher(store).publish(noise(0))
    strays = [KEYS.object(1, f"{number:064x}") for number in range(2 * NUM_TOGETHER)]
    for key in strays:
        store.inner.put(key, b"12345")
    source = publisher(store, keep=1)
    together = Together("size", "objects")
    store.begin = together.begin
    report = source._upkeep.clean_if_due()[0]
    assert report is not None
    assert (report.num_objects, report.num_bytes) == (len(strays), 5 * len(strays))
    assert together.seen == len(strays)


def test_records_are_gone_before_the_first_object_goes() -> None:
    store = FarStore()
    source = publisher(store, keep=1, object_bytes=OBJECT_BYTES, anchor_every=100)
    states = history(9, size=2000)
    for state in states[:-1]:
        source.publish(state)
    events: list[tuple[str, str]] = []
    store.begin = lambda operation, key: events.append((f"begin {operation}", key.split("/")[1]))
    store.end = lambda operation, key: events.append((f"end {operation}", key.split("/")[1]))
    source.publish(states[-1], anchor=True)
    deletes = [(what, part) for what, part in events if what.endswith("delete")]
    last_record = max(i for i, event in enumerate(deletes) if event == ("end delete", "log"))
    first_object = deletes.index(("begin delete", "objects"))
    assert deletes.count(("begin delete", "log")) == len(states) - 1
    assert last_record < first_object


def test_a_delete_without_an_answer_is_noted_among_many() -> None:
    store = FarStore()
    source = publisher(store, keep=1, object_bytes=OBJECT_BYTES)
    source.publish(noise(0))
    old = sorted(store.inner.list(KEYS.objects_prefix))
    store.arm(lambda i, op, key: "after" if (op, key) == ("delete", old[3]) else "")
    report = source.publish(noise(1), anchor=True).cleaned
    assert report is not None
    assert len(report.failures) == 1
    assert source._upkeep.doomed == {old[3]}
    assert not set(old) & set(store.inner.list(""))


def test_objects_are_confirmed_side_by_side() -> None:
    store = FarStore(shows_puts=False)
    together = Together("size", "objects")
    store.begin = together.begin
    source = publisher(store, object_bytes=OBJECT_BYTES)
    source.publish(noise(0))
    num_objects = len(list(store.inner.list(KEYS.objects_prefix)))
    assert together.seen == num_objects > NUM_TOGETHER


# Memory


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory that each read of a frame may hold; pieces of 10 kB stand for 8 MiB."""
    monkeypatch.setattr(objects, "_READ_BYTES", 10_000)
    monkeypatch.setattr(budgets, "_LEAST_PIECE_BYTES", 100)
    found: list[int] = []
    init = FrameReads.__init__

    def noting(self, store, keys, record, requests, reading=None, *more) -> None:
        init(self, store, keys, record, requests, reading, *more)
        found.append((reading or objects.reading_for(store)).memory_bytes)

    monkeypatch.setattr(FrameReads, "__init__", noting)
    return found


@pytest.mark.parametrize("is_declared", [True, False])
def test_frames_of_a_plan_share_what_the_whole_plan_leaves(is_declared, readings, monkeypatch):
    store = FarStore()
    states = [noise(seed) for seed in range(4)]
    source = publisher(store)
    source.publish(states[0])
    live = zeros_like(states[0])
    with reader(store, live) as first:
        first.pull()
    num_bytes = sum(source.publish(state).frame_bytes for state in states[1:])
    room, options = 40_000, {}
    if is_declared:
        options = {"max_staging_bytes": num_bytes + room}
    else:
        for module in (budgets, staging):
            monkeypatch.setattr(module, "available_bytes", lambda: num_bytes + room, raising=False)
    readings.clear()
    with reader(store, live, **options) as late:
        assert len(late.fetch().plan.steps) == 3
        late.apply()
    assert_same(live, states[3])
    assert len(readings) >= 3
    assert max(readings) <= room // 3


def test_what_was_begun_before_the_plan_is_within_the_budget_too(readings, monkeypatch) -> None:
    store = FarStore()
    source = publisher(store)
    num_bytes = sum(source.publish(noise(seed)).frame_bytes for seed in range(2))
    records = [record for record in records_of(store) if hasattr(record, "frame")]
    stager = Stager(store, KEYS, None, num_bytes + 40_000)
    readings.clear()
    for record in records:
        stager.expect(record)
    stager.close()
    assert len(readings) == 2
    assert readings[1] <= 40_000 // staging.MAX_EXPECTED


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_frames_that_go_to_files_hold_less_memory(is_on_disk, tmp_path) -> None:
    store = FarStore()
    source = publisher(store)
    for seed in range(6):
        source.publish(noise(seed))
    records = [record for record in records_of(store) if hasattr(record, "frame")]
    stager = Stager(store, KEYS, tmp_path if is_on_disk else None, None)
    held = threading.Event()
    store.begin = lambda operation, key: held.wait(TIMEOUT_S) and None
    stager.begin(1, [ObjectRef(f"{number:064x}", 8 * MIB) for number in range(20)])
    assert stager._early.num_bytes == (64 if is_on_disk else 160) * MIB
    held.set()
    for record in records:
        stager.expect(record)
    assert len(stager._ahead) == (2 if is_on_disk else 4)
    stager.close()


# Bandwidth


class TimedStore(MemoryStore):
    """Far away, and notes when objects are read."""

    num_ahead = 1

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.seen: list[tuple[float, int]] = []

    def get(self, key: str, *, max_bytes: int) -> bytes:
        blob = super().get(key, max_bytes=max_bytes)
        self.seen.append((self.clock.now_s, len(blob)))
        return blob


def test_a_whole_object_is_granted_before_it_is_read() -> None:
    clock, rate = ManualClock(), 8 * MIB
    store = TimedStore(clock)
    store.num_ahead = 0  # so that objects are as large as they may be
    weights = noise(0, 20 * MIB)
    publisher(store, object_bytes=8 * MIB).publish(weights)
    store.num_ahead = 1
    record = next(record for record in records_of(store) if hasattr(record, "frame"))
    store.seen.clear()
    start_s = clock.now_s
    pieces = list(FrameReads(limited(store, rate, clock), KEYS, record, None).pieces())
    assert sum(map(len, pieces)) == record.frame.num_bytes
    assert len(store.seen) == len(record.frame.objects) == 3
    for at_s, _ in store.seen:
        read = sum(n for other_s, n in store.seen if other_s <= at_s)
        assert read <= rate * (at_s - start_s + 0.5)


# Threads


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.is_alive()}


def ended(before: set[str]) -> bool:
    """True once no thread is left that was not there before; they may take their time to end."""
    for thread in threading.enumerate():
        if thread.name not in before and thread.name.startswith("gymfast"):
            thread.join(TIMEOUT_S)
    return not {name for name in names_of_threads() - before if name.startswith("gymfast")}


def test_a_publisher_keeps_no_threads_that_only_its_start_needs() -> None:
    store = FarStore()
    for state in history(3):
        publisher(store).publish(state)
    gc.collect()
    before = names_of_threads()
    source = publisher(store)
    assert ended(before)
    source.publish(history(0, seed=5)[0])
    assert ended(before)


def test_a_compactor_that_is_closed_leaves_no_threads(tmp_path, quick_disk) -> None:
    store = FarStore()
    published(store, 4)
    gc.collect()
    before = names_of_threads()
    compactor = Compactor(store, RUN, tmp_path, every=2, levels=1, threads=1)
    assert len(list(compactor.work())) == 2
    compactor.close()
    assert ended(before)
    assert compact(store, tmp_path, levels=1) == []
