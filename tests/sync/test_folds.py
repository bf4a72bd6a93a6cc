"""Readers and retention with folds, right ones and wrong ones (sync-protocol.md, 15)."""

from __future__ import annotations

from contextlib import suppress

import pytest
from sync.folding import FOLDED_9, KEYS, SIZE, compact, published, pulled, spans_of
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    assert_same,
    history,
    publisher,
    reader,
    step,
    zeros_like,
)
from sync.logs import changed

from gymfast.errors import ConflictError, FormatError, StoreError
from gymfast.stores import MemoryStore
from gymfast.stores.base import Store
from gymfast.sync import collect
from gymfast.sync.folds import parts, read_fold
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import Span
from gymfast.sync.log import Log
from gymfast.sync.manifest import FORMAT, FoldRecord, LeaseRecord, encode, sign
from gymfast.testing.faults import PassThroughStore

KEY = bytes(range(32))
pytestmark = pytest.mark.usefixtures("quick_disk")


def test_a_late_reader_takes_folds_and_ends_with_the_exact_bytes(store, tmp_path):
    states = published(store, 9)
    assert pulled(store, states) == [(-1, 0), *((v, v + 1) for v in range(9))]
    made = compact(store, tmp_path / "folds")
    assert made == [(0, 2), (2, 4), (0, 4), (4, 6), (6, 8), (4, 8)]
    assert pulled(store, states) == [(-1, 0), *FOLDED_9]
    live = zeros_like(states[0])
    with reader(store, live) as follower:
        follower.pull(3)
        plan = follower.fetch().plan
        assert [s.record.version for s in plan.steps] == [4, 8, 9]
        report = follower.apply()
        assert (report.from_version, report.version, report.num_deltas) == (3, 9, 3)
    assert_same(live, states[-1])
    assert not fsck(store, RUN).findings


def test_a_reader_that_keeps_up_never_looks_for_folds(tmp_path):
    store = FaultyStore(MemoryStore())
    source = publisher(store, keep=100)
    states = history(6, num_tensors=2, size=SIZE)
    source.publish(states[0])
    live = zeros_like(states[0])
    with reader(store, live) as follower:
        for state in states[1:]:
            compact(store, tmp_path / "folds")
            source.publish(state)
            store.arm(None)
            follower.pull()
            assert not [key for _, key in store.calls if "/fold" in key]
    assert_same(live, states[-1])


def test_folds_are_made_once_and_go_on_after_a_restart(tmp_path):
    store = FaultyStore(MemoryStore())
    states = published(store, 5)
    assert compact(store, tmp_path / "folds") == [(0, 2), (2, 4), (0, 4)]
    source = publisher(store, keep=1000)
    assert source.adopt(states[-1])
    store.arm(None)
    assert compact(store, tmp_path / "folds") == []
    assert not [key for what, key in store.calls if what in ("put", "create") and "/fold" in key]
    states.append(step(states[-1], 77))
    source.publish(states[-1])
    assert compact(store, tmp_path / "folds") == [(4, 6)]
    assert pulled(store, states) == [(-1, 0), (0, 4), (4, 6)]


def test_full_states_of_a_compactor_spare_the_publisher_its_anchors(tmp_path):
    store = MemoryStore()
    states = published(store, 21)
    assert compact(store, tmp_path / "folds", anchor_every=4, levels=1)[-2:] == [(18, 20), (-1, 20)]
    full = [(base, version) for base, version in spans_of(store) if base < 0]
    assert full == [(-1, v) for v in (4, 8, 12, 16, 20)]  # 0 is an anchor of the log
    assert pulled(store, states) == [(-1, 20), (20, 21)]
    report = collect(store, RUN, keep=1000)
    assert report.num_folds == 3
    assert [pair for pair in spans_of(store) if pair[0] < 0] == [(-1, 16), (-1, 20)]


def test_a_full_state_of_a_compactor_leads_past_a_damaged_record(tmp_path):
    store = MemoryStore()
    states = published(store, 9)
    compact(store, tmp_path / "folds", anchor_every=4)
    key = KEYS.record(6)
    store.put(key, store.get(key, max_bytes=1 << 20)[:-9])
    assert pulled(store, states) == [(-1, 8), (8, 9)]


def test_a_fold_that_does_not_pay_is_not_offered(tmp_path):
    store = MemoryStore()
    states = history(4, num_tensors=1, size=40)
    source = publisher(store)
    for state in states:
        source.publish(state)
    # Tiny frames: one request fewer is worth more than all their bytes.
    assert compact(store, tmp_path / "a", levels=1) == [(0, 2), (2, 4)]
    store = MemoryStore()
    source = publisher(store)
    other = history(1, seed=3, num_tensors=1, size=400_000)
    for state in (*other, other[0], other[1]):
        source.publish(state)
    dense = compact(store, tmp_path / "b", levels=1)
    assert dense == [(0, 2)]  # a state that came back costs nothing
    assert read_fold(Log(store, KEYS), Span(0, 2)).num_changed == 0


# Wrong folds


def replace_record(store: Store, fold: FoldRecord, **fields) -> None:
    store.put(KEYS.fold(Span(fold.base_version, fold.version)), encode(changed(fold, **fields)))


def each_object(store: Store, span: Span) -> list[str]:
    return [key for found, key in parts(Log(store, KEYS)) if found == span]


def damaged_record(store: Store, fold: FoldRecord) -> None:
    key = KEYS.fold(Span(0, 4))
    store.put(key, store.get(key, max_bytes=1 << 20)[:-2])


def record_of_another_run(store: Store, fold: FoldRecord) -> None:
    replace_record(store, fold, run="run-b")


def record_of_another_span(store: Store, fold: FoldRecord) -> None:
    other = read_fold(Log(store, KEYS), Span(4, 8))
    store.put(KEYS.fold(Span(0, 4)), encode(other))


def record_of_other_states(store: Store, fold: FoldRecord) -> None:
    replace_record(store, fold, root="0" * 64)


def frame_of_another_fold(store: Store, fold: FoldRecord) -> None:
    """Sound bytes under a sound record, but they lead elsewhere."""
    other = read_fold(Log(store, KEYS), Span(4, 8))
    (ref,) = other.frame.objects
    keys, theirs = KEYS.of(fold), KEYS.of(other)
    blob = store.get(theirs.object(0, ref.digest), max_bytes=1 << 30)
    store.put(keys.object(0, ref.digest), blob)
    replace_record(store, fold, frame=other.frame)


def objects_gone(store: Store, fold: FoldRecord) -> None:
    for key in each_object(store, Span(0, 4)):
        store.delete(key)


def objects_flipped(store: Store, fold: FoldRecord) -> None:
    for key in each_object(store, Span(0, 4)):
        blob = bytearray(store.get(key, max_bytes=1 << 30))
        blob[len(blob) // 2] ^= 1
        store.put(key, bytes(blob))


def objects_endless(store: Store, fold: FoldRecord) -> None:
    for key in each_object(store, Span(0, 4)):
        store.put(key, store.get(key, max_bytes=1 << 30) + bytes(1000))


WRONGS = [
    damaged_record,
    record_of_another_run,
    record_of_another_span,
    record_of_other_states,
    frame_of_another_fold,
    objects_gone,
    objects_flipped,
    objects_endless,
]


QUICK = (record_of_other_states, frame_of_another_fold, objects_gone)


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(w, id=w.__name__, marks=() if w in QUICK else pytest.mark.ci) for w in WRONGS],
)
def test_a_wrong_fold_costs_time_only(wrong, tmp_path):
    store, clock = MemoryStore(), ManualClock()
    states = published(store, 9)
    compact(store, tmp_path / "folds")
    wrong(store, read_fold(Log(store, KEYS), Span(0, 4)))
    began_s = clock.monotonic_s()
    assert pulled(store, states, clock=clock) == [(-1, 0), (0, 2), (2, 4), (4, 8), (8, 9)]
    assert clock.monotonic_s() == began_s  # nobody waits for a fold
    report = fsck(store, RUN)
    assert not report.damage
    assert report.restorable == 9
    if wrong is frame_of_another_fold:
        return  # only who decodes it finds that
    assert KEYS.fold(Span(0, 4)) in [finding.key for finding in report.findings]
    if wrong is objects_flipped:
        store.delete(KEYS.fold(Span(0, 4)))  # as fsck advises
    assert (0, 4) in compact(store, tmp_path / "new")
    assert pulled(store, states) == [(-1, 0), *FOLDED_9]


@pytest.mark.ci
def test_many_wrong_folds_end_the_use_of_folds(tmp_path):
    store = FaultyStore(MemoryStore())
    states = published(store, 17)
    compact(store, tmp_path / "folds")
    for _, key in list(parts(Log(store, KEYS))):
        store.inner.delete(key)
    store.arm(None)
    assert pulled(store, states) == [(-1, 0), *((v, v + 1) for v in range(17))]
    assert sum(what == "size" and "/folded/" in key for what, key in store.calls) == 3


def test_a_fold_longer_than_any_record_is_not_read(tmp_path):
    class Endless(PassThroughStore):
        def size(self, key: str) -> int:
            return 1 << 40 if "/folds/" in key else self.inner.size(key)

        def get(self, key: str, *, max_bytes: int) -> bytes:
            if "/folds/" in key:
                raise StoreError(f"over the limit of {max_bytes}")
            return self.inner.get(key, max_bytes=max_bytes)

    store = MemoryStore()
    states = published(store, 9)
    compact(store, tmp_path / "folds")
    assert len(pulled(Endless(store), states)) == 10
    with pytest.raises(FormatError, match="at most"):
        read_fold(Log(Endless(store), KEYS), Span(0, 2))


@pytest.mark.ci
def test_thousands_of_names_cost_a_bounded_number_of_reads(tmp_path):
    store = FaultyStore(MemoryStore())
    states = published(store, 9)
    compact(store, tmp_path / "folds")
    for base in range(9):
        for version in range(base + 1, 10):
            with suppress(ConflictError):
                store.create(KEYS.fold(Span(base, version)), b"{}")
    for version in range(2000):
        store.put(KEYS.fold(Span(-1, version)), b"{}")
    store.arm(None)
    pulled(store, states)
    assert sum(what == "get" and "/folds/" in key for what, key in store.calls) <= 64


def test_a_fold_of_another_key_is_not_followed(tmp_path):
    store = MemoryStore()
    states = published(store, 9, key=KEY)
    with pytest.raises(FormatError, match="signature"):
        compact(store, tmp_path / "other", key=b"x" * 32)
    assert spans_of(store) == []
    compact(store, tmp_path / "folds", key=KEY)
    assert pulled(store, states, key=KEY) == [(-1, 0), *FOLDED_9]
    fold = read_fold(Log(store, KEYS), Span(0, 4))
    for forged in (changed(fold, mac=""), sign(fold, b"x" * 32)):
        store.put(KEYS.fold(Span(0, 4)), encode(forged))
        assert (0, 4) not in pulled(store, states, key=KEY)


def test_a_fold_that_fails_in_the_target_is_not_tried_again(tmp_path):
    store = MemoryStore()
    states = published(store, 9)
    compact(store, tmp_path / "folds")
    live = zeros_like(states[0])
    with reader(store, live) as follower:
        follower.pull(0)
        assert any(s.is_fold for s in follower.fetch().plan.steps)
        target = follower._installer._target
        write, target.write = target.write, lambda frames, is_known: 1 / 0
        with pytest.raises(ZeroDivisionError):
            follower.apply()
        target.write = write
        assert follower.version == 0
        plan = follower.fetch().plan
        assert [s.record.version for s in plan.steps] == [2, 4, 6, 8, 9]  # other folds
        follower.apply()
    assert_same(live, states[-1])


# Retention


def test_folds_below_the_floor_go_with_their_objects(tmp_path):
    store = MemoryStore()
    states = history(12, num_tensors=2, size=SIZE)
    source = publisher(store, keep=50, anchor_every=5)
    for state in states[:10]:
        source.publish(state)
    compact(store, tmp_path / "folds", anchor_every=4)
    store.put(KEYS.of(read_fold(Log(store, KEYS), Span(0, 2))).object(0, "0" * 64), b"stray")
    store.put(f"{KEYS.folded_prefix}{Span(1, 3)}/{'0' * 64}", b"unfinished, below the floor")
    store.put(f"{KEYS.folded_prefix}{Span(8, 10)}/{'0' * 64}", b"unfinished, above it")
    before = list(store.list(""))
    dry = collect(store, RUN, keep=3, dry_run=True)
    assert list(store.list("")) == before
    report = collect(store, RUN, keep=3)
    assert (dry.num_folds, dry.num_objects, dry.num_bytes) == (
        *(report.num_folds, report.num_objects),
        report.num_bytes,
    )
    assert report.num_folds == 7  # the floor is version 5
    left = spans_of(store)
    assert left == [(-1, 8), (6, 8)]
    found = {span for span, _ in parts(Log(store, KEYS))}
    assert found == {Span(-1, 8), Span(6, 8), Span(8, 10)}
    problems = [f.problem for f in fsck(store, RUN).findings if "/fold" in f.key]
    assert problems == ["fold 00000000000000000008-00000000000000000010 is not finished"]
    assert_same(states[9], states[9])
    pulled(store, states[:10])


def test_a_publisher_deletes_folds_below_its_floor(tmp_path):
    store = MemoryStore()
    states = history(12, num_tensors=2, size=SIZE)
    source = publisher(store, keep=2, anchor_every=4)
    cleaned = []
    for state in states:
        cleaned.append(source.publish(state).cleaned)
        compact(store, tmp_path / "folds", levels=1)
    assert sum(report.num_folds for report in cleaned if report) > 0
    floor = fsck(store, RUN)
    assert not floor.damage
    assert all(base >= 8 for base, _ in spans_of(store) if base >= 0)
    pulled(store, states)


def test_a_lease_keeps_the_folds_of_its_reader(tmp_path):
    store, clock = MemoryStore(), ManualClock()
    states = history(12, num_tensors=2, size=SIZE)
    source = publisher(store, keep=1, anchor_every=6, clock=clock)
    for state in states[:6]:
        source.publish(state)
    compact(store, tmp_path / "folds", clock=clock)
    live = zeros_like(states[0])
    with reader(store, live, clock=clock) as follower:
        follower.pull(1)
        # The plan is made and the lease taken; the publisher moves on before a byte is read.
        stager = follower._fetcher._stager
        fetch, is_done = stager.fetch, []

        def late(step_, tick, *, is_decoded):
            if not is_done:
                is_done.append(1)
                for state in states[6:]:
                    source.publish(state)
                assert collect(store, RUN, keep=1, clock=clock).held_by is not None
            return fetch(step_, tick, is_decoded=is_decoded)

        stager.fetch = late
        plan = follower.fetch(5).plan
        assert [s.record.version for s in plan.steps] == [2, 4, 5]
        assert [s.is_fold for s in plan.steps] == [False, True, False]
        assert follower.apply().version == 5
    assert_same(live, states[5])
    assert collect(store, RUN, keep=1, clock=clock).num_folds > 0
    assert (2, 4) not in spans_of(store)


@pytest.mark.ci
def test_a_lease_at_an_old_full_state_keeps_it(tmp_path):
    store, clock = MemoryStore(), ManualClock()
    published(store, 21, clock=clock)
    compact(store, tmp_path / "folds", anchor_every=4, levels=1, clock=clock)
    fold = read_fold(Log(store, KEYS), Span(-1, 8))
    lease = LeaseRecord(FORMAT, RUN, "r", fold.seq, clock.wall_us() + 10**9)
    store.put(KEYS.reader("r"), encode(lease))
    collect(store, RUN, keep=1000, clock=clock)
    assert [v for base, v in spans_of(store) if base < 0] == [8, 12, 16, 20]
