"""Readers whose way leads over folds where the log is damaged or its floor has moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sync.folding import KEYS, SIZE, compact, published, spans_of
from sync.harness import RUN, Weights, assert_same, history, publisher, reader
from sync.harness import zeros_like as zeros

from gymfast.stores import MemoryStore
from gymfast.stores.base import Store
from gymfast.sync import Subscriber, collect
from gymfast.sync.clock import SystemClock
from gymfast.sync.lease import Lease

pytestmark = pytest.mark.usefixtures("quick_disk")


def damage(store: Store, seq: int) -> None:
    key = KEYS.record(seq)
    blob = bytearray(store.get(key, max_bytes=1 << 20))
    blob[40] ^= 1
    store.put(key, bytes(blob))


def test_a_fold_with_its_base_below_the_floor_is_gone_around(tmp_path) -> None:
    """The lease of another reader keeps it there; the full state at the floor is as good."""
    store = MemoryStore()
    states = history(8, num_tensors=2, size=SIZE)
    source, live = publisher(store, keep=1000, anchor_every=5), zeros(states[0])
    source.publish(states[0])
    follower = reader(store, live)
    follower.pull()
    for state in states[1:]:
        source.publish(state)
    assert compact(store, tmp_path, every=8, levels=1) == [(0, 8)]
    slow = Lease(store, KEYS, "slow", SystemClock(), 600.0)
    slow.take(2, lambda: 0)
    assert collect(store, RUN, keep=3).num_folds == 0
    assert follower.pull().version == 8
    assert_same(live, states[8])
    slow.release()


@pytest.fixture
def past_damage(tmp_path) -> tuple[Subscriber, Weights, list[Weights]]:
    """A reader at version 0; the record of version 4 is damaged, a full fold leads past it."""
    store = MemoryStore()
    states = history(9, num_tensors=2, size=SIZE)
    source, live = publisher(store, keep=1000, anchor_every=256), zeros(states[0])
    source.publish(states[0])
    follower = reader(store, live)
    follower.pull()
    for state in states[1:]:
        source.publish(state)
    compact(store, tmp_path, every=4, levels=1, anchor_every=8)
    assert (-1, 8) in spans_of(store)
    damage(store, 6)
    return follower, live, states


@pytest.mark.parametrize(
    ("ask", "version"),
    [
        (lambda follower: follower.wait(8, 60.0), 9),
        (lambda follower: follower.pull(8), 8),
        (lambda follower: [follower.pull(follower.poll()) for _ in range(2)], 9),  # as `watch` does
    ],
    ids=["wait", "pull", "poll"],
)
def test_every_way_to_ask_leads_past_a_damaged_record_over_a_full_fold(
    past_damage, ask: Callable[[Subscriber], object], version: int
) -> None:
    follower, live, states = past_damage
    ask(follower)
    assert follower.version == version
    assert_same(live, states[version])


def test_a_look_at_folds_never_loses_a_version_that_can_be_reached(tmp_path) -> None:
    store = MemoryStore()
    states = history(10, num_tensors=2, size=SIZE)
    source, live = publisher(store, keep=1000, anchor_every=256), zeros(states[0])
    source.publish(states[0])
    follower = reader(store, live)
    follower.pull()
    for state in states[1:9]:
        source.publish(state)
    compact(store, tmp_path)
    source.publish(states[9], anchor=True)
    source.publish(states[10])
    damage(store, 10)
    assert follower.pull(5).version == 5
    assert_same(live, states[5])
    assert follower.pull().version == 10


def test_an_install_that_fails_of_something_else_leaves_folds_trusted(
    tmp_path, monkeypatch
) -> None:
    store = MemoryStore()
    states = published(store, 8)
    compact(store, tmp_path, every=4, levels=1)
    live = zeros(states[0])
    follower = reader(store, live)
    follower.pull(0)
    num_frames = len(follower.fetch().plan.steps)
    install = follower._installer.install

    def fail(staged: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follower._installer, "install", fail)
    with pytest.raises(KeyboardInterrupt):
        follower.apply()
    monkeypatch.setattr(follower._installer, "install", install)
    assert len(follower.fetch().plan.steps) == num_frames < 8
    follower.apply()
    assert_same(live, states[8])
