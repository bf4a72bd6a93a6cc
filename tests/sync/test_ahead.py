"""Notes of objects before their record: readers fetch while it is made, and trust nothing."""

from __future__ import annotations

import hashlib
import threading

import pytest
from sync.folding import KEYS
from sync.harness import (
    RUN,
    FaultyStore,
    assert_same,
    history,
    publisher,
    reader,
    records_of,
    zeros_like,
)

from gymfast.errors import DeadlineError, FormatError, NotFoundError
from gymfast.stores import MemoryStore
from gymfast.sync import staging
from gymfast.sync.ahead import MAX_NOTES
from gymfast.sync.bandwidth import LimitedStore, limited
from gymfast.sync.fsck import fsck
from gymfast.sync.manifest import AheadRecord, ObjectRef, encode, parse_ahead

TIMEOUT_S = 60.0
INTERVAL_S = 0.005


class SlowRecord(FaultyStore):
    """A store far away that keeps records of the log back until `release`."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.num_ahead, self.shows_puts = 4, True
        self.release = threading.Event()
        self.release.set()
        self.is_asked = threading.Event()
        self.served: list[str] = []

    def _do(self, operation: str, key: str, call):
        if operation == "create" and "/log/" in key:
            assert self.release.wait(TIMEOUT_S)
        if operation == "get" and "/objects/" in key:
            self.is_asked.set()
        answer = super()._do(operation, key, call)
        if operation == "get" and "/objects/" in key:
            self.served.append(key)
        return answer

    def objects(self, operation: str) -> list[str]:
        return [key for found, key in self.calls if found == operation and "/objects/" in key]


def in_background(call) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def note(seq: int, *refs: ObjectRef, run: str = RUN, epoch: int = 1) -> bytes:
    return encode(AheadRecord(1, run, epoch, seq, refs))


def test_objects_travel_before_their_record_and_only_once() -> None:
    store, states = SlowRecord(), history(1, num_tensors=3, size=20_000)
    source, live = publisher(store, object_bytes=2000), zeros_like(states[0])
    source.publish(states[0])
    with reader(store, live) as follower:
        follower.pull()
        store.arm(None)
        store.is_asked.clear()
        store.release.clear()
        publishing = in_background(lambda: source.publish(states[1]))
        waiting = in_background(lambda: follower.wait(1, TIMEOUT_S, interval_s=INTERVAL_S))
        assert store.is_asked.wait(TIMEOUT_S), "nothing was read before the record"
        assert not any("/log/" in key for op, key in store.calls if op == "create")
        store.release.set()
        for thread in (publishing, waiting):
            thread.join(TIMEOUT_S)
        assert follower.version == 1
        assert_same(live, states[1])
    created = store.objects("create")
    assert sorted(key for key in store.served if key in set(created)) == sorted(created)


def test_a_note_that_lies_costs_no_version() -> None:
    store, states = SlowRecord(), history(1)
    source, live = publisher(store), zeros_like(states[0])
    source.publish(states[0])
    held = next(iter(store.inner.list(KEYS.objects_prefix))).rpartition("/")[2]
    store.inner.put(KEYS.ahead(0), note(3, ObjectRef("0" * 64, 1000), ObjectRef(held, 7)))
    store.arm(lambda _, op, key: "before" if op == "put" and "/ahead/" in key else "")
    with reader(store, live) as follower:
        follower.pull()
        store.is_asked.clear()
        waiting = in_background(lambda: follower.wait(1, TIMEOUT_S, interval_s=INTERVAL_S))
        assert store.is_asked.wait(TIMEOUT_S)
        source.publish(states[1])
        waiting.join(TIMEOUT_S)
        assert follower.version == 1
        assert_same(live, states[1])


@pytest.mark.parametrize(
    "blob",
    [
        note(2, ObjectRef("0" * 64, 10)),
        note(3, ObjectRef("0" * 64, 10), run="other"),
        b"",
        b"\xff" * 100,
        bytes(2 << 20),
        note(3, ObjectRef("0" * 64, 10)).replace(b'"seq":3', b'"seq":-3'),
    ],
)
def test_a_note_of_something_else_is_no_note(blob) -> None:
    store, states = SlowRecord(), history(0)
    publisher(store).publish(states[0])
    store.inner.put(KEYS.ahead(0), blob)
    with reader(store, zeros_like(states[0])) as follower:
        follower.pull()
        store.arm(None)
        with pytest.raises(DeadlineError):
            follower.wait(1, 0.2, interval_s=INTERVAL_S)
        assert follower.version == 0
    assert any("/ahead/" in key for _, key in store.calls)
    assert not store.objects("get")


def test_a_store_that_takes_no_notes_still_takes_versions() -> None:
    store, states = SlowRecord(), history(2)
    source, live = publisher(store), zeros_like(states[0])
    store.arm(lambda _, op, key: "before" if op == "put" and "/ahead/" in key else "")
    for state in states:
        source.publish(state)
    with reader(store, live) as follower:
        follower.pull()
    assert_same(live, states[2])


def test_notes_begin_no_more_than_the_budget_has_room_for() -> None:
    store, states = SlowRecord(), history(0)
    publisher(store).publish(states[0])
    refs = [ObjectRef(f"{number:064x}", 1000) for number in range(60)]
    store.inner.put(KEYS.ahead(0), note(3, *refs))
    live = zeros_like(states[0])
    with reader(store, live, max_staging_bytes=40_000) as follower:
        follower.pull()
        store.arm(None)
        with pytest.raises(DeadlineError):
            follower.wait(1, 0.5, interval_s=INTERVAL_S)
    assert 1 <= len(set(store.objects("get"))) <= 10  # a quarter of the budget


def test_a_reader_of_one_store_follows_notes_of_a_new_publisher() -> None:
    """Its epoch is another one, and so are the keys of its objects."""
    store, states = SlowRecord(), history(1)
    publisher(store).publish(states[0])
    live = zeros_like(states[0])
    with reader(store, live) as follower:
        follower.pull()
        source = publisher(store)
        waiting = in_background(lambda: follower.wait(1, TIMEOUT_S, interval_s=INTERVAL_S))
        source.publish(states[1])
        waiting.join(TIMEOUT_S)
        assert follower.version == 1
        assert_same(live, states[1])


def test_notes_are_no_strays_and_there_are_few_of_them() -> None:
    store, states = SlowRecord(), history(2, num_tensors=3, size=50_000)
    source = publisher(store, object_bytes=500)
    for state in states:
        source.publish(state)
    notes = list(store.inner.list(KEYS.ahead_prefix))
    assert 1 <= len(notes) <= MAX_NOTES
    assert parse_ahead(store.get(notes[0], max_bytes=1 << 20), "a note").run == RUN
    assert not [found for found in fsck(store, RUN).findings if "/ahead/" in found.key]


def test_a_near_store_has_no_notes() -> None:
    store, states = MemoryStore(), history(1)
    source = publisher(store)
    for state in states:
        source.publish(state)
    assert not list(store.list(KEYS.ahead_prefix))


def test_a_damaged_note_is_refused_by_the_parser() -> None:
    blob = note(3, ObjectRef("0" * 64, 10))
    for bad in (blob[:-1], blob.replace(b'"epoch":1', b'"epoch":0'), blob + b" "):
        with pytest.raises(FormatError):
            parse_ahead(bad, "a note")


def test_what_no_record_names_is_let_go_when_the_record_comes() -> None:
    """Else the frame waits behind what was noted for nothing: here each look takes for ever."""
    store, states = SlowRecord(), history(1)
    source, live = publisher(store), zeros_like(states[0])
    source.publish(states[0])
    bogus = [ObjectRef(f"{number:064x}", 1) for number in range(64)]
    store.inner.put(KEYS.ahead(0), note(3, *bogus))
    num_looks, is_known = 0, threading.Event()

    def fault(_: int, operation: str, key: str) -> str:
        nonlocal num_looks
        if operation == "get" and key.rpartition("/")[2] in {ref.digest for ref in bogus}:
            num_looks += 1
            assert is_known.wait(TIMEOUT_S)
        if operation == "put" and "/readers/" in key:  # the lease: the record is known
            is_known.set()
        return "before" if operation == "put" and "/ahead/" in key else ""

    store.arm(fault)
    with reader(store, live) as follower:
        follower.pull()
        is_known.clear()
        waiting = in_background(lambda: follower.wait(1, TIMEOUT_S, interval_s=INTERVAL_S))
        assert store.is_asked.wait(TIMEOUT_S)
        source.publish(states[1])
        waiting.join(TIMEOUT_S)
        assert follower.version == 1
    assert num_looks < 3 * 8  # of 64 notes with five looks each


def test_an_early_read_that_fails_late_costs_its_own_object_only() -> None:
    """It is asked for again in its place, not the frame."""
    store, states = SlowRecord(), history(1, num_tensors=3, size=20_000)
    source, live = publisher(store, object_bytes=2000), zeros_like(states[0])
    source.publish(states[0])
    failed = threading.Event()

    def fault(_: int, operation: str, key: str) -> str:
        if operation == "get" and "/objects/" in key and not failed.is_set():
            failed.set()
            return "before"
        return ""

    with reader(store, live) as follower:
        follower.pull()
        store.arm(fault)
        store.release.clear()
        waiting = in_background(lambda: follower.wait(1, TIMEOUT_S, interval_s=INTERVAL_S))
        publishing = in_background(lambda: source.publish(states[1]))
        assert failed.wait(TIMEOUT_S)
        store.release.set()
        for thread in (waiting, publishing):
            thread.join(TIMEOUT_S)
        assert follower.version == 1
    served = [key for key in store.served if key in set(store.objects("create"))]
    assert len(served) == len(set(served)) == len(set(store.objects("create")))


def test_a_look_at_an_absent_object_costs_no_bandwidth() -> None:
    store = limited(SlowRecord(), 32 << 20)
    assert isinstance(store, LimitedStore)
    for _ in range(20):
        with pytest.raises(NotFoundError):
            store.get_known("run/objects/1/absent", 8 << 20)
    assert store._bandwidth.num_bytes == 0


def test_early_reads_leave_the_budget_to_the_frames() -> None:
    store, states = SlowRecord(), history(1, num_tensors=2, size=20_000)
    source, live = publisher(store, object_bytes=2000), zeros_like(states[0])
    source.publish(states[0])
    with reader(store, live) as follower:
        follower.pull()
    report = source.publish(states[1])
    refs = [ref for record in records_of(store)[-1:] for ref in record.frame.objects]
    stager = staging.Stager(store, KEYS, None, report.frame_bytes + 1000)
    stager.begin(1, refs)
    assert stager._early.num_bytes > 1000
    with reader(store, live, max_staging_bytes=report.frame_bytes + 1000) as late:
        late._fetcher._stager.begin(1, refs)
        late.pull()
    assert_same(live, states[1])
    stager.close()
    assert stager._early.num_bytes == 0
    stager.begin(1, refs)
    assert stager._early.num_bytes == 0  # nothing begins after the end


def test_an_object_that_is_noted_before_it_is_there_is_asked_for_again() -> None:
    store, states = SlowRecord(), history(0)
    publisher(store).publish(states[0])
    body = b"x" * 100
    ref = ObjectRef(hashlib.sha256(body).hexdigest(), len(body))
    key, num_looks = KEYS.object(1, ref.digest), 0

    def fault(_: int, operation: str, asked: str) -> str:
        nonlocal num_looks
        if (operation, asked) == ("get", key):
            num_looks += 1
            if num_looks == 3:
                store.inner.put(key, body)
        return ""

    store.arm(fault)
    stager = staging.Stager(store, KEYS, None, None)
    stager.begin(1, [ref])
    future = stager._early.take(key)
    assert future is not None
    assert future.result(TIMEOUT_S) == body
    assert num_looks == 3
    stager.close()
