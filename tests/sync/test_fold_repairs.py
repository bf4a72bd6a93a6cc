"""Folds that were lost, not proven, or are names only (sync-protocol.md, 15)."""

from __future__ import annotations

import pytest
from sync.folding import KEYS, compact, published, pulled, spans_of
from sync.harness import RUN, FaultyStore, ManualClock, publisher

from gymfast.errors import BudgetError, ConflictError, DeadlineError, FormatError, StoreError
from gymfast.stores import MemoryStore
from gymfast.sync import Compactor, collect
from gymfast.sync.folds import MAX_READ, newest_version, read_fold
from gymfast.sync.keys import Span
from gymfast.sync.log import Log
from gymfast.sync.manifest import COUNT_MAX

pytestmark = pytest.mark.usefixtures("quick_disk")
KEY = b"k" * 16


def compactor_of(store, folder, **options) -> Compactor:
    options = {"every": 4, "levels": 1, "threads": 1, **options}
    return Compactor(store, RUN, folder, **options)


# What proves a fold wrong


def test_a_store_that_stalls_while_a_fold_is_proven_does_not_cost_it(tmp_path) -> None:
    store = FaultyStore(MemoryStore())
    states = published(store, 4)
    with compactor_of(store, tmp_path, clock=ManualClock(), timeout_s=5.0) as compactor:
        work = compactor.work()
        assert next(work).version == 4
        store.arm(lambda i, op, key: "before" if "/objects/" in key or "/folded/" in key else "")
        with pytest.raises((StoreError, DeadlineError)):
            next(work)
        store.arm(None)
        assert spans_of(store) == [(0, 4)]
        assert list(compactor.work()) == []
    assert pulled(store, states) == [(-1, 0), (0, 4)]


@pytest.mark.parametrize("error", [DeadlineError("slow"), BudgetError("full")])
def test_neither_deadline_nor_budget_takes_a_fold_back(error, tmp_path) -> None:
    store = MemoryStore()
    published(store, 4)
    with compactor_of(store, tmp_path) as compactor:
        base = compactor._bases[4]
        pull = base.pull

        def failing(version):
            if version == 4:
                raise error
            return pull(version)

        base.pull = failing
        with pytest.raises(type(error)):
            list(compactor.work())
    assert spans_of(store) == [(0, 4)]


def test_a_fold_that_is_proven_wrong_by_the_second_look_is_taken_back(tmp_path) -> None:
    store = MemoryStore()
    published(store, 4)
    with compactor_of(store, tmp_path) as compactor:
        base, errors = compactor._bases[4], [DeadlineError("slow"), FormatError("wrong", 60)]
        pull = base.pull
        base.pull = lambda version: pull(version) if version == 0 else _raise(errors.pop(0))
        with pytest.raises(DeadlineError):
            list(compactor.work())
        assert spans_of(store) == [(0, 4)]
        with pytest.raises(FormatError):
            list(compactor.work())
    assert spans_of(store) == []


def test_a_store_that_keeps_a_wrong_fold_does_not_hide_why_it_is_wrong(tmp_path) -> None:
    store = FaultyStore(MemoryStore())
    published(store, 4)
    with compactor_of(store, tmp_path) as compactor:
        base = compactor._bases[4]
        pull = base.pull
        wrong = FormatError("the frame is wrong", 60)
        base.pull = lambda version: pull(version) if version == 0 else _raise(wrong)
        store.arm(lambda i, op, key: "before" if op == "delete" and "/folds/" in key else "")
        with pytest.raises(FormatError, match="the frame is wrong"):
            list(compactor.work())


def _raise(error: Exception):
    raise error


# Lost objects


def test_a_fold_that_lost_an_object_is_made_anew_with_objects_of_another_size(tmp_path) -> None:
    store = MemoryStore()
    published(store, 4)
    options = {"every": 4, "levels": 1, "anchor_every": 4}
    made = compact(store, tmp_path / "a", object_bytes=30_000, **options)
    assert made == [(0, 4), (-1, 4)]
    log = Log(store, KEYS)
    lost = read_fold(log, Span(-1, 4))
    store.delete(KEYS.of(lost).object(0, lost.frame.objects[0].digest))
    assert (-1, 4) in compact(store, tmp_path / "b", object_bytes=25_000, **options)
    fold = read_fold(log, Span(-1, 4))
    sizes = [store.size(KEYS.of(fold).object(0, ref.digest)) for ref in fold.frame.objects]
    assert sizes == [ref.num_bytes for ref in fold.frame.objects]


# Names that are rubbish


def test_full_states_beyond_the_end_of_the_log_do_not_pass_the_sound_ones() -> None:
    store = MemoryStore()
    published(store, 8)
    for version in (4, 8, 10**9, 10**9 + 1):
        store.put(KEYS.fold(Span(-1, version)), b"rubbish")
    assert collect(store, RUN, keep=50).num_folds == 0
    assert (-1, 4) in spans_of(store)
    assert (-1, 8) in spans_of(store)


def test_names_beyond_the_end_of_the_log_do_not_crowd_folds_out(tmp_path) -> None:
    store = MemoryStore()
    states = published(store, 9)
    compact(store, tmp_path, every=4, levels=1)
    for number in range(MAX_READ):
        store.put(KEYS.fold(Span(-1, 10**9 + number)), b"rubbish")
    assert pulled(store, states) == [(-1, 0), (0, 4), (4, 8), (8, 9)]


def test_names_beyond_the_end_do_not_crowd_out_the_way_past_damage(tmp_path) -> None:
    store = MemoryStore()
    states = published(store, 9)
    compact(store, tmp_path, every=4, levels=1, anchor_every=4)
    store.put(KEYS.record(5), b"damage")
    for number in range(MAX_READ):
        store.put(KEYS.fold(Span(-1, 10**9 + number)), b"rubbish")
    assert pulled(store, states) == [(-1, 8), (8, 9)]


def test_the_newest_version_is_bounded_by_the_newest_record_that_is_sound() -> None:
    store = MemoryStore()
    log = Log(store, KEYS)
    assert newest_version(log) == COUNT_MAX
    published(store, 4)
    assert newest_version(log) == 4
    store.put(KEYS.record(log.places()[-1]), b"damage")
    assert newest_version(log) == 4


# Keys


def test_a_compactor_without_the_key_of_a_signed_run_is_refused(tmp_path) -> None:
    store = MemoryStore()
    states = published(store, 8, key=KEY)
    with pytest.raises(ConflictError, match="is signed"):
        compact(store, tmp_path / "a", every=4, levels=1)
    assert spans_of(store) == []
    assert compact(store, tmp_path / "b", every=4, levels=1, key=KEY) == [(0, 4), (4, 8)]
    source = publisher(store, key=KEY, keep=1000)
    for state in states[:4]:
        source.publish(state)
    with pytest.raises(ConflictError, match="is signed"):
        compact(store, tmp_path / "b", every=4, levels=1)
    assert spans_of(store) == [(0, 4), (4, 8)]
