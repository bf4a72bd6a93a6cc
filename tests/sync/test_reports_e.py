"""Rows of group E, applying inside the engine: one test per public report that applies here."""

from __future__ import annotations

import numpy as np
import pytest
from sync.harness import (
    RUN,
    addresses,
    assert_same,
    copy_of,
    history,
    publisher,
    reader,
    zeros_like,
)

from gymfast.delta import State as WeightState
from gymfast.stores import MemoryStore
from gymfast.sync import GroupTarget, LiveTarget, State, Subscriber
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log


class FailingBackend:
    """Passes on to a back end; fails at the `fail_at`-th block write, before or after it."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.fail_at = 0
        self.after = False
        self.num_calls = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def arm(self, fail_at: int, *, after: bool = False) -> None:
        self.fail_at, self.after, self.num_calls = fail_at, after, 0

    def apply_blocks(self, *args, **kwargs):
        self.num_calls += 1
        if self.num_calls != self.fail_at:
            return self.inner.apply_blocks(*args, **kwargs)
        if self.after:
            self.inner.apply_blocks(*args, **kwargs)
        raise OSError("device lost")


def live_target(live) -> tuple[LiveTarget, FailingBackend]:
    target = LiveTarget(live, threads=1)
    backend = FailingBackend(target.state.backend)
    target.state.backend = backend
    return target, backend


@pytest.mark.parametrize("spans", [2, 3])
def test_r54_layers_that_span_several_objects_arrive_as_one_version(spans):
    store = MemoryStore()
    states = history(3, num_tensors=6, size=400)
    layer_bytes = min(value.nbytes for value in states[0].values())
    source = publisher(store, object_bytes=layer_bytes // spans)
    live = zeros_like(states[0])
    follower = reader(store, live)
    for weights in states:
        source.publish(weights)
        report = follower.pull()
        assert report.num_deltas + (report.kind == "anchor") == 1
        assert_same(live, weights)
    full = Log(store, RunKeys(RUN)).load()[0].record
    assert len(full.frame.objects) >= spans * 6


def test_i05_roots_do_not_depend_on_object_size_threads_order_or_profile():
    """Metamorphic: 12 object sizes, 3 orders, 2 thread counts, all profiles."""
    states = history(2)
    expected = [WeightState.reading(weights).root.hex() for weights in states]
    orders = [list, sorted, lambda names: sorted(names, reverse=True)]
    for number, size in enumerate(
        (7, 50, 100, 333, 500, 1000, 1001, 4096, 9999, 10**5, 10**6, 10**7)
    ):
        store = MemoryStore()
        profile = ("auto", "fast", "small")[number % 3]
        source = publisher(store, object_bytes=size, threads=1 + number % 2, profile=profile)
        order = orders[number % 3]
        for weights, root in zip(states, expected, strict=True):
            report = source.publish({name: weights[name] for name in order(list(weights))})
            assert report.root == root
        live = zeros_like(states[0])
        follower = reader(store, live)
        follower.pull()
        assert follower.root == expected[-1]
        assert_same(live, states[-1])


def test_r57_what_a_delta_does_not_mention_keeps_its_bytes():
    """The fp8 weight changes, its scale does not."""
    store = MemoryStore()
    scale = np.array([0.5, 0.25], np.float32)
    first = {"w": np.arange(200, dtype=np.uint8), "w_scale": scale}
    second = {"w": first["w"] ^ 3, "w_scale": scale}
    source = publisher(store)
    live = {name: np.full_like(value, 1) for name, value in first.items()}
    follower = reader(store, live)
    source.publish(first)
    follower.pull()
    before = live["w_scale"].tobytes()
    source.publish(second)
    follower.pull()
    assert live["w_scale"].tobytes() == before == scale.tobytes()
    assert_same(live, second)


@pytest.mark.parametrize("after", [False, True])
def test_r58_a_failed_apply_leaves_the_old_version_or_is_flagged(after):
    """It fails at tensor k, for every k; then an anchor heals it, addresses and all."""
    states = history(2, num_tensors=5)
    for fail_at in range(1, 7):
        store = MemoryStore()
        source = publisher(store)
        source.publish(states[0])
        live = zeros_like(states[0])
        target, backend = live_target(live)
        before = addresses(live)
        follower = Subscriber(store, RUN, target)
        follower.pull()
        source.publish(states[1])
        backend.arm(fail_at, after=after)
        if fail_at > 5:
            follower.pull()
            assert_same(live, states[1])
            continue
        with pytest.raises(OSError, match="device lost"):
            follower.pull()
        if follower.version is not None:
            assert follower.version == 0
            assert_same(live, states[0])
        else:
            assert follower.state is State.INCONSISTENT
            assert "inconsistent" in follower.status.text
        backend.arm(0)
        source.publish(states[2], anchor=True)
        assert follower.pull().version == 2
        assert_same(live, states[2])
        assert addresses(live) == before


def test_r61_addresses_survive_five_syncs():
    store, states = MemoryStore(), history(5)
    source = publisher(store)
    live = zeros_like(states[0])
    pointers = addresses(live)
    follower = reader(store, live)
    for weights in states:
        source.publish(weights)
        follower.pull()
        assert addresses(live) == pointers
    assert_same(live, states[-1])


def test_r67_a_group_whose_ranks_fail_is_inconsistent_until_an_anchor_heals_it():
    """Ranks 2 and 3 of 4 fail in the middle: the whole engine stops serving."""
    store, states = MemoryStore(), history(2)
    source = publisher(store)
    lives = [zeros_like(states[0]) for _ in range(4)]
    pairs = [live_target(live) for live in lives]
    follower = Subscriber(store, RUN, GroupTarget([target for target, _ in pairs]))
    source.publish(states[0])
    follower.pull()
    source.publish(states[1])
    for _, backend in pairs[2:]:
        backend.arm(2)
    with pytest.raises(OSError, match="device lost"):
        follower.pull()
    assert follower.state is State.INCONSISTENT
    assert not follower.serves()
    for _, backend in pairs:
        backend.arm(0)
    source.publish(states[2])
    assert follower.pull().kind == "anchor"
    for live in lives:
        assert_same(live, states[2])
    assert follower.serves(2)


def test_r71_strided_and_expanded_views_arrive_as_their_values():
    store = MemoryStore()
    base = np.arange(60, dtype=np.float32).reshape(6, 10)
    weights = {
        "transposed": base.T,
        "every_second": base[::2],
        "expanded": np.broadcast_to(np.float32(3), (4, 5)),
    }
    publisher(store).publish(weights)
    live = {name: np.zeros(value.shape, value.dtype) for name, value in weights.items()}
    reader(store, live).pull()
    assert_same(live, {name: np.ascontiguousarray(value) for name, value in weights.items()})
    assert_same(copy_of(live), live)
