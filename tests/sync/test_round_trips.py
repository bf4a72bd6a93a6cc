"""Over a long way nothing is asked twice, and nothing that can wait is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from sync.harness import (
    RUN,
    FaultyStore,
    assert_same,
    copy_of,
    history,
    publisher,
    reader,
    zeros_like,
)

from gymfast.errors import StoreError
from gymfast.stores import MemoryStore
from gymfast.stores.base import Blob, Store
from gymfast.sync import Publisher, collect
from gymfast.sync.keys import RunKeys
from gymfast.sync.objects import FrameWriter
from gymfast.sync.staging import MAX_EXPECTED

KEYS = RunKeys(RUN)
TIMEOUT_S = 60.0


class FarStore(FaultyStore):
    """A store far away that shows what was put; `gate` may hold calls up."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.num_ahead = 4
        self.shows_puts = True
        self.gate: Callable[[str, str], None] = lambda operation, key: None
        self.lock = threading.Lock()

    def _do(self, operation: str, key: str, call: Callable[[], object]) -> object:
        self.gate(operation, key)
        return super()._do(operation, key, call)

    def kinds(self) -> list[tuple[str, str]]:
        """Calls since `arm`, with the part of the run that they are of."""
        return [(operation, key.split("/")[1]) for operation, key in list(self.calls)]

    def kinds_of_publisher(self) -> list[tuple[str, str]]:
        """Without leases, which a reader may still give back, and notes, which nobody waits for."""
        return [kind for kind in self.kinds() if kind[1] not in ("readers", "ahead")]


@pytest.fixture
def far() -> FarStore:
    return FarStore(MemoryStore())


def following(far: FarStore, versions: int = 4) -> tuple[list, Publisher, object, object]:
    states = history(versions)
    source = publisher(far, anchor_every=200)
    source.publish(states[0])
    live = zeros_like(states[0])
    follower = reader(far, live)
    follower.pull()
    return states, source, follower, live


def test_a_commit_asks_twice_one_thing_after_the_other_and_looks_at_the_floor(far):
    states, source, _, _ = following(far)
    far.arm(None)
    source.publish(states[1])
    assert far.kinds_of_publisher() == [
        ("create", "objects"),
        ("create", "log"),
        ("list", "floors"),
        ("put", "hint"),
    ]


def test_a_store_that_does_not_promise_to_show_what_was_put_is_asked(far):
    far.shows_puts = False
    states, source, _, _ = following(far)
    far.arm(None)
    source.publish(states[1])
    found = far.kinds_of_publisher()[:3]
    assert found == [("create", "objects"), ("size", "objects"), ("create", "log")]


def test_objects_are_read_while_lease_and_floor_are_on_their_way(far):
    """Each waits here until the others have been asked: who asks in turn would wait for ever."""
    states, source, follower, live = following(far)
    source.publish(states[1])
    asked = {("get", "objects"), ("put", "readers"), ("list", "floors")}
    seen: set[tuple[str, str]] = set()
    changed = threading.Condition()

    def gate(operation: str, key: str) -> None:
        call = (operation, key.split("/")[1])
        with changed:
            seen.add(call)
            changed.notify_all()
            if call in asked:
                assert changed.wait_for(lambda: asked <= seen, TIMEOUT_S), f"{call} is alone"

    far.gate = gate
    assert follower.pull().version == 1
    assert_same(live, states[1])


def test_an_object_is_read_without_a_look_at_its_length(far):
    states, source, follower, _ = following(far)
    source.publish(states[1])
    far.arm(None)
    follower.pull()
    follower.close()
    assert ("size", "objects") not in far.kinds()
    assert far.kinds().count(("get", "objects")) == 1
    assert far.kinds()[-1] == ("delete", "readers")


def test_a_reader_that_waits_looks_again_before_it_has_an_answer(far):
    """The first look never ends; the version is found by another one."""
    states, source, follower, live = following(far)
    follower.poll()
    first, is_over = threading.Event(), threading.Event()
    num_looks, place = [0], KEYS.record(3)

    def gate(operation: str, key: str) -> None:
        if (operation, key) == ("get", place):
            with far.lock:
                num_looks[0] += 1
                is_first = num_looks[0] == 2  # the one before is that of the first poll
            if is_first:
                first.set()
                assert is_over.wait(TIMEOUT_S)

    far.gate = gate
    trainer = threading.Thread(
        target=lambda: first.wait(TIMEOUT_S) and source.publish(states[1]), daemon=True
    )
    trainer.start()
    try:
        report = follower.wait(1, TIMEOUT_S, interval_s=0.005)
    finally:
        is_over.set()
        trainer.join(TIMEOUT_S)
    assert report.version == 1
    assert_same(live, states[1])


def test_many_missed_versions_are_read_side_by_side_but_no_more_than_four_ahead(far):
    states, source, follower, live = following(far, MAX_EXPECTED + 3)
    for weights in states[1:]:
        source.publish(weights)
    objects = set(far.list(KEYS.objects_prefix))
    is_first, others = threading.Event(), threading.Event()
    asked: set[str] = set()

    def gate(operation: str, key: str) -> None:
        if operation == "get" and key in objects:
            with far.lock:
                asked.add(key)
                if len(asked) == MAX_EXPECTED:
                    others.set()
                is_mine = not is_first.is_set()
                is_first.set()
            if is_mine:
                assert others.wait(TIMEOUT_S), "the versions wait for the first one"
                assert len(asked) == MAX_EXPECTED

    far.gate = gate
    assert follower.pull().num_deltas == MAX_EXPECTED + 3
    assert_same(live, states[-1])


def test_R39_a_reader_that_retention_overtakes_before_its_lease_is_seen_plans_again(far):
    """Its lease comes after objects were asked for: what is gone by then is not an error."""
    states = history(6)
    source = publisher(far, anchor_every=1, keep=1)
    source.publish(states[0])
    live = zeros_like(states[0])
    follower = reader(far, live)
    is_done, lock = [False], threading.Lock()

    def gate(operation: str, key: str) -> None:
        with lock:
            if is_done[0] or operation != "get" or "/objects/" not in key:
                return
            is_done[0] = True
        far.gate = lambda operation, key: None
        for lease in list(far.inner.list(KEYS.readers_prefix)):
            far.inner.delete(lease)
        for weights in states[1:]:
            source.publish(weights)
        collect(far.inner, RUN, keep=1)

    far.gate = gate
    report = follower.pull()
    assert_same(live, states[report.version])
    follower.pull()
    assert_same(live, states[-1])


def frame_of(num_bytes: int) -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    for start in range(0, num_bytes, 100_000):
        yield rng.bytes(min(100_000, num_bytes - start))


@pytest.mark.parametrize("creates", [True, False])
def test_objects_leave_while_the_frame_is_made_and_no_more_is_held_than_one_of_them(far, creates):
    """20 MB with a limit of 4 MiB: first objects of 1 MiB, at most four of them at once."""
    held, most, lock = [0], [0], threading.Lock()
    limit = 4 << 20

    class Counting(FarStore):
        def put(self, key: str, data: Blob) -> None:
            self.counted(key, data, super().put)

        def create(self, key: str, data: Blob) -> None:
            self.counted(key, data, super().create)

        def counted(self, key: str, data: Blob, write: Callable[[str, Blob], None]) -> None:
            with lock:
                held[0] += len(data)
                most[0] = max(most[0], held[0])
            time.sleep(0)  # lets the others in
            write(key, data)
            with lock:
                held[0] -= len(data)

    store = Counting(MemoryStore())
    writer = FrameWriter(store, KEYS, 1, limit, creates=creates)
    ref = writer.write(frame_of(20_000_000))
    assert ref.num_bytes == 20_000_000
    assert [each.num_bytes for each in ref.objects[:17]] == [1 << 20] * 16 + [2 << 20]
    assert most[0] <= limit
    blobs = [store.get(KEYS.object(1, each.digest), max_bytes=limit) for each in ref.objects]
    assert b"".join(blobs) == b"".join(frame_of(20_000_000))
    writer.discard()
    assert not list(store.list(KEYS.objects_prefix))


def test_objects_that_were_there_are_put_again_and_not_deleted_with_what_failed(far):
    first = FrameWriter(far, KEYS, 1, 1 << 20, creates=True)
    ref = first.write(frame_of(200_000))
    key = KEYS.object(1, ref.objects[0].digest)
    far.inner.put(key, b"damaged")
    second = FrameWriter(far, KEYS, 1, 1 << 20, creates=True)
    second.write(frame_of(200_000))
    second.discard()
    assert far.size(key) == 200_000


def test_a_put_that_fails_fails_the_frame_once_the_others_have_ended(far):
    failed: list[str] = []

    def fault(number: int, operation: str, key: str) -> str:
        is_bad = operation == "create" and "/objects/" in key and not failed
        if is_bad:
            failed.append(key)
        return "before" if is_bad else ""

    far.arm(fault)
    writer = FrameWriter(far, KEYS, 1, 64 << 20, creates=True)
    with pytest.raises(StoreError, match="injected"):
        writer.write(frame_of(6_000_000))
    assert len(failed) == 1
    writer.discard()
    assert not list(far.inner.list(KEYS.objects_prefix))


def test_a_publish_whose_put_fails_is_made_good_by_the_next_one(far):
    states, source, follower, live = following(far)
    far.arm(lambda number, operation, key: "before" if operation == "create" else "")
    with pytest.raises(StoreError, match="injected"):
        source.publish(states[1])
    far.arm(None)
    source.publish(copy_of(states[2]))
    follower.pull()
    assert_same(live, states[2])


@pytest.mark.parametrize("interval_s", [0.0, -1.0])
def test_an_interval_has_to_be_positive(far, interval_s):
    _, _, follower, _ = following(far)
    with pytest.raises(ValueError, match="expected more than 0"):
        follower.wait(1, 1.0, interval_s=interval_s)
