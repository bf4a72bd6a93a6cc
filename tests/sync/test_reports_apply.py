"""Rows of group E, applying inside the engine: one test per public report that applies here.

R58, R67: also I40 in test_invariants and test_crash_points. R61: also I42 in test_invariants.
R62 to R65 need an engine that sleeps, pauses and flushes; R62 stands here for memory that moved.
"""

from __future__ import annotations

import numpy as np
import pytest
from sync.harness import (
    RUN,
    FaultyStore,
    addresses,
    assert_same,
    copy_of,
    history,
    publisher,
    reader,
    zeros_like,
)

from gymfast.delta import State as WeightState
from gymfast.delta.backends import Backend
from gymfast.errors import ChecksumError
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

    apply_sections = Backend.apply_sections  # in terms of the one that follows

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


def test_r56_a_live_layout_that_was_permuted_never_gets_rows_of_the_wire_layout():
    """The engine permutes rows after the first load, as for a kernel; the second is refused."""
    store, states = MemoryStore(), history(2)
    source = publisher(store)
    live = zeros_like(states[0])
    follower = reader(store, live)
    source.publish(states[0])
    follower.pull()
    kernel = live["layers.1.weight"]
    kernel[:] = kernel[::-1].copy()
    permuted = copy_of(live)
    source.publish(states[1])
    with pytest.raises(ChecksumError, match=r"layers\.1\.weight"):
        follower.pull()
    assert (follower.state, follower.version) == (State.INCONSISTENT, None)
    assert kernel.tobytes() == permuted["layers.1.weight"].tobytes(), "no row was written to it"


def test_r56_a_live_layout_of_strides_is_refused_and_one_of_another_shape_is_named():
    store, states = MemoryStore(), history(1)
    publisher(store).publish(states[0])
    strided = {
        name: np.zeros(value.shape[::-1], value.dtype).T for name, value in states[0].items()
    }
    with pytest.raises(ValueError, match="not contiguous"):
        LiveTarget(strided)
    live = {name: np.zeros(value.shape[::-1], value.dtype) for name, value in states[0].items()}
    wide = dict(live)
    report = reader(store, live).pull()
    assert sorted(report.replaced) == sorted(live)
    assert_same(live, states[0])
    assert all(not value.any() for value in wide.values()), "nothing was written to the old memory"


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


@pytest.mark.parametrize("how", ["replaced", "removed", "before the first version"])
def test_r61_r62_memory_that_moved_is_never_served_and_the_next_anchor_takes_it_over(how):
    """The engine puts other memory in the place of a tensor, as one that slept or offloaded."""
    store, states = MemoryStore(), history(3)
    source = publisher(store)
    live = zeros_like(states[0])
    target = LiveTarget(live, threads=1)
    name = "layers.1.weight"
    source.publish(states[0])
    old, before = live[name], None
    if how == "before the first version":
        live[name] = np.ones_like(old)
        follower = Subscriber(store, RUN, target)
    else:
        follower = Subscriber(store, RUN, target)
        follower.pull()
        if how == "replaced":
            live[name] = old.copy()
        else:
            del live[name]
        source.publish(states[1])
        before = old.tobytes()
        with pytest.raises(ChecksumError, match=r"layers\.1\.weight.*no longer in the memory"):
            follower.pull()
    assert (follower.state, follower.version) == (State.INCONSISTENT, None)
    assert before is None or old.tobytes() == before, "nothing was written to memory given back"
    source.publish(states[2])
    assert follower.pull().kind == "anchor"
    assert_same(live, states[2])
    pointers = addresses(live)
    source.publish(states[3])
    assert follower.pull().kind == "deltas"
    assert_same(live, states[3])
    assert addresses(live) == pointers


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


@pytest.mark.parametrize("at", range(1, 30, 2))
def test_r69_a_child_that_reads_while_its_relay_goes_on_gets_one_whole_version(at):
    """The relay pulls, applies and publishes v1 and v2 before call `at` of the child."""
    above, below = MemoryStore(), FaultyStore(MemoryStore())
    states = history(2)
    origin = publisher(above)
    origin.publish(states[0])
    held = zeros_like(states[0])
    upper = reader(above, held)
    relay = publisher(below, object_bytes=500, anchor_every=1, keep=1)
    upper.pull()
    relay.publish(held)
    overtakes: list[int] = []

    def overtake(n, operation, key):
        if n == at and not overtakes:
            for weights in states[1:]:
                origin.publish(weights)
                upper.pull()
                overtakes.append(relay.publish(held).version)
        return ""

    child = zeros_like(states[0])
    follower = reader(below, child, reader_id="child")
    below.arm(overtake)
    report = follower.pull()
    assert overtakes == [1, 2], f"the child makes only {len(below.calls)} calls"
    below.arm(None)
    assert_same(child, states[report.version])
    follower.pull()
    assert_same(child, states[-1])


@pytest.mark.parametrize("at", range(1, 18))
def test_r69_what_is_committed_is_true_even_if_the_weights_changed_meanwhile(at):
    """Weights must not change during publish; where they do, the record still names its bytes."""
    store, states = FaultyStore(MemoryStore()), history(2)
    source = publisher(store, object_bytes=300)
    source.publish(states[0])
    moving = copy_of(states[1])

    def overwrite(n, operation, key):
        if n == at:
            for value in moving.values():
                value.view(np.uint8).reshape(-1)[::3] ^= 0x55
        return ""

    store.arm(overwrite)
    source.publish(moving)
    assert len(store.calls) >= at
    store.arm(None)
    live = zeros_like(states[0])
    follower = reader(store, live)
    assert follower.pull().version == 1, "delta, root and bytes agree"
    source.publish(states[2])
    assert follower.pull().kind == "deltas"
    assert_same(live, states[2])
