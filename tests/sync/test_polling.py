"""A look that finds nothing new costs the same however long the log is."""

from __future__ import annotations

import pytest
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    Weights,
    assert_same,
    history,
    publisher,
    reader,
    zeros_like,
)

from gymfast.stores import MemoryStore
from gymfast.sync import Publisher, Subscriber
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import FORMAT, HintRecord, encode
from gymfast.sync.view import GAP_PATIENCE_S

KEYS = RunKeys(RUN)
FAR_HINT = encode(HintRecord(FORMAT, RUN, 10**9, 10**9, "0" * 64, 1))


def following(
    num_versions: int, hint: bytes | None
) -> tuple[FaultyStore, ManualClock, Publisher, Subscriber, Weights]:
    """A reader that holds the newest version, and has looked once since then."""
    store, clock, states = FaultyStore(MemoryStore()), ManualClock(), history(num_versions)
    source = publisher(store, clock=clock)
    for weights in states:
        source.publish(weights)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock)
    follower.pull()
    if hint is not None:
        store.put(KEYS.hint, hint)
    else:
        store.delete(KEYS.hint)
    follower.poll()
    return store, clock, source, follower, live


@pytest.mark.parametrize("hint", [None, b"junk", FAR_HINT])
@pytest.mark.parametrize("rubbish", [None, 1, 2])
@pytest.mark.parametrize("num_versions", [1, 40])
def test_a_look_that_finds_nothing_costs_three_calls(num_versions, rubbish, hint):
    store, clock, _, follower, _ = following(num_versions, hint)
    end = max(int(key[-20:]) for key in store.list(KEYS.log_prefix))
    if rubbish is not None:
        store.put(KEYS.record(end + rubbish), b"junk")
        follower.poll()
    for _ in range(50):
        store.arm(None)
        assert follower.poll() == num_versions
        assert sorted(store.calls) == [
            ("get", KEYS.hint),
            ("get", KEYS.record(end + 1)),
            ("list", KEYS.floors_prefix),
        ]
    num_lists = 0
    for _ in range(10):
        clock.now_s += GAP_PATIENCE_S / 5
        store.arm(None)
        follower.poll()
        num_lists += store.calls.count(("list", KEYS.log_prefix))
    assert num_lists <= 4, "two per GAP_PATIENCE_S"


def test_a_mark_far_beyond_the_end_costs_a_look_one_call_more():
    store, _, _, follower, _ = following(3, None)
    store.put(KEYS.floor(2**53 - 1), b"")
    store.arm(None)
    assert follower.poll() == 3
    assert [call for call, _ in store.calls] == ["get", "list", "size", "get"]


@pytest.mark.parametrize("blob", [b"junk", None])
def test_the_hint_brings_a_reader_past_a_lost_record_at_once_and_time_does_without(blob):
    for has_hint in (True, False):
        store, clock, source, follower, live = following(3, None)
        states = history(6)
        source.publish(states[4])
        place = KEYS.record(6)
        store.delete(place)
        if blob is not None:
            store.put(place, blob)
        follower.poll()
        source.publish(states[5], anchor=True)
        if not has_hint:
            store.delete(KEYS.hint)
        assert (follower.poll() == 5) is (has_hint and blob is not None)
        for _ in range(2):
            clock.now_s += GAP_PATIENCE_S
            newest = follower.poll()
        assert newest == 5
        follower.pull()
        assert_same(live, states[5])
