"""Compactors: crashes, rivals, rights, damage, stores of all sorts (sync-protocol.md, 15)."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial

import pytest
from sync.folding import FOLDED_9, KEYS, SIZE, compact, published, pulled, spans_of
from sync.harness import (
    RUN,
    DelayedStore,
    FaultyStore,
    ManualClock,
    history,
    publisher,
)

from gymfast.errors import ConflictError, DeadlineError, FormatError, NotFoundError, StoreError
from gymfast.stores import FileStore, MemoryStore, open_store
from gymfast.sync import Compactor
from gymfast.sync.folds import parts, read_fold
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import Span
from gymfast.sync.log import Log
from gymfast.sync.status import read_status
from gymfast.testing.faults import PassThroughStore

pytestmark = pytest.mark.usefixtures("quick_disk")


# Compactors that fail


class _Killed(BaseException):
    """kill -9 of the compactor; nothing that it does afterwards reaches the store."""


@pytest.mark.parametrize("extent", ["sample", pytest.param("all", marks=pytest.mark.long)])
def test_a_compactor_that_is_killed_at_any_call_of_the_store_is_harmless(extent, tmp_path):
    plain = MemoryStore()
    states = published(plain, 5)
    blobs = {key: plain.get(key, max_bytes=1 << 30) for key in plain.list("")}

    class Mortal(FaultyStore):
        def _do(self, operation, key, call):
            self.calls.append((operation, key))
            how = self.fault(len(self.calls)) if self.fault else ""
            if how == "dead":
                raise _Killed
            result = call()
            if how == "after":
                raise _Killed
            return result

    def world() -> Mortal:
        inner = MemoryStore()
        for key, blob in blobs.items():
            inner.put(key, blob)
        return Mortal(inner)

    def fault_at(number: int, how: str, n: int) -> str:
        is_dead = n > number or (n == number and how == "before")
        return "dead" if is_dead else "after" if n == number else ""

    whole = world()
    options = {"anchor_every": 4, "object_bytes": 30_000}
    assert len(compact(whole, tmp_path / "whole", **options)) == 4
    finished = {key for key in whole.inner.list("") if "/fold" in key}
    calls = list(enumerate(whole.calls, 1))
    if extent == "sample":
        calls = [(i, c) for i, c in calls if c[0] in ("put", "create") and "/fold" in c[1]][::3]
    for number, _ in calls:
        for how in ("before", "after"):
            store, folder = world(), tmp_path / f"{number}{how}"
            store.fault = partial(fault_at, number, how)
            with suppress(_Killed):
                compact(store, folder, **options)
            store.fault = None
            assert not fsck(store, RUN, reads_objects=False).damage
            pulled(store, states)
            compact(store, folder, **options)
            assert {key for key in store.inner.list("") if "/fold" in key} == finished
            pulled(store, states)


@pytest.mark.ci
@pytest.mark.parametrize("has_create_only", [True, False])
def test_two_compactors_at_once_leave_one_fold_of_each_span(has_create_only, tmp_path):
    store = FileStore(tmp_path / "store")
    states = published(store, 17)
    errors: list[BaseException] = []

    class Plain(PassThroughStore):
        pass

    def run(name: str, object_bytes: int) -> None:
        mine = Plain(store)
        mine.has_create_only = has_create_only
        try:
            compact(mine, tmp_path / name, object_bytes=object_bytes, anchor_every=8)
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(f"{size}", size)) for size in (10_000, 17_000, 1 << 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(pulled(store, states)) < 8  # which frames depends on whose objects are larger
    report = fsck(store, RUN)
    assert not report.damage
    if has_create_only:
        assert report.findings == ()


def test_two_compactors_do_not_share_a_folder(tmp_path):
    store = MemoryStore()
    published(store, 2)
    with (
        Compactor(store, RUN, tmp_path / "folds"),
        pytest.raises(ConflictError, match="followed by another process"),
    ):
        Compactor(store, RUN, tmp_path / "folds")
    Compactor(store, RUN, tmp_path / "folds").close()


@pytest.mark.ci
def test_a_compactor_without_rights_says_so_and_harms_nobody(tmp_path):
    store = FaultyStore(MemoryStore())
    states = published(store, 9)

    class ReadOnly(PassThroughStore):
        def put(self, key, data):
            raise StoreError(f"put '{key}': AccessDenied 403")

        create = put

    with pytest.raises(StoreError, match="AccessDenied"):
        compact(ReadOnly(store), tmp_path / "folds")
    assert spans_of(store) == []
    assert len(pulled(store, states)) == 10
    assert compact(store, tmp_path / "folds")[0] == (0, 2)  # nothing was lost of its place


def test_a_compactor_of_a_run_that_is_not_there_says_so(tmp_path):
    with pytest.raises(NotFoundError, match="no version yet"):
        compact(MemoryStore(), tmp_path / "folds")


@pytest.mark.ci
def test_a_compactor_that_retention_overtook_goes_on_later(tmp_path):
    store = MemoryStore()
    states = history(20, num_tensors=2, size=SIZE)
    source = publisher(store, keep=3, anchor_every=3)
    for state in states[:5]:
        source.publish(state)
    assert compact(store, tmp_path / "folds", levels=1)
    for state in states[5:]:
        source.publish(state)
    made = compact(store, tmp_path / "folds", levels=1)
    assert made[-1] == (18, 20)
    pulled(store, states)
    assert not fsck(store, RUN).damage


@pytest.mark.ci
def test_damaged_checkpoints_of_a_compactor_heal(tmp_path):
    store = MemoryStore()
    states = history(12, num_tensors=2, size=SIZE)
    source = publisher(store, keep=1000)
    for state in states[:8]:
        source.publish(state)
    compact(store, tmp_path / "folds")
    for name in ("head", "base-2", "base-4"):
        (path,) = (tmp_path / "folds" / name).glob("*.safetensors")
        blob = bytearray(path.read_bytes())
        blob[-5] ^= 1
        path.write_bytes(blob)
    assert compact(store, tmp_path / "folds") == []  # but they are at version 6 again
    for state in states[8:]:
        source.publish(state)
    assert compact(store, tmp_path / "folds") == [(6, 8), (8, 10), (10, 12), (8, 12)]
    assert pulled(store, states)[-1] == (8, 12)


def test_a_fold_that_a_compactor_cannot_install_itself_is_taken_back(tmp_path):
    store = MemoryStore()
    states = published(store, 9)
    with Compactor(store, RUN, tmp_path / "folds", every=4, levels=1, threads=1) as compactor:
        target = compactor._bases[4]._installer._target
        write = target.write

        def failing(frames, is_known):
            if any(frame.step.is_fold for frame in frames):
                raise FormatError("the frame is wrong", 60)
            return write(frames, is_known=is_known)

        target.write = failing
        with pytest.raises(FormatError, match="frame is wrong"):
            list(compactor.work())
    assert spans_of(store) == []
    assert len(pulled(store, states)) == 10


# Stores


def test_a_store_that_shows_folds_late_is_followed_without_them(tmp_path):
    clock = ManualClock()
    inner = MemoryStore()
    states = published(inner, 9, clock=clock)
    delays = {"/folds/": 0.0, "/folded/": 50.0}

    def delay_of(key: str) -> float:
        return next((s for part, s in delays.items() if part in key), 0.0)

    store = DelayedStore(inner, clock, delay_of)
    compact(inner, tmp_path / "folds", clock=clock)
    for _, key in list(parts(Log(inner, KEYS))):
        store.put(key, inner.get(key, max_bytes=1 << 30))
        store._before[key] = None
    assert pulled(store, states, clock=clock) == [(-1, 0), *((v, v + 1) for v in range(9))]
    clock.sleep(60.0)
    assert pulled(store, states, clock=clock) == [(-1, 0), *FOLDED_9]


def test_a_compactor_waits_until_its_objects_are_shown(tmp_path):
    clock = ManualClock()
    inner = MemoryStore()
    states = published(inner, 4, clock=clock)
    store = DelayedStore(inner, clock, lambda key: 3.0 if "/folded/" in key else 0.0)
    began_s = clock.monotonic_s()
    compact(store, tmp_path / "folds", clock=clock, levels=1)
    assert clock.monotonic_s() > began_s
    assert pulled(store, states, clock=clock) == [(-1, 0), (0, 2), (2, 4)]
    inner = MemoryStore()
    published(inner, 4, clock=clock)
    never = DelayedStore(inner, clock, lambda key: 1e6 if "/folded/" in key else 0.0)
    with pytest.raises(DeadlineError, match="objects of fold"):
        compact(never, tmp_path / "never", clock=clock, levels=1)
    assert spans_of(inner) == []


@pytest.mark.ci
def test_a_run_with_a_single_writer_has_folds_too(tmp_path):
    store = MemoryStore()
    store.has_create_only = False
    states = published(store, 9, single_writer=True)
    assert compact(store, tmp_path / "folds")
    assert compact(store, tmp_path / "other") == []
    assert pulled(store, states) == [(-1, 0), *FOLDED_9]


@pytest.mark.ci
def test_a_relay_serves_folds_and_fetches_each_once(tmp_path):
    from sync.test_relay import CountingStore, relaying

    inner = MemoryStore()
    states = published(inner, 9)
    compact(inner, tmp_path / "folds")
    upstream = CountingStore(inner)
    with relaying(upstream) as server:
        for _ in range(2):
            assert pulled(open_store(server.url), states) == [(-1, 0), *FOLDED_9]
        folded = {key: n for key, n in upstream.num_bytes.items() if "/folded/" in key}
        with pytest.raises(StoreError, match="publish to"):
            compact(open_store(server.url), tmp_path / "other", every=3)
    spans_read = {key.split("/")[2] for key in folded}
    assert spans_read == {str(Span(0, 4)), str(Span(4, 8))}
    assert all(n == inner.size(key) for key, n in folded.items())


# Reports


def test_status_shows_folds(tmp_path):
    store = MemoryStore()
    published(store, 9)
    before = read_status(store, RUN)
    assert before.folds == ()
    compact(store, tmp_path / "folds", anchor_every=8)
    store.put(KEYS.fold(Span(1, 3)), b"{}")
    status = read_status(store, RUN)
    assert len(status.folds) == 7
    assert status.stored_bytes - before.stored_bytes == sum(f.frame_bytes for f in status.folds)
    assert status.folds[0].base_version == -1


def test_fsck_names_what_is_wrong_below_the_names_of_folds(tmp_path):
    store = MemoryStore()
    published(store, 4)
    compact(store, tmp_path / "folds", levels=1)
    store.put(f"{KEYS.folds_prefix}x", b"?")
    store.put(f"{KEYS.folded_prefix}x/y", b"?")
    store.put(KEYS.of(read_fold(Log(store, KEYS), Span(0, 2))).object(0, "0" * 64), b"?")
    found = {f.key.split("/", 2)[2]: f.problem for f in fsck(store, RUN).findings}
    assert found == {
        "x": "gymfast gives no fold this name",
        "x/y": "gymfast gives no object this name",
        f"{Span(0, 2)}/{'0' * 64}": "its fold does not name it",
    }


def test_settings_out_of_range_are_refused(tmp_path):
    for options in ({"every": 1}, {"levels": 0}, {"every": 4, "anchor_every": 6}):
        with pytest.raises(ValueError, match="expected"):
            Compactor(MemoryStore(), RUN, tmp_path, **options)
