"""Notes of objects before their record: readers fetch while it is made, and trust nothing."""

from __future__ import annotations

import hashlib
import threading

import pytest
from sync.folding import KEYS
from sync.harness import RUN, FaultyStore, assert_same, history, publisher, reader, zeros_like

from gymfast.errors import DeadlineError, FormatError
from gymfast.stores import MemoryStore
from gymfast.sync import staging
from gymfast.sync.ahead import MAX_NOTES
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

    def _do(self, operation: str, key: str, call):
        if operation == "create" and "/log/" in key:
            assert self.release.wait(TIMEOUT_S)
        if operation == "get" and "/objects/" in key:
            self.is_asked.set()
        return super()._do(operation, key, call)

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
    found = [key for key in store.objects("get") if key in set(store.objects("create"))]
    there = [key for key in found if found.count(key) == 1]
    assert set(found) == set(store.objects("create"))
    assert there, "each object was read more than once"


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
    future = stager._begun.take(key)
    assert future is not None
    assert future.result(TIMEOUT_S) == body
    assert num_looks == 3
    stager.close()
