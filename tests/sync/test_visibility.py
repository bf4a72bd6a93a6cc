"""Stores that show writes late, out of order or never: I34, seeded, with a clock moved by hand."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    assert_same,
    copy_of,
    history,
    publisher,
    reader,
    zeros_like,
)

from gymfast.errors import ChainError, ConflictError, DeadlineError, NotFoundError, StoreError
from gymfast.stores import MemoryStore, Store
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.view import GAP_PATIENCE_S
from gymfast.testing.conformance import StoreContract
from gymfast.testing.visibility import BadVisibilityStore, Lags

KEYS = RunKeys(RUN)
LAG_S = 5.0


class TestWithoutLag(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return BadVisibilityStore(ManualClock(), Lags())


def unsteady(clock: ManualClock, seed: int = 0, **lags: float) -> BadVisibilityStore:
    return BadVisibilityStore(clock, Lags(**lags), seed=seed)


def test_each_look_sees_a_moment_of_its_own() -> None:
    clock = ManualClock()
    store = unsteady(clock, list_s=LAG_S, size_s=LAG_S, read_s=LAG_S)
    store.put("k", b"old")
    clock.now_s += LAG_S
    store.put("k", b"the new one")
    clock.now_s += LAG_S / 2
    read = [store.get("k", max_bytes=99) for _ in range(50)]
    assert set(read) == {b"old", b"the new one"}
    assert read.index(b"the new one") < len(read) - 1 - read[::-1].index(b"old")  # and back again
    assert {store.size("k") for _ in range(50)} == {3, 11}
    with pytest.raises(ConflictError):
        store.create("k", b"")
    clock.now_s += LAG_S / 2
    assert {store.get("k", max_bytes=99) for _ in range(50)} == {b"the new one"}


def test_writes_are_lost_and_late_as_asked() -> None:
    clock = ManualClock()
    store = unsteady(clock)
    store.lose("a/")
    store.lose("b/", after_s=3)
    store.delay("c/", 7)
    for key in ("a/1", "b/1", "c/1", "a/2"):
        store.put(key, b"1")
    assert list(store.list("")) == ["a/2", "b/1"]
    clock.now_s += 3
    assert list(store.list("")) == ["a/2"]
    clock.now_s += 4
    assert list(store.truth().list("")) == ["a/2", "c/1"]


class Follower:
    """A reader whose every version is compared."""

    def __init__(self, store: Store, clock: ManualClock, states: list) -> None:
        self.states, self.seen = states, -1
        self.live = zeros_like(states[0])
        self.reader = reader(store, self.live, clock=clock, timeout_s=30.0)

    def pull(self) -> None:
        """Pulls; what is not visible yet may only delay."""
        with suppress(NotFoundError, DeadlineError):
            self.reader.pull()
        version = self.reader.version
        if version is not None:
            assert version >= self.seen
            self.seen = version
            assert_same(self.live, self.states[version])


def run_seed(seed: int) -> None:
    """One publisher and three readers, one of them late, over 8 versions."""
    rng = np.random.default_rng(seed)
    clock = ManualClock()
    most = dict.fromkeys(("list_s", "size_s", "read_s"), LAG_S)
    lags = {name: float(rng.choice([0, 1, most[name]])) for name in most}
    store = unsteady(clock, seed, **lags)
    store.num_ahead = 4 * (seed % 2)  # a store that is far away
    states = history(7, seed=seed, num_tensors=2, size=40)
    for index in rng.choice(len(states), 2):  # back to an earlier state: the same objects again
        states.append(copy_of(states[index]))
    source = publisher(store, clock=clock, anchor_every=3, keep=4)
    followers = [Follower(store, clock, states), Follower(store, clock, states)]
    late_at = int(rng.integers(2, 7))
    for version, weights in enumerate(states):
        if rng.random() < 0.2:
            store.delay("/objects/", float(rng.uniform(0, 20)))
        if rng.random() < 0.1:
            source = publisher(store, clock=clock, anchor_every=3, keep=4)
        assert source.publish(weights).version == version
        if version == late_at:
            followers.append(Follower(store, clock, states))
        for follower in followers:
            clock.now_s += float(rng.uniform(0, 2 * LAG_S))
            if rng.random() < 0.7:
                follower.pull()
    for _ in range(2):  # a gap is taken for late visibility for a while
        clock.now_s += GAP_PATIENCE_S + LAG_S
        for follower in followers:
            follower.pull()
    assert [follower.seen for follower in followers] == [len(states) - 1] * len(followers)
    report = fsck(store.truth(), RUN)
    assert (report.damage, report.restorable) == ((), len(states) - 1)


@pytest.mark.parametrize("seed", range(8))
def test_I34_visibility_that_is_late_or_out_of_order_only_delays(seed: int) -> None:
    run_seed(seed)


@pytest.mark.ci
def test_I34_visibility_only_delays_in_30_histories() -> None:
    for seed in range(1000, 1030):
        run_seed(seed)


@pytest.mark.long
def test_I34_visibility_only_delays_in_2000_histories() -> None:
    for seed in range(10_000, 12_000):
        run_seed(seed)


@pytest.mark.parametrize("seed", range(3))
def test_I34_a_lost_object_is_noticed_before_its_record_is_made(seed: int) -> None:
    """The put was acknowledged; without the object there is no version."""
    clock = ManualClock()
    store = unsteady(clock, seed, list_s=LAG_S, size_s=LAG_S, read_s=LAG_S)
    states = history(2)
    source = publisher(store, clock=clock)
    follower = Follower(store, clock, states)
    source.publish(states[0])
    clock.now_s += LAG_S
    follower.pull()
    store.lose("/objects/")
    with pytest.raises(DeadlineError, match="did not show what was written"):
        source.publish(states[1])
    assert source.version == 0
    follower.pull()
    assert follower.seen == 0
    assert source.publish(states[1]).version == 1
    assert source.publish(states[2]).version == 2
    clock.now_s += LAG_S
    follower.pull()
    assert follower.seen == 2


@pytest.mark.parametrize("seed", range(3))
def test_I34_an_object_that_goes_after_the_commit_is_named_and_passed_by(seed: int) -> None:
    clock = ManualClock()
    store = unsteady(clock, seed, list_s=LAG_S, size_s=LAG_S, read_s=LAG_S)
    states = history(3)
    source = publisher(store, clock=clock)
    follower = Follower(store, clock, states)
    source.publish(states[0])
    clock.now_s += LAG_S
    follower.pull()
    store.lose("/objects/", after_s=2 * LAG_S)
    source.publish(states[1])
    clock.now_s += 4 * LAG_S
    (finding,) = fsck(store.truth(), RUN).damage
    with pytest.raises(ChainError, match=r"version 1 .* is lost: .*run-a/objects/") as caught:
        follower.reader.pull()
    assert finding.key in str(caught.value)
    assert (follower.reader.version, follower.reader.state.name) == (0, "CLEAN")
    assert_same(follower.live, states[0])
    source.publish(states[2], anchor=True)
    clock.now_s += LAG_S
    follower.pull()
    source.publish(states[3])
    clock.now_s += LAG_S
    follower.pull()
    assert follower.seen == 3


def test_I34_a_lost_record_is_passed_by_with_the_next_full_state() -> None:
    """A create that was acknowledged and is gone: more than a store may do."""
    clock = ManualClock()
    store = unsteady(clock)
    states = history(4)
    source = publisher(store, clock=clock)
    follower = Follower(store, clock, states)
    source.publish(states[0])
    follower.pull()
    store.lose("/log/")
    source.publish(states[1])
    source.publish(states[2])
    follower.pull()
    assert follower.seen == 0
    source.publish(states[3], anchor=True)
    follower.pull()
    clock.now_s += GAP_PATIENCE_S + 1
    follower.pull()
    assert follower.seen == 3
    assert any("missing" in finding.problem for finding in fsck(store.truth(), RUN).damage)


def test_I34_a_publisher_starts_where_its_own_writes_are_seen_late() -> None:
    clock = ManualClock()
    store = unsteady(clock, 3, list_s=LAG_S, size_s=LAG_S, read_s=LAG_S)
    publisher(store, clock=clock)
    clock.now_s += LAG_S
    assert [key for key in store.list("") if "probe" in key] == []


@pytest.mark.parametrize("answer", ["failed", "absent"])
def test_I34_a_claim_survives_a_place_that_it_cannot_read_twice(answer: str) -> None:
    """Another publisher was faster; its record is seen, and a moment later it is not."""
    inner, states = MemoryStore(), history(2)
    publisher(inner).publish(states[0])
    store = FaultyStore(inner)
    place, looks = KEYS.record(3), []

    def fault(number: int, operation: str, key: str) -> str:
        if key == place and operation == "create" and not looks:
            publisher(inner).publish(states[1])
            looks.append("create")
        elif key == place and operation == "get" and looks:
            looks.append("get")
            if len(looks) == 3 and answer == "absent":
                raise NotFoundError(f"get '{key}': not seen")
            return "before" if len(looks) == 3 else ""
        return ""

    store.arm(fault)
    source = publisher(store, clock=ManualClock())
    assert len(looks) > 3
    assert (source.epoch, source.version) == (3, 1)
    assert source.publish(states[2]).version == 2


class _Outage(BadVisibilityStore):
    """Lengths cannot be asked for while `is_out`."""

    is_out = False

    def size(self, key: str) -> int:
        if self.is_out and "/objects/" in key and key in self.put_now:
            raise StoreError(f"size '{key}': out")
        return super().size(key)

    put_now: frozenset[str] = frozenset()

    def put(self, key: str, data: object) -> None:
        self.put_now |= {key}
        super().put(key, data)


def test_I34_what_looks_new_and_is_not_stays_when_a_publish_fails() -> None:
    """A stale length makes an object of a committed version look like one of this attempt."""
    clock = ManualClock()
    states = history(1)
    store = _Outage(clock, Lags(size_s=LAG_S), seed=1)
    source = publisher(store, clock=clock)
    for weights in (states[0], states[1], states[0]):
        source.publish(weights)
    named = set(store.truth().list(KEYS.objects_prefix))
    store.lags = Lags(size_s=10_000.0)  # all lengths are those of long ago
    store.put_now, store.is_out = frozenset(), True
    with pytest.raises(StoreError, match="out"):
        source.publish(states[1])  # the delta of version 1 once more
    assert named <= set(store.truth().list(KEYS.objects_prefix))
    assert fsck(store.truth(), RUN).damage == ()
