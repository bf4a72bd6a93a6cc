"""One writer at a time: races, fencing, runs beside each other (I22, I23, I27)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    PassThroughStore,
    assert_same,
    copy_of,
    history,
    make_weights,
    publisher,
    reader,
    step,
    zeros_like,
)

from gymfast.errors import ConflictError, DeadlineError, NotFoundError, StoreError
from gymfast.stores import FileStore, MemoryStore
from gymfast.sync.chain import Entry, Tip, follow
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log
from gymfast.sync.manifest import EpochRecord, VersionRecord

KEYS = RunKeys(RUN)
NUM_RACERS = 8


def entries_of(store, run: str = RUN) -> list[Entry]:
    return Log(store, RunKeys(run)).load(lambda _: False)


def _race(root: str, number: int, num_versions: int, start, results) -> None:
    """Publishes until fenced, takes over again, until it has committed enough."""
    store = FileStore(root)
    committed: list[tuple[int, str, int]] = []
    weights = make_weights(number, num_tensors=1, size=40)
    start.wait()
    for _ in range(200):
        try:
            source = publisher(store, single_writer=False, label=f"racer {number}", keep=1000)
            while len(committed) < num_versions:
                report = source.publish(weights)
                committed.append((report.version, report.root, report.epoch))
                weights = step(weights, number * 1000 + len(committed))
        except ConflictError:
            continue
        break
    results.put((number, committed))


def run_race(root: Path, num_racers: int, num_versions: int) -> dict[int, list]:
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(num_racers), context.Queue()
    racers = [
        context.Process(target=_race, args=(str(root), i, num_versions, start, results))
        for i in range(num_racers)
    ]
    for racer in racers:
        racer.start()
    found = dict(results.get(timeout=240) for _ in racers)
    for racer in racers:
        racer.join(timeout=60)
        assert racer.exitcode == 0
    return found


def check_race(root: Path, found: dict[int, list]) -> None:
    store = FileStore(root)
    entries = entries_of(store)
    # Retention may take what lies before the first version: claims of an epoch, all of them older.
    first = entries[0].record.seq
    places = [entry.record.seq for entry in entries]
    assert places == list(range(first, first + len(entries))), "the whole log hangs together"
    versions = [e.record for e in entries if isinstance(e.record, VersionRecord)]
    assert [r.version for r in versions] == list(range(len(versions)))
    told = sorted(item for committed in found.values() for item in committed)
    assert told == [(r.version, r.root, r.epoch) for r in versions], (
        "what the publishers were told is exactly what the log holds"
    )
    live = zeros_like(make_weights(0, num_tensors=1, size=40))
    follower = reader(store, live)
    follower.pull()
    assert follower.root == versions[-1].root
    assert not fsck(store, RUN).damage


def test_i22_eight_racing_publishers_commit_each_version_once(tmp_path):
    found = run_race(tmp_path / "store", NUM_RACERS, num_versions=3)
    check_race(tmp_path / "store", found)
    assert all(len(committed) == 3 for committed in found.values())


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_i22_eight_racing_publishers_commit_each_version_once_long(tmp_path):
    found = run_race(tmp_path / "store", NUM_RACERS, num_versions=125)
    check_race(tmp_path / "store", found)


def test_i22_eight_racing_threads_on_the_memory_store():
    store, results = MemoryStore(), []
    start = threading.Barrier(NUM_RACERS)

    def race(number: int) -> None:
        weights = make_weights(number, num_tensors=1, size=40)
        start.wait()
        for _ in range(200):
            try:
                report = publisher(store, label=str(number)).publish(weights)
            except ConflictError:
                continue
            results.append((report.version, report.root))
            return

    threads = [threading.Thread(target=race, args=(i,)) for i in range(NUM_RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    versions = [e.record for e in entries_of(store) if isinstance(e.record, VersionRecord)]
    assert sorted(results) == [(r.version, r.root) for r in versions]
    assert len(versions) == NUM_RACERS


@pytest.mark.parametrize("how", ["before", "after"])
def test_i22_conflicts_and_lost_replies_leave_one_record_per_version(how):
    """Every create of the log fails once, before or after its effect, with two publishers."""
    states = history(6)
    store = FaultyStore(MemoryStore())
    seen: set[tuple[str, int]] = set()
    told: list[tuple[int, str]] = []

    def fault(n: int, operation: str, key: str) -> str:
        if operation != "create" or not key.startswith(KEYS.log_prefix) or (key, 0) in seen:
            return ""
        seen.add((key, 0))
        return how

    store.arm(fault)
    clock = ManualClock()
    for weights in states:
        source = publisher(store, clock=clock, timeout_s=5.0)
        report = source.publish(weights)
        told.append((report.version, report.root))
    versions = [e.record for e in entries_of(store) if isinstance(e.record, VersionRecord)]
    assert told == [(r.version, r.root) for r in versions]


# Fencing


def test_i23_a_publisher_stopped_anywhere_commits_nothing_after_its_successor_started():
    """A is held at each of its calls in turn, B takes over and publishes, A goes on."""
    states = history(3)
    number = 0
    while True:
        number += 1
        store = FaultyStore(MemoryStore())
        first = publisher(store, label="first")
        first.publish(states[0])
        successor = []

        def hold(
            n: int, operation: str, key: str, number=number, store=store, out=successor
        ) -> str:
            if n == number:
                store.fault = None
                out.append(publisher(store, label="second"))
                out[0].publish(states[1])
                store.fault = hold
            return ""

        store.arm(hold)
        committed = None
        fence = ""
        try:
            committed = first.publish(states[2]).seq
        except ConflictError as error:
            fence = str(error)
        reached = bool(successor)
        store.arm(None)
        entries = entries_of(store)
        at_claim = max(e.record.seq for e in entries if isinstance(e.record, EpochRecord))
        assert committed is not None or "second" in fence
        if reached and committed is not None:
            assert committed < at_claim, f"call {number}: a fenced publisher committed"
        by_first = [e for e in entries if e.record.epoch == 1 and e.record.seq > at_claim]
        assert not (reached and by_first)
        live = zeros_like(states[0])
        reader(store, live).pull()
        assert_same(live, states[1] if reached else states[2])
        with_more = successor[0] if reached else first
        with_more.publish(states[3])
        reader(store, live).pull()
        if not reached:
            break
    assert number > 5


def _publish_when_told(root: str, state: np.ndarray, pipe) -> None:
    source = publisher(FileStore(root), label="old")
    source.publish({"w": state})
    pipe.send("ready")
    pipe.recv()
    try:
        source.publish({"w": state + 1})
    except ConflictError as error:
        pipe.send(str(error))
    else:
        pipe.send("committed")


def test_i23_a_stopped_process_is_fenced_when_it_wakes_up(tmp_path):
    root = str(tmp_path / "store")
    state = np.arange(50, dtype=np.float32)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    old = context.Process(target=_publish_when_told, args=(root, state, theirs))
    old.start()
    assert ours.poll(60)
    assert ours.recv() == "ready"
    assert old.pid is not None
    os.kill(old.pid, signal.SIGSTOP)
    try:
        ours.send("go")
        new = publisher(FileStore(root), label="new")
        new.publish({"w": state + 2})
    finally:
        os.kill(old.pid, signal.SIGCONT)
    assert ours.poll(60)
    said = ours.recv()
    old.join(60)
    assert "fenced" in said
    assert "'new' took over with epoch 2" in said
    assert new.publish({"w": state + 3}).version == 2


def test_a_claim_that_arrives_where_retention_was_is_made_again():
    """A claim held for ages lands in a place whose record was deleted meanwhile."""
    states = history(8)
    store = FaultyStore(MemoryStore())
    current = publisher(store, label="current", anchor_every=1, keep=1)
    current.publish(states[0])
    is_held = [False]

    def hold(n: int, operation: str, key: str) -> str:
        if operation == "create" and key == KEYS.record(3) and not is_held[0]:
            is_held[0] = True
            for weights in states[1:6]:
                current.publish(weights)
            assert KEYS.record(3) not in list(store.inner.list(KEYS.log_prefix))
        return ""

    store.arm(hold)
    late = publisher(store, label="late")
    store.arm(None)
    assert is_held[0]
    assert late.version == 5, "it claimed again, at the end of the log"
    with pytest.raises(ConflictError, match="'late' took over"):
        current.publish(states[6])
    late.publish(states[6])
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[6])


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_claim_that_finds_its_place_taken_survives_a_fault_at_any_call(how):
    """Somebody else's claim comes first, and one call of ours fails, each in turn."""
    number = 0
    while True:
        number += 1
        store, rivals = FaultyStore(MemoryStore()), []
        publisher(store).publish(make_weights())

        def fault(n: int, operation: str, key: str, store=store, out=rivals, number=number) -> str:
            if operation == "create" and key == KEYS.record(3) and not out:
                out.append(publisher(store.inner, label="rival"))
            return how if n == number else ""

        store.arm(fault)
        try:
            mine = publisher(store, clock=ManualClock(), timeout_s=5.0)
        except StoreError:  # before or after the claim: whoever asked starts again
            continue
        assert rivals
        is_past_the_end = len(store.calls) < number
        store.arm(None)
        with pytest.raises(ConflictError, match="fenced"):
            rivals[0].publish(make_weights(1))
        assert mine.publish(make_weights(2)).epoch == 3
        if is_past_the_end:
            break
    assert number > 8


def test_a_claim_ends_with_the_deadline():
    class Dead(PassThroughStore):
        def create(self, key, data):
            if key.startswith(KEYS.log_prefix):
                raise StoreError("the store is away")
            self.inner.create(key, data)

    clock = ManualClock()
    with pytest.raises(DeadlineError, match="the store is away"):
        publisher(Dead(MemoryStore()), clock=clock, timeout_s=10.0)
    assert 9 <= clock.slept_s <= 11


# Runs beside each other


def snapshot_of(store: MemoryStore, run: str) -> dict[str, bytes]:
    return {key: store.get(key, max_bytes=1 << 30) for key in store.list(f"{run}/")}


RUN_NAMES = st.lists(
    st.text("ab-._1", min_size=1, max_size=4).filter(lambda name: name[0] != "."),
    min_size=2,
    max_size=2,
    unique=True,
)


@given(RUN_NAMES, st.lists(st.integers(0, 1), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_i27_two_runs_in_one_store_never_touch_each_other(runs, turns):
    store = MemoryStore()
    sources = [publisher(store, run, anchor_every=1, keep=1) for run in runs]
    models: list[dict | None] = [None, None]
    for turn in turns:
        other = runs[1 - turn]
        before = snapshot_of(store, other)
        weights = make_weights(turn) if models[turn] is None else step(models[turn], len(turns))
        sources[turn].publish(weights)
        models[turn] = copy_of(weights)
        assert snapshot_of(store, other) == before
    for run, model in zip(runs, models, strict=True):
        if model is not None:
            live = zeros_like(model)
            reader(store, live, run=run).pull()
            assert_same(live, model)


def test_i27_records_of_another_run_are_refused():
    store, states = MemoryStore(), history(2)
    for run in ("a", "b"):
        source = publisher(store, run)
        for weights in states:
            source.publish(weights)
    for key in list(store.list("b/log/")):
        store.put(key, store.get(key.replace("b/", "a/", 1), max_bytes=1 << 20))
    live = zeros_like(states[0])
    with pytest.raises(NotFoundError, match="is of run 'a'"):
        reader(store, live, run="b").pull()
    assert_same(live, zeros_like(states[0]))


def test_tips_of_racers_are_linear():
    """`follow` accepts the log of a race from the very first record."""
    store = MemoryStore()
    for number in range(4):
        publisher(store, label=str(number)).publish(make_weights(number))
    tip = Tip()
    for entry in entries_of(store):
        tip = follow(tip, entry.record, entry.tip.record, RUN).tip
    assert tip.version == 3


class LateStore(PassThroughStore):
    """Keeps back the create of one key, as a request that is stuck on the way to the store."""

    def __init__(self, inner, key: str) -> None:
        super().__init__(inner)
        self.stuck = key
        self.blob: bytes | None = None

    def create(self, key: str, data) -> None:
        if key == self.stuck:
            self.blob = self.blob or bytes(data)
            raise StoreError(f"create '{key}': no answer")
        super().create(key, data)


@pytest.mark.parametrize("num_failed_looks", [0, 2])
def test_i23_a_place_that_retention_emptied_is_not_committed_to(num_failed_looks: int) -> None:
    """A late record of ours was followed by a successor and deleted: our place is free again."""
    inner, clock, states = MemoryStore(), ManualClock(), history(6)
    late = LateStore(inner, KEYS.record(3))
    faulty = FaultyStore(late)
    old = publisher(faulty, clock=clock, timeout_s=1.0, single_writer=False)
    assert old.publish(states[0]).version == 0
    with pytest.raises((StoreError, DeadlineError)):
        old.publish(states[1])
    assert late.blob is not None
    inner.create(late.stuck, late.blob)
    late.stuck = ""
    new = publisher(inner, clock=clock, keep=1, anchor_every=1, single_writer=False)
    for weights in states[2:]:
        new.publish(weights)
    assert KEYS.record(3) not in list(inner.list(KEYS.log_prefix))
    looks = []

    def fault(_: int, operation: str, key: str) -> str:
        if operation == "list" and key == KEYS.floors_prefix:
            looks.append(key)
            return "before" if len(looks) <= num_failed_looks else ""
        return ""

    faulty.arm(fault)
    for _ in range(2):
        with pytest.raises(ConflictError, match="fenced"):
            old.publish(states[1])
    assert len(looks) > num_failed_looks
    live = zeros_like(states[0])
    reader(inner, live, clock=clock).pull()
    assert_same(live, states[6])
