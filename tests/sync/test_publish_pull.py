"""Publish and pull through memory and file stores: exact, resumed, refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sync.harness import (
    RUN,
    PassThroughStore,
    assert_same,
    copy_of,
    history,
    make_weights,
    publisher,
    reader,
    records_of,
    step,
    zeros_like,
)

from gymfast.delta import State
from gymfast.errors import (
    ConflictError,
    StoreError,
)
from gymfast.stores import MemoryStore
from gymfast.sync.keys import RunKeys

KEYS = RunKeys(RUN)


def test_every_version_arrives_bit_exact(store):
    source, states = publisher(store), history(6)
    live = zeros_like(states[0])
    follower = reader(store, live)
    for version, weights in enumerate(states):
        report = source.publish(weights)
        assert (report.version, report.kind) == (version, "delta" if version else "anchor")
        assert follower.pull().version == version == follower.version
        assert follower.root == report.root == State.reading(weights).root.hex()
        assert_same(live, weights)


def test_the_weights_of_the_caller_are_never_changed(store):
    source, states = publisher(store), history(3)
    for weights in states:
        before = copy_of(weights)
        source.publish(weights)
        assert_same(weights, before)


def test_the_report_tells_sizes_and_phases(store):
    source, (first, second) = publisher(store), history(1)
    reports = [source.publish(first), source.publish(second)]
    sizes = sum(value.nbytes for value in first.values())
    assert [r.raw_bytes for r in reports] == [sizes, sizes]
    assert reports[1].frame_bytes < reports[0].frame_bytes
    assert 0 < reports[1].num_changed < reports[1].num_units
    for report in reports:
        seconds = dataclasses.asdict(report.seconds)
        assert list(seconds) == ["diff", "encode", "put", "commit", "anchor", "clean"]
        assert all(value >= 0 for value in seconds.values())
        assert seconds["encode"] > 0
        assert seconds["commit"] > 0


def test_special_bits_and_shapes_arrive():
    nan = np.array([0x7FC0_0001, 0xFFC0_0000, 0x8000_0000, 0], np.uint32).view(np.float32)
    first = {
        "nan": nan,
        "scalar": np.array(3.0),
        "empty": np.zeros((0, 7), np.int16),
        "bool": np.array([True, False]),
        "strided": np.arange(100, dtype=np.int32).reshape(10, 10).T,
        "odd": np.arange(7, dtype=np.uint8),
    }
    second = {**first, "nan": -nan, "scalar": np.array(np.nan), "odd": first["odd"][::-1]}
    store = MemoryStore()
    source = publisher(store)
    source.publish(first)
    live: dict[str, np.ndarray] = {}
    follower = reader(store, live)
    follower.pull()
    assert_same(live, first)
    source.publish(second)
    follower.pull()
    assert_same(live, second)


def test_i33_an_empty_delta_advances_the_version(store):
    source, weights = publisher(store), make_weights()
    live = zeros_like(weights)
    follower = reader(store, live)
    roots = set()
    for version in range(3):
        report = source.publish(weights)
        roots.add(report.root)
        assert report.version == version
        follower.pull()
        assert follower.version == version
    assert len(roots) == 1
    assert [r.num_changed for r in records_of(store) if r.seq > 2] == [0, 0]
    changed = step(weights, 5)
    report = source.publish(changed)
    assert report.num_changed > 0
    assert report.root not in roots
    follower.pull()
    assert_same(live, changed)


def test_tensors_added_removed_replaced_and_tied_arrive(store):
    shared = np.arange(40, dtype=np.float32)
    states = [
        {"a": np.arange(9, dtype=np.int16), "tied.1": shared, "tied.2": shared},
        {"a": np.arange(9, dtype=np.int16), "tied.1": shared + 1, "b": np.ones((3, 3))},
        {"a": np.arange(9, dtype=np.int64), "b": np.ones((2, 5)), "tied.2": shared},
    ]
    states[0]["tied.1"] = states[0]["tied.2"]
    source = publisher(store)
    for weights in states:
        source.publish(weights)
    live: dict[str, np.ndarray] = {}
    follower = reader(store, live, request_bytes=10**6)
    for version, weights in enumerate(states):
        report = follower.pull(version)
        assert_same(live, weights)
    assert set(report.added) == {"tied.2"}
    assert set(report.removed) == {"tied.1"}
    assert set(report.replaced) == {"a", "b"}


def test_frames_are_cut_into_objects_and_put_together_again(store):
    source, states = publisher(store, object_bytes=100), history(3)
    for weights in states:
        source.publish(weights)
    for record in records_of(store)[1:]:
        assert len(record.frame.objects) > 1
        assert all(ref.num_bytes <= 100 for ref in record.frame.objects)
        for ref in record.frame.objects:
            assert store.size(KEYS.object(record.epoch, ref.digest)) == ref.num_bytes
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[-1])


@pytest.mark.parametrize("object_bytes", [0, -1, (512 << 20) + 1])
def test_an_object_size_out_of_range_is_refused(object_bytes):
    with pytest.raises(ValueError, match="object_bytes"):
        publisher(object_bytes=object_bytes)


@pytest.mark.parametrize("options", [{"anchor_every": 0}, {"anchor_every": 257}, {"keep": 0}])
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        publisher(**options)
    with pytest.raises(ValueError, match="profile"):
        publisher(profile="best")
    with pytest.raises(ValueError, match="run"):
        publisher(run="../escape")


def test_an_anchor_follows_every_n_deltas(store):
    source, states = publisher(store, anchor_every=2, keep=100), history(5)
    reports = [source.publish(weights) for weights in states]
    assert [r.version for r in reports if r.anchor_bytes] == [2, 4]
    kinds = [type(r).__name__ + str(getattr(r, "version", "")) for r in records_of(store)]
    assert kinds == [
        *("EpochRecord", "VersionRecord0", "VersionRecord1", "VersionRecord2", "AnchorRecord2"),
        *("VersionRecord3", "VersionRecord4", "AnchorRecord4", "VersionRecord5"),
    ]


def test_a_delta_that_would_be_large_is_published_as_an_anchor(store):
    source = publisher(store, anchor_ratio=0.5)
    weights = make_weights(size=4000)
    source.publish(weights)
    small = source.publish(step(weights, 1, density=0.001))
    dense = source.publish(make_weights(7, size=4000))
    assert (small.kind, dense.kind) == ("delta", "anchor")
    live = zeros_like(weights)
    follower = reader(store, live)
    follower.pull()
    assert_same(live, make_weights(7, size=4000))
    after = source.publish(step(make_weights(7, size=4000), 2, density=0.001))
    assert after.kind == "delta"
    follower.pull()
    objects = {key.rpartition("/")[2] for key in store.list(KEYS.objects_prefix)}
    named = {ref.digest for record in records_of(store)[1:] for ref in record.frame.objects}
    assert objects == named, "the delta that was given up left nothing behind"


def test_an_anchor_can_be_asked_for(store):
    source, states = publisher(store), history(2)
    kinds = [source.publish(w, anchor=i == 1).kind for i, w in enumerate(states)]
    assert kinds == ["anchor", "anchor", "delta"]
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[-1])


def test_a_run_may_begin_at_any_version_and_goes_on_by_one():
    source, states = publisher(), history(2)
    assert source.publish(states[0], version=120).version == 120
    with pytest.raises(ValueError, match="goes on with 121"):
        source.publish(states[1], version=120)
    with pytest.raises(ValueError, match="goes on with 121"):
        source.publish(states[1], version=122)
    assert source.publish(states[1], version=121).version == 121
    with pytest.raises(ValueError, match="not negative"):
        publisher().publish(states[0], version=-1)


def test_a_new_publisher_goes_on_with_the_numbers_of_the_store(store):
    states = history(5)
    first = publisher(store)
    for weights in states[:3]:
        first.publish(weights)
    second = publisher(store)
    assert (second.version, second.epoch, second.root) == (2, 2, first.root)
    report = second.publish(states[3])
    assert (report.version, report.kind) == (3, "anchor")
    assert second.publish(states[4]).kind == "delta"


def test_a_publisher_that_adopts_the_committed_state_goes_on_with_deltas(store):
    states = history(3)
    publisher(store).publish(states[0])
    second = publisher(store)
    assert not second.adopt(states[1])
    assert second.adopt(states[0])
    assert second.adopt(states[0])
    assert second.publish(states[1]).kind == "delta"
    third = publisher(store)
    assert third.publish(states[1]).kind == "delta", "the same weights again are an empty delta"
    live = zeros_like(states[0])
    follower = reader(store, live)
    assert follower.pull().version == 2
    assert_same(live, states[1])


def test_a_run_that_must_not_be_resumed_is_refused(store):
    publisher(store, resume=False).publish(make_weights())
    with pytest.raises(ConflictError, match="run 'run-a' exists"):
        publisher(store, resume=False)


def test_r30_an_old_publisher_is_told_who_fenced_it(store):
    states = history(2)
    first = publisher(store, label="trainer-1")
    first.publish(states[0])
    second = publisher(store, label="trainer-2")
    for _ in range(2):
        with pytest.raises(ConflictError, match=r"epoch 1 is fenced: .*'trainer-2' took over"):
            first.publish(states[1])
    second.publish(states[1])
    assert ConflictError.exit_code == 6
    assert not [k for k in store.list(KEYS.objects_prefix) if f"/{1:020d}/" in k][1:]


def test_a_store_without_create_only_writes_needs_a_single_writer():
    class Careless(PassThroughStore):
        def create(self, key, data):
            self.inner.put(key, data)

    store = Careless(MemoryStore())
    store.has_create_only = False
    with pytest.raises(StoreError, match="create-only"):
        publisher(store)
    states = history(4)
    source = publisher(store, single_writer=True, anchor_every=2, keep=1)
    for weights in states:
        source.publish(weights)
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[-1])


def test_i24_a_store_that_lies_about_create_only_writes_is_refused():
    class Liar(PassThroughStore):
        def create(self, key, data):
            self.inner.put(key, data)

    with pytest.raises(StoreError, match="twice"):
        publisher(Liar(MemoryStore()))


@pytest.mark.parametrize("weights", [None, object(), [("w", np.zeros(3))]])
def test_what_is_no_mapping_is_refused_with_what_would_be(store, weights):
    with pytest.raises(TypeError, match=r"expected a mapping of names .* state_dict\(\)"):
        publisher(store).publish(weights)
