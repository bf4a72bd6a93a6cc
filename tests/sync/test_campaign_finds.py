"""What the campaign found (docs/reliability.md), each in its smallest form."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    PassThroughStore,
    assert_same,
    history,
    publisher,
    reader,
    records_of,
    zeros_like,
)

from gymfast.errors import ChainError, FormatError, NotFoundError, StoreError
from gymfast.stores import MemoryStore
from gymfast.sync import Compactor
from gymfast.sync.cleaner import collect
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log
from gymfast.sync.manifest import StateRecord, digest_of, encode

KEYS = RunKeys(RUN)
STATES = history(5)


class BadWay(PassThroughStore):
    """Changes what `get` brings, so often for each key, then no more."""

    def __init__(self, inner, change: Callable[[str, bytes], bytes], times: int = 1) -> None:
        super().__init__(inner)
        self.change, self.times = change, times
        self.num_changed: dict[str, int] = {}

    def get(self, key: str, *, max_bytes: int) -> bytes:
        blob = self.inner.get(key, max_bytes=max_bytes)
        if self.num_changed.get(key, 0) < self.times:
            changed = self.change(key, blob)
            if changed != blob:
                self.num_changed[key] = self.num_changed.get(key, 0) + 1
                return changed
        return blob


def cut(key: str, blob: bytes) -> bytes:
    return blob[:-5] if key.startswith(KEYS.log_prefix) else blob


def other_digest(key: str, blob: bytes) -> bytes:
    """A record that parses, and names an object that is not there."""
    found = re.search(rb'"digest":"([0-9a-f]{64})"', blob)
    if not key.startswith(KEYS.log_prefix) or found is None:
        return blob
    place = found.start(1)
    digit = b"0" if blob[place : place + 1] != b"0" else b"1"
    return blob[:place] + digit + blob[place + 1 :]


def other_time(key: str, blob: bytes) -> bytes:
    """The newest record, with another digest."""
    is_last = key == KEYS.record(2)
    return blob.replace(b'"created_us":1', b'"created_us":2') if is_last else blob


def test_a_claim_goes_on_when_the_store_fails_while_it_follows_another_one():
    store = FaultyStore(MemoryStore())
    publisher(store).publish(STATES[0])
    is_raced, num_failed = [False], [0]

    def fault(_: int, operation: str, key: str) -> str:
        if operation == "create" and key == KEYS.record(3) and not is_raced[0]:
            is_raced[0] = True
            publisher(store.inner, label="faster").publish(STATES[1])
        is_look = is_raced[0] and operation == "get" and key == KEYS.record(3)
        num_failed[0] += is_look
        return "before" if is_look and num_failed[0] in (2, 4) else ""

    store.arm(fault)
    late = publisher(store, clock=ManualClock())
    assert (late.epoch, late.version) == (3, 1)


@pytest.mark.parametrize("change", [cut, other_digest])
def test_I26_one_bad_read_deletes_nothing(change):
    """Of retention from outside, and of a publisher that takes over."""
    inner = MemoryStore()
    publisher(inner).publish(STATES[0])
    publisher(inner).publish(STATES[1])
    publisher(inner)
    before = {k for k in inner.list("") if "/log/" in k or "/objects/" in k}
    way = BadWay(inner, change)
    collect(way, RUN, keep=50)
    assert way.num_changed
    assert before <= set(inner.list(""))
    way = BadWay(inner, change)
    source = publisher(way, clock=ManualClock())
    source.publish(STATES[2])
    assert way.num_changed
    assert before <= set(inner.list(""))
    assert not fsck(inner, RUN).damage
    live = zeros_like(STATES[0])
    reader(inner, live).pull()
    assert_same(live, STATES[2])


@pytest.mark.parametrize("change", [other_time, cut])
def test_I22_a_publisher_goes_on_after_what_is_there_not_after_one_bad_read_of_it(change):
    inner = MemoryStore()
    publisher(inner).publish(STATES[0])
    live = zeros_like(STATES[0])
    follower = reader(inner, live)
    follower.pull()
    way = BadWay(inner, change)
    source = publisher(way)
    assert way.num_changed
    source.publish(STATES[1])
    follower.pull()
    assert_same(live, STATES[1])


def test_bytes_that_differ_each_time_are_an_error_of_the_store():
    inner = MemoryStore()
    publisher(inner).publish(STATES[0])
    numbers = iter(range(10**6))
    way = BadWay(inner, lambda _, blob: blob + b"%d" % next(numbers), times=10**6)
    with pytest.raises(StoreError, match="reads in a row gave other bytes each time"):
        Log(way, KEYS).read_settled(2)
    with pytest.raises(FormatError):
        Log(BadWay(inner, cut, times=10**6), KEYS).read_settled(2)


class LateDeletes(PassThroughStore):
    """Answers no delete; all of them are carried out when `arrive` is called."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.late: list[str] = []
        self.is_away = False

    def delete(self, key: str) -> None:
        if not self.is_away:
            super().delete(key)
            return
        self.late.append(key)
        raise StoreError(f"delete '{key}': no answer")

    def arrive(self) -> None:
        for key in self.late:
            self.inner.delete(key)


def test_I20_a_delete_that_comes_late_takes_no_object_of_a_version():
    """The objects of a failed publish are deleted; the retry has the same bytes."""
    inner = LateDeletes(MemoryStore())
    store = FaultyStore(inner)
    source = publisher(store, object_bytes=100)
    source.publish(STATES[0])
    inner.is_away = True
    store.arm(lambda n, op, key: "before" if op == "put" and n > 6 else "")
    with pytest.raises(StoreError):
        source.publish(STATES[1])
    store.arm(None)
    assert inner.late
    assert source.publish(STATES[1]).version == 1
    inner.arrive()
    assert not fsck(inner, RUN).damage
    live = zeros_like(STATES[0])
    reader(inner, live).pull()
    assert_same(live, STATES[1])


@pytest.mark.parametrize("name", ["a/b", "../other", "", ".hidden", "a b", "x" * 129])
def test_I26_a_reader_whose_lease_nobody_could_read_is_refused(name):
    with pytest.raises(ValueError, match="heed its lease"):
        reader(MemoryStore(), {}, reader_id=name or "/")


def test_readers_go_on_behind_a_record_that_rots_after_they_followed_it():
    """Later records are sound, so the new publisher goes on with their numbers."""
    store = MemoryStore()
    source = publisher(store)
    for weights in STATES[:4]:
        source.publish(weights)
    live = zeros_like(STATES[0])
    follower = reader(store, live)
    follower.pull()
    rotten = [r for r in records_of(store) if isinstance(r, StateRecord)][1]
    store.put(KEYS.record(rotten.seq), encode(rotten)[:-3])
    source = publisher(store)
    assert (source.epoch, source.version) == (2, 3)
    source.publish(STATES[4])
    follower.pull()
    assert_same(live, STATES[4])
    assert digest_of(encode(records_of_end(store))) == follower._view.held.record


def records_of_end(store):
    log = Log(store, KEYS)
    return log.read(log.places()[-1])[0]


def test_I20_a_delete_that_was_not_answered_may_come_after_one_that_was():
    """Retention deletes what the publisher's own delete, still under way, is to delete."""
    inner = LateDeletes(MemoryStore())
    store = FaultyStore(inner)
    source = publisher(store, object_bytes=100, anchor_every=1, keep=1)
    source.publish(STATES[0])
    inner.is_away = True
    store.arm(lambda n, op, key: "before" if op == "put" and n > 6 else "")
    with pytest.raises(StoreError):
        source.publish(STATES[2])
    store.arm(None)
    inner.is_away = False
    source.publish(STATES[1])
    source.publish(STATES[0], anchor=True)
    source.publish(STATES[2])
    inner.arrive()
    assert not fsck(inner, RUN).damage


@pytest.mark.parametrize("is_held", [True, False])
def test_I34_a_reader_that_misread_a_record_goes_on(is_held):
    """The record that came back wrong parses; the one after it tells."""
    inner = MemoryStore()
    source = publisher(inner)
    source.publish(STATES[0])
    live = zeros_like(STATES[0])
    follower = reader(BadWay(inner, other_time), live)
    if is_held:
        follower.pull()
        assert follower.version == 0
    else:
        assert follower.poll() == 0
    source.publish(STATES[1])
    assert follower.pull().version == 1
    assert_same(live, STATES[1])


def test_I32_a_place_that_says_something_else_now_is_no_misread():
    """Another root, version or epoch where the held record was: the log was replaced."""
    stores = [MemoryStore(), MemoryStore()]
    for store, states in zip(stores, (STATES[:2], [STATES[0], *STATES[3:]]), strict=True):
        source = publisher(store)
        for weights in states:
            source.publish(weights)
    live = zeros_like(STATES[0])
    follower = reader(stores[0], live)
    follower.pull()
    for key in list(stores[1].list(KEYS.log_prefix)):
        stores[0].put(key, stores[1].get(key, max_bytes=1 << 20))
    with pytest.raises(ChainError, match="replaced or rolled back"):
        follower.pull()
    assert follower.version == 1
    assert_same(live, STATES[1])


def test_I32_a_claim_in_the_place_that_is_held_is_no_misread():
    """A store of before comes back; the claim that lies there then has the same epoch."""
    store = MemoryStore()
    first = publisher(store)
    first.publish(STATES[0])
    before = {key: store.get(key, max_bytes=1 << 20) for key in store.list("")}
    publisher(store).publish(STATES[1])
    live = zeros_like(STATES[0])
    follower = reader(store, live)
    follower.pull()
    for key in list(store.list("")):
        store.delete(key)
    for key, blob in before.items():
        store.put(key, blob)
    first.publish(STATES[3])
    publisher(store).publish(STATES[4])
    with pytest.raises(ChainError, match="replaced or rolled back"):
        follower.pull()
    assert follower.version == 1
    assert_same(live, STATES[1])


def test_I26_retention_waits_while_an_anchor_may_be_there_after_all():
    """The record of an anchor is committed, but nobody can know: its objects are not left over."""
    inner, clock = MemoryStore(), ManualClock()
    store = FaultyStore(inner)
    source = publisher(store, clock=clock, anchor_every=2, keep=1, timeout_s=5.0)
    for weights in STATES[:2]:
        source.publish(weights)
    place = KEYS.record(5)

    def fault(_: int, operation: str, key: str) -> str:
        if key != place:
            return ""
        return "after" if operation == "create" else "before"

    store.arm(fault)
    source.publish(STATES[2])
    store.arm(None)
    assert records_of(inner)[-1].seq == 5
    assert not fsck(inner, RUN).damage
    source.publish(STATES[3])
    assert not fsck(inner, RUN).damage


@pytest.mark.parametrize("hidden", [3, 4])
def test_I26_retention_takes_no_objects_while_a_record_is_not_visible(hidden):
    class Late(PassThroughStore):
        """One record of the log is visible to nobody yet."""

        def list(self, prefix):
            return (k for k in self.inner.list(prefix) if k != KEYS.record(hidden))

        def get(self, key, *, max_bytes):
            if key == KEYS.record(hidden):
                raise NotFoundError(f"get '{key}': not visible yet")
            return self.inner.get(key, max_bytes=max_bytes)

    inner = MemoryStore()
    source = publisher(inner)
    for weights in STATES[:4]:
        source.publish(weights)
    publisher(inner)
    collect(Late(inner), RUN, keep=50)
    assert not fsck(inner, RUN).damage


def test_a_compactor_that_retention_overtook_goes_on_when_it_starts_again(tmp_path):
    """It was killed before it folded to the version that it holds, and retention came by."""
    store = MemoryStore()
    source = publisher(store, keep=2, anchor_every=50)
    states = history(9, num_tensors=2, size=20_000)
    for weights in states[:3]:
        source.publish(weights)
    with Compactor(store, RUN, tmp_path, every=2, levels=1, threads=1) as compactor:
        compactor._advance(2, 2)
    for weights in states[3:]:
        source.publish(weights, anchor=True)
    assert KEYS.record(4) not in set(store.list(KEYS.log_prefix))
    with Compactor(store, RUN, tmp_path, every=2, levels=1, threads=1) as compactor:
        list(compactor.work())
        assert compactor.version == 8
