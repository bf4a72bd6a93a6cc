"""A damaged or incomplete log: readers go around it, a new publisher goes on after it."""

from __future__ import annotations

import hashlib

import pytest
from sync.harness import (
    RUN,
    ManualClock,
    assert_same,
    copy_of,
    history,
    publisher,
    reader,
    records_of,
    zeros_like,
)

from gymfast.errors import ChainError, NotFoundError
from gymfast.stores import MemoryStore
from gymfast.sync import collect
from gymfast.sync.chain import is_full
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.view import GAP_PATIENCE_S

KEYS = RunKeys(RUN)
GARBAGE = [b"", b"garbage", b"{}\n", b"\0" * 1000]


def damaged(num_versions: int, seq: int, blob: bytes | None, **options):
    """A run whose record `seq` was replaced or (None) lost, and its states."""
    store, states = MemoryStore(), history(num_versions + 3)
    source = publisher(store, **options)
    for weights in states[: num_versions + 1]:
        source.publish(weights)
    if blob is None:
        store.delete(KEYS.record(seq))
    else:
        store.put(KEYS.record(seq), blob)
    return store, states, source


@pytest.mark.parametrize("blob", [*GARBAGE, None])
@pytest.mark.parametrize("seq", [1, 2, 4, 6])
def test_a_new_publisher_goes_on_after_a_damaged_record(seq, blob):
    """Versions 0..4 are records 2..6; readers of what is whole are not disturbed."""
    store, states, _ = damaged(4, seq, blob)
    source = publisher(store)
    report = source.publish(states[5])
    assert report.kind == "anchor"
    assert report.version >= 4
    assert source.publish(states[6]).kind == "delta"
    live = zeros_like(states[0])
    follower = reader(store, live)
    follower.pull()
    assert_same(live, states[6])
    assert fsck(store, RUN).restorable == source.version


@pytest.mark.parametrize("blob", GARBAGE)
def test_a_reader_before_a_damaged_record_waits_for_a_full_state_after_it(blob):
    store, states, source = damaged(4, 5, blob)
    live = copy_of(states[1])
    follower = reader(store, live)
    assert follower.pull().version == 2
    assert_same(live, states[2])
    assert follower.pull().kind == "nothing"
    source.publish(states[5], anchor=True)
    report = follower.pull()
    assert (report.kind, report.version) == ("anchor", 5)
    assert_same(live, states[5])
    source.publish(states[6])
    assert follower.pull().kind == "deltas"
    assert_same(live, states[6])


def test_a_lost_record_counts_as_late_for_a_while():
    clock = ManualClock()
    store, states, source = damaged(4, 5, None, clock=clock)
    live = copy_of(states[1])
    follower = reader(store, live, clock=clock)
    assert follower.pull().version == 2
    source.publish(states[5], anchor=True)
    assert follower.pull().kind == "nothing"
    clock.now_s += GAP_PATIENCE_S + 1
    assert follower.pull().version == 5
    assert_same(live, states[5])


@pytest.mark.parametrize("blob", [*GARBAGE, None])
def test_a_fresh_reader_takes_what_is_whole(blob):
    store, states, _ = damaged(4, 5, blob)
    live = zeros_like(states[0])
    follower = reader(store, live)
    assert follower.pull().version == 2
    assert_same(live, states[2])


def test_a_run_without_any_whole_state_is_refused():
    store, states, _ = damaged(3, 2, b"garbage")
    with pytest.raises((ChainError, NotFoundError)):
        reader(store, zeros_like(states[0])).pull()


def test_keys_that_are_no_records_are_ignored():
    store, states = MemoryStore(), history(2)
    source = publisher(store)
    for key in ("log/readme", "log/7", "floors/x", "readers/x", "objects/x/y", "hint.old"):
        store.put(f"{RUN}/{key}", b"junk")
    for weights in states:
        source.publish(weights)
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[2])
    collect(store, RUN, keep=1)
    assert store.get(f"{RUN}/log/readme", max_bytes=10) == b"junk"


def test_a_lost_object_is_passed_by_with_the_next_anchor():
    store, states = MemoryStore(), history(5)
    clock = ManualClock()
    source = publisher(store, clock=clock)
    for weights in states[:4]:
        source.publish(weights)
    keys = sorted(store.list(KEYS.objects_prefix))
    live = copy_of(states[1])
    for key in keys:
        blob = store.get(key, max_bytes=1 << 20)
        store.delete(key)
        follower = reader(store, zeros_like(live), clock=clock, timeout_s=1.0)
        try:
            version = follower.pull().version
        except ChainError:
            version = None
        assert version in (None, 0, 1, 2)
        store.put(key, blob)
    store.delete(keys[0])
    source.publish(states[4], anchor=True)
    follower = reader(store, live, clock=clock, timeout_s=1.0)
    follower.pull()
    assert_same(live, states[4])


@pytest.mark.parametrize("version", [None, 0])
@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
def test_the_error_of_a_damaged_object_names_it_what_was_found_and_what_to_do(harm, version):
    store, states, clock = MemoryStore(), history(1), ManualClock()
    publisher(store).publish(states[0])
    (key,) = store.list(KEYS.objects_prefix)
    blob = store.get(key, max_bytes=1 << 20)
    digest = hashlib.sha256(blob).hexdigest()
    if harm == "flip":
        bad = bytes([blob[0] ^ 1]) + blob[1:]
        store.put(key, bad)
        words = [f"SHA-256 {hashlib.sha256(bad).hexdigest()}", f"says {digest}"]
    elif harm == "cut":
        store.put(key, blob[:-1])
        words = [f"has {len(blob) - 1} bytes", f"says {len(blob)}"]
    else:
        store.delete(key)
        words = ["no such object"]
    follower = reader(store, zeros_like(states[0]), clock=clock, timeout_s=1.0)
    with pytest.raises(ChainError, match="version 0 cannot be reached") as error:
        follower.pull(version)
    for word in (key, *words, "version 0 (record 2)", "gymfast sync fsck", "anchor"):
        assert word in str(error.value)
    assert follower.status.last_error == str(error.value)


def test_gc_of_an_unknown_run_is_not_found():
    with pytest.raises(NotFoundError, match="no run 'nobody'"):
        collect(MemoryStore(), "nobody", keep=1)
    store = MemoryStore()
    publisher(store)
    with pytest.raises(ValueError, match="at least 1"):
        collect(store, RUN, keep=0)


def test_gc_says_what_it_would_do_and_who_holds_it_up():
    store, states = MemoryStore(), history(6)
    source = publisher(store, anchor_every=2, keep=50)
    for weights in states:
        source.publish(weights)
    publisher(store)  # the objects of the first one may go now
    before = list(store.list(""))
    told = collect(store, RUN, keep=1, dry_run=True)
    assert told.records
    assert told.num_objects
    assert told.num_bytes
    assert list(store.list("")) == before
    follower = reader(store, copy_of(states[1]))
    follower.fetch(2)
    held = collect(store, RUN, keep=1)
    assert held.held_by == 4
    assert held.num_leases == 1
    follower.apply()
    done = collect(store, RUN, keep=1)
    assert done.held_by is None
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[6])


def test_a_copy_of_an_older_anchor_in_a_later_place_is_no_way_in():
    """C2 holds where a reader enters, too: else a fresh reader would be rolled back."""
    store, states = MemoryStore(), history(5)
    source = publisher(store, anchor_every=2, keep=50)
    for weights in states:
        source.publish(weights)
    records = records_of(store)
    old = next(r.seq for r in records if r.seq > 2 and is_full(r))
    blob = store.get(KEYS.record(old), max_bytes=1 << 20)
    store.put(KEYS.record(records[-1].seq + 1), blob)
    live = zeros_like(states[0])
    follower = reader(store, live, timeout_s=1.0)
    assert follower.pull().version == 5
    assert_same(live, states[5])
    (finding,) = fsck(store, RUN).damage
    assert f"record {old} lies where record {records[-1].seq + 1} belongs" in finding.problem
    again = publisher(store)
    assert again.publish(states[4]).version > 5
    follower.pull()
    assert_same(live, states[4])
