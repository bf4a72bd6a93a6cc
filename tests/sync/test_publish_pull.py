"""Publish and pull through memory and file stores: exact, resumed, refused, retried."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    WrappedStore,
    addresses,
    assert_same,
    copy_of,
    history,
    make_weights,
    publisher,
    reader,
    step,
    zeros_like,
)

from gymfast.delta import State
from gymfast.errors import (
    BudgetError,
    ChainError,
    ConflictError,
    DeadlineError,
    FormatError,
    NotFoundError,
    StoreError,
)
from gymfast.stores import FileStore, MemoryStore
from gymfast.sync import CheckpointTarget, LiveTarget, Publisher, Subscriber
from gymfast.sync import State as TargetState
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import MAX_RECORD_BYTES, parse_hint, parse_log_record

KEYS = RunKeys(RUN)


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store")


def records_of(store, run: str = RUN) -> list:
    keys = RunKeys(run)
    blobs = [store.get(key, max_bytes=MAX_RECORD_BYTES) for key in store.list(keys.log_prefix)]
    return [parse_log_record(blob, "log") for blob in blobs]


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


# Anchors


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


# Versions, resuming, fencing


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
    class Careless(WrappedStore):
        has_create_only = False

        def create(self, key, data):
            self.inner.put(key, data)

    store = Careless(MemoryStore())
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
    class Liar(WrappedStore):
        def create(self, key, data):
            self.inner.put(key, data)

    with pytest.raises(StoreError, match="twice"):
        publisher(Liar(MemoryStore()))


# Failures of the store


def run_with_faults(how: str, make_fault):
    """Publishes with one fault per attempt until it works; then everything has to be exact."""
    states = history(3)
    for number in itertools.count(1):
        store = FaultyStore(MemoryStore())
        clock = ManualClock()
        source = publisher(store, clock=clock, anchor_every=2, keep=1, timeout_s=5.0)
        source.publish(states[0])
        source.publish(states[1])
        store.arm(make_fault(number, how))
        try:
            source.publish(states[2])
            failed = False
        except (StoreError, DeadlineError):
            failed = True
        num_calls = len(store.calls)
        store.arm(None)
        if failed:
            report = source.publish(states[2])
            assert report.version in (2, 3)
            assert report.root == State.reading(states[2]).root.hex()
        source.publish(states[3])
        live = zeros_like(states[0])
        reader(store, live).pull()
        assert_same(live, states[3])
        if number > num_calls:
            return number
    raise AssertionError


@pytest.mark.parametrize("how", ["before", "after"])
def test_i04_a_retry_after_one_failed_call_is_exact(how):
    def fault(number, how):
        return lambda n, operation, key: how if n == number else ""

    assert run_with_faults(how, fault) > 10


@pytest.mark.parametrize("how", ["before", "after"])
def test_i04_a_retry_after_a_store_that_stays_away_is_exact(how):
    def fault(number, how):
        return lambda n, operation, key: how if n >= number else ""

    assert run_with_faults(how, fault) > 10


def test_i04_other_weights_after_a_lost_reply_are_diffed_against_what_was_committed():
    states = history(4)
    store, clock = FaultyStore(MemoryStore()), ManualClock()
    source = publisher(store, clock=clock, timeout_s=5.0)
    source.publish(states[0])
    is_log = f"{RUN}/log/"
    store.arm(
        lambda n, operation, key: (
            ("after" if operation == "create" else "before") if key.startswith(is_log) else ""
        )
    )
    with pytest.raises(StoreError, match="injected"):
        source.publish(states[1])
    assert source.version == 0
    store.arm(None)
    report = source.publish(states[2])
    assert (report.version, report.kind) == (2, "anchor")
    live = zeros_like(states[0])
    follower = reader(store, live)
    for version in range(3):
        follower.pull(version)
        assert_same(live, states[version])


def test_the_version_asked_for_is_refused_if_an_earlier_attempt_took_it():
    states = history(2)
    store, clock = FaultyStore(MemoryStore()), ManualClock()
    source = publisher(store, clock=clock, timeout_s=5.0)
    store.arm(
        lambda n, op, key: (
            ("after" if op == "create" else "before") if key.startswith(KEYS.log_prefix) else ""
        )
    )
    with pytest.raises(StoreError):
        source.publish(states[0], version=7)
    store.arm(None)
    with pytest.raises(ValueError, match="goes on with 8"):
        source.publish(states[1], version=7)
    assert source.publish(states[1], version=8).version == 8


def test_an_interrupt_in_the_middle_leaves_the_committed_state():
    states = history(3)
    for where in ("put", "create"):
        store = FaultyStore(MemoryStore())
        source = publisher(store)
        source.publish(states[0])

        def interrupt(n, operation, key, where=where):
            if operation == where and "/hint" not in key:
                raise KeyboardInterrupt
            return ""

        store.arm(interrupt)
        with pytest.raises(KeyboardInterrupt):
            source.publish(states[1])
        store.arm(None)
        assert source.publish(states[2]).kind == "delta"
        live = zeros_like(states[0])
        reader(store, live).pull()
        assert_same(live, states[2])


def test_weights_that_no_frame_can_carry_leave_the_committed_state(store):
    states = history(2)
    source = publisher(store)
    source.publish(states[0])
    for bad, error in (
        ({}, ValueError),
        ({"a": object()}, TypeError),
        ({"a\n": np.zeros(3)}, ValueError),
        ({**states[1], "x": np.array(["text"])}, TypeError),
    ):
        with pytest.raises(error):
            source.publish(bad)
    assert source.publish(states[1]).kind == "delta"
    assert source.version == 1


def test_objects_of_a_failed_publish_are_removed(store):
    faulty = FaultyStore(store)
    source, states = publisher(faulty, object_bytes=100, timeout_s=1.0), history(2)
    source.publish(states[0])
    before = sorted(store.list(KEYS.objects_prefix))
    faulty.arm(lambda n, op, key: "before" if op == "put" and n > 6 else "")
    with pytest.raises(StoreError):
        source.publish(states[1])
    faulty.arm(None)
    assert sorted(store.list(KEYS.objects_prefix)) == before


def test_what_is_only_advice_may_fail(store, caplog):
    faulty = FaultyStore(store)
    source, states = publisher(faulty, anchor_every=1, keep=1), history(4)
    faulty.arm(lambda n, op, key: "before" if key == KEYS.hint or op == "delete" else "")
    for weights in states:
        source.publish(weights)
    assert "hint" in caplog.text
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[-1])


def test_an_anchor_that_fails_is_made_up_for_later(store, caplog):
    faulty = FaultyStore(store)
    source, states = publisher(faulty, anchor_every=2), history(4)
    source.publish(states[0])
    source.publish(states[1])
    creates = itertools.count()
    faulty.arm(lambda n, op, key: "before" if op == "put" and next(creates) == 2 else "")
    report = source.publish(states[2])
    assert (report.version, report.anchor_bytes) == (2, 0)
    assert "gets its anchor later" in caplog.text
    faulty.arm(None)
    assert source.publish(states[3]).anchor_bytes > 0
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[3])


# Memory


def test_i60_a_snapshot_that_does_not_fit_is_refused_with_numbers():
    weights = make_weights(size=5000)
    size = sum(value.nbytes for value in weights.values())
    with pytest.raises(BudgetError, match=f"{size} bytes for the snapshot") as caught:
        publisher(memory_budget_bytes=size).publish(weights)
    assert f"the budget is {size} bytes" in str(caught.value)
    assert "memory_budget_bytes" in str(caught.value)
    assert BudgetError.exit_code == 7


def test_i60_a_way_back_that_does_not_fit_makes_the_version_an_anchor(caplog):
    weights = make_weights(size=5000)
    size = sum(value.nbytes for value in weights.values())
    from gymfast.sync.budget import SECTION_BYTES

    store = MemoryStore()
    budget = size + SECTION_BYTES + (1 << 20) + 3000
    source = publisher(store, memory_budget_bytes=budget, object_bytes=1 << 20)
    source.publish(weights)
    second = step(weights, 1, density=0.001)
    assert source.publish(second).kind == "delta"
    third = step(second, 2, density=0.2)
    assert source.publish(third).kind == "anchor"
    assert "the way back needs" in caplog.text
    fourth = step(third, 3, density=0.001)
    assert source.publish(fourth).kind == "delta"
    live = zeros_like(weights)
    reader(store, live).pull()
    assert_same(live, fourth)


def test_the_available_memory_is_the_budget_if_none_is_declared(monkeypatch):
    from gymfast.sync import budget

    monkeypatch.setattr(budget, "available_bytes", lambda: 1000)
    with pytest.raises(BudgetError, match="of 1000 bytes available 900 may be used"):
        publisher().publish(make_weights())
    monkeypatch.setattr(budget, "available_bytes", lambda: None)
    publisher().publish(make_weights())


def test_available_memory_is_known_on_linux():
    from gymfast.sync.budget import available_bytes

    found = available_bytes()
    assert found is None or found > 0


# Hints, signatures, progress


def test_the_hint_is_advice_only(store):
    source, states = publisher(store), history(2)
    for weights in states:
        source.publish(weights)
    hint = parse_hint(store.get(KEYS.hint, max_bytes=1000), "hint")
    assert (hint.version, hint.seq) == (2, 4)
    for blob in (b"garbage", b"", json.dumps({"seq": 10**9}).encode()):
        store.put(KEYS.hint, blob)
        live = zeros_like(states[0])
        assert reader(store, live).pull().version == 2
    store.delete(KEYS.hint)
    assert reader(store, zeros_like(states[0])).pull().version == 2


def test_a_reader_with_a_key_refuses_what_is_not_signed_with_it(store):
    key = b"0123456789abcdef"
    states = history(2)
    source = publisher(store, key=key)
    for weights in states:
        source.publish(weights)
    live = zeros_like(states[0])
    assert reader(store, live, key=key).pull().version == 2
    assert reader(store, zeros_like(live)).pull().version == 2
    with pytest.raises(FormatError, match="another key"):
        reader(store, zeros_like(live), key=b"x" * 16).pull()
    with pytest.raises(FormatError, match="another key"):
        publisher(store, key=b"x" * 16)
    publisher(store, run="open").publish(states[0])
    with pytest.raises(FormatError, match="not signed"):
        reader(store, zeros_like(live), run="open", key=key).pull()


def test_progress_is_told_in_bytes(store):
    source, states = publisher(store, object_bytes=500), history(1)
    told: list[tuple[int, int]] = []
    source.publish(states[0], advance=lambda done, total: told.append((done, total)))
    size = sum(value.nbytes for value in states[0].values())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    told.clear()
    reader(store, zeros_like(states[0])).pull(advance=lambda d, t: told.append((d, t)))
    assert told[-1][0] == told[-1][1] > 0


# Subscribers


def test_fetch_stages_and_apply_installs(store):
    source, states = publisher(store), history(2)
    source.publish(states[0])
    live = zeros_like(states[0])
    follower = reader(store, live)
    assert (follower.poll(), follower.version, follower.state) == (0, None, TargetState.EMPTY)
    assert not follower.ready(0)
    follower.fetch()
    assert follower.ready(0)
    assert not follower.ready(1)
    assert not follower.serves(0)
    assert_same(live, zeros_like(live))
    follower.apply()
    assert follower.serves(0)
    assert follower.ready(0)
    with pytest.raises(ChainError, match=r"call fetch\(\)"):
        follower.apply()


def test_nothing_to_do_is_reported_as_such(store):
    source, states = publisher(store, anchor_every=1), history(1)
    for weights in states:
        source.publish(weights)
    follower = reader(store, zeros_like(states[0]))
    follower.pull()
    publisher(store)
    report = follower.pull()
    assert (report.kind, report.version, report.num_bytes) == ("nothing", 1, 0)
    assert list(store.list(KEYS.readers_prefix)) == []


def test_a_run_without_versions_is_not_found(store):
    live = make_weights()
    follower = reader(store, live)
    assert follower.poll() is None
    with pytest.raises(NotFoundError, match="no version"):
        follower.pull()
    publisher(store)
    assert follower.poll() is None
    with pytest.raises(NotFoundError, match="no version"):
        follower.pull()
    assert NotFoundError.exit_code == 5


def test_a_target_that_holds_a_published_state_needs_no_anchor(store):
    source, states = publisher(store), history(4)
    for weights in states:
        source.publish(weights)
    live = copy_of(states[2])
    follower = reader(store, live)
    follower.poll()
    assert follower.version == 2
    report = follower.pull()
    assert (report.kind, report.from_version, report.num_deltas) == ("deltas", 2, 2)
    assert_same(live, states[4])


def test_frames_can_be_staged_on_disk(store, tmp_path):
    source, states = publisher(store), history(2)
    for weights in states:
        source.publish(weights)
    live = zeros_like(states[0])
    folder = tmp_path / "staging"
    follower = reader(store, live, staging_dir=folder)
    staged = follower.fetch()
    assert len(staged.frames) == 3 or staged.frames[0].step.kind == "anchor"
    assert list(folder.iterdir()) == [], "staged files have no name: a crash leaves none"
    follower.apply()
    assert_same(live, states[2])


def test_staging_is_bounded(store, tmp_path):
    source, weights = publisher(store), make_weights()
    source.publish(weights)
    for options in ({}, {"staging_dir": tmp_path / "staging"}):
        follower = reader(store, zeros_like(weights), max_staging_bytes=100, **options)
        with pytest.raises(BudgetError, match="the limit is 100 bytes"):
            follower.pull()
        assert list(store.list(KEYS.readers_prefix)) == []


def test_a_subscriber_waits_with_a_deadline():
    store, clock = MemoryStore(), ManualClock()
    source, states = publisher(store, clock=clock), history(2)
    source.publish(states[0])
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock)
    with pytest.raises(DeadlineError, match="version 1"):
        follower.wait(1, timeout_s=10)
    assert 9 < clock.slept_s < 11
    clock.on_sleep = lambda: source.publish(states[1]) if source.version == 0 else None
    assert follower.wait(1, timeout_s=10).version == 1
    assert_same(live, states[1])


def test_i32_a_log_that_stands_still_is_stale():
    store, clock = MemoryStore(), ManualClock()
    source, states = publisher(store, clock=clock), history(2)
    source.publish(states[0])
    follower = reader(store, zeros_like(states[0]), clock=clock, freshness_s=60.0)
    follower.pull()
    assert not follower.is_stale
    clock.now_s += 61
    follower.poll()
    assert follower.is_stale
    assert "stale" in follower.status.text
    source.publish(states[1])
    follower.poll()
    assert not follower.is_stale
    late = reader(store, zeros_like(states[0]), clock=clock, freshness_s=60.0)
    clock.now_s += 61
    late.poll()
    assert late.is_stale, "a reader that has just started sees the age of the record"


def test_a_clock_that_runs_backwards_harms_nothing(store):
    clock = ManualClock()
    source, states = publisher(store, clock=clock), history(3)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock, freshness_s=60.0)
    for weights in states:
        clock.wall_offset_s -= 10_000_000_000
        source.publish(weights)
        follower.pull()
        assert_same(live, weights)
        assert not follower.is_stale


# Checkpoints


@pytest.mark.parametrize("name", ["model.safetensors", "directory"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_checkpoint_follows_the_run_across_restarts(store, tmp_path, name, in_place):
    source, states = publisher(store, anchor_every=3), history(5)
    path = tmp_path / name
    file = path if path.suffix else path / "model.safetensors"
    for version, weights in enumerate(states):
        source.publish(weights)
        with Subscriber(store, RUN, CheckpointTarget(path, in_place=in_place)) as follower:
            assert follower.version == (version - 1 if version else None)
            follower.pull()
            assert follower.version == version
        assert_same(load_file(file), weights)
    assert {p.name for p in tmp_path.iterdir()} - {"store"} == {
        name,
        f".gymfast.position.{name}",
        f".gymfast.lock.{name}",
    }


def test_a_sharded_checkpoint_keeps_its_shards_and_side_files(tmp_path):
    store = MemoryStore()
    states = history(3)
    path = tmp_path / "model"
    path.mkdir()
    names = sorted(states[0])
    files = {
        "model-00001-of-00002.safetensors": names[:2],
        "model-00002-of-00002.safetensors": names[2:],
    }
    for file, members in files.items():
        save_file({n: states[0][n] for n in members}, path / file)
    index = {"metadata": {}, "weight_map": {n: f for f, members in files.items() for n in members}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    source = publisher(store)
    for weights in states[:3]:
        source.publish(weights)
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        report = follower.pull()
        assert (report.kind, report.from_version) == ("deltas", 0)
    found = {n: v for file in files for n, v in load_file(path / file).items()}
    assert_same(found, states[2])
    source.publish(states[3], anchor=True)
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        assert follower.pull().kind == "anchor"
    assert_same(load_file(path / "model.safetensors"), states[3])
    assert (path / "config.json").read_text() == "{}"


def test_two_subscribers_do_not_share_a_checkpoint(store, tmp_path):
    publisher(store).publish(make_weights())
    with (
        Subscriber(store, RUN, CheckpointTarget(tmp_path / "c")),
        pytest.raises(ConflictError, match="followed by another process"),
    ):
        CheckpointTarget(tmp_path / "c")
    CheckpointTarget(tmp_path / "c").close()


def test_a_checkpoint_of_something_else_is_not_overwritten(store, tmp_path):
    publisher(store).publish(make_weights())
    path = tmp_path / "model.safetensors"
    save_file({"layers.0.weigth": np.zeros(3)}, path)
    before = path.read_bytes()
    with Subscriber(store, RUN, CheckpointTarget(path)) as follower:
        with pytest.raises(FormatError, match=r"layers.0.weight.*nearest.*layers.0.weigth"):
            follower.pull()
        assert follower.state is TargetState.EMPTY
    assert path.read_bytes() == before
    with Subscriber(store, RUN, CheckpointTarget(path, allow_new_names=True)) as follower:
        follower.pull()
    assert_same(load_file(path), make_weights())


def test_live_tensors_of_something_else_are_not_overwritten(store):
    publisher(store).publish(make_weights())
    live = {"layers.0.weigth": np.zeros(3)}
    follower = reader(store, live)
    with pytest.raises(FormatError, match=r"layers\.0\.weight"):
        follower.pull()
    assert follower.state is TargetState.EMPTY
    assert_same(live, {"layers.0.weigth": np.zeros(3)})


def test_addresses_survive_deltas_and_anchors(store):
    source, states = publisher(store), history(4)
    live = zeros_like(states[0])
    before = addresses(live)
    follower = reader(store, live)
    for version, weights in enumerate(states):
        source.publish(weights, anchor=version == 3)
        follower.pull()
        assert_same(live, weights)
        assert addresses(live) == before


def test_torch_tensors_are_updated_in_place():
    torch = pytest.importorskip("torch")
    store = MemoryStore()
    generator = torch.Generator().manual_seed(1)
    weights = {
        "a": torch.randn(64, 32, generator=generator).to(torch.bfloat16),
        "b": torch.randn(100, generator=generator),
    }
    live = {name: torch.zeros_like(value) for name, value in weights.items()}
    pointers = {name: value.data_ptr() for name, value in live.items()}
    source = publisher(store)
    follower = Subscriber(store, RUN, LiveTarget(live))
    for _ in range(3):
        source.publish(weights)
        follower.pull()
        assert {n: v.data_ptr() for n, v in live.items()} == pointers
        assert all(
            torch.equal(live[n].view(torch.uint8), weights[n].view(torch.uint8)) for n in live
        )
        weights = {n: v * 1.01 for n, v in weights.items()}


def test_a_store_may_be_named_by_its_address(tmp_path: Path):
    url = f"file:{tmp_path / 'store'}"
    weights = make_weights()
    Publisher(url, RUN).publish(weights)
    live = zeros_like(weights)
    Subscriber(url, RUN, LiveTarget(live)).pull()
    assert_same(live, weights)
