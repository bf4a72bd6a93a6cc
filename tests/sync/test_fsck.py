"""fsck finds every kind of damage, tells it from waste, and says what heals it."""

from __future__ import annotations

import pytest
from sync.logs import RUN, LogBuilder, hex_of

from gymfast.errors import NotFoundError
from gymfast.stores.memory import MemoryStore
from gymfast.sync.fsck import FsckReport, fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import HintRecord, LeaseRecord, StateRecord, encode

KEYS = RunKeys(RUN)


def text_of(record: StateRecord) -> str:
    """The bytes of the one object of a record of LogBuilder: the text whose digest it names."""
    kind = getattr(record, "kind", "anchor")
    return f"{RUN} {kind} {record.version}"


def build(num_versions: int = 6, anchors: tuple[int, ...] = ()) -> tuple[MemoryStore, LogBuilder]:
    """A sound run: an epoch, the anchor of version 0, deltas, and anchors after some of them."""
    log = LogBuilder()
    log.epoch()
    log.version("anchor", len(f"{RUN} anchor 0"))
    for version in range(1, num_versions):
        log.version("delta", len(f"{RUN} delta {version}"))
        if version in anchors:
            log.anchor(len(f"{RUN} anchor {version}"))
    store = MemoryStore()
    for record in log.records:
        store.put(KEYS.record(record.seq), encode(record))
        if isinstance(record, StateRecord):
            (ref,) = record.frame.objects
            store.put(KEYS.object(record.epoch, ref.digest), text_of(record).encode())
    return store, log


def object_key(log: LogBuilder, version: int, kind: str = "delta") -> str:
    return KEYS.object(1, hex_of(f"{RUN} {kind} {version}"))


def record_key(log: LogBuilder, version: int) -> str:
    states = [r for r in log.records if isinstance(r, StateRecord) and r.version == version]
    return KEYS.record(states[0].seq)


def damage_of(report: FsckReport) -> list[str]:
    return [finding.key for finding in report.damage]


def flip(store: MemoryStore, key: str) -> None:
    blob = bytearray(store.get(key, max_bytes=1 << 20))
    blob[len(blob) // 2] ^= 1
    store.put(key, bytes(blob))


def test_a_sound_run_has_no_findings() -> None:
    store, _ = build(6, anchors=(3,))
    done = []
    report = fsck(store, RUN, advance=lambda *progress: done.append(progress))
    assert report.findings == ()
    assert (report.newest, report.restorable) == (5, 5)
    assert (report.num_records, report.num_objects) == (8, 7)
    assert done[-1] == (report.num_bytes, report.num_bytes)


def test_a_run_that_is_not_there_is_not_found() -> None:
    store, _ = build()
    with pytest.raises(NotFoundError, match="another"):
        fsck(store, "another")


@pytest.mark.parametrize("harm", ["flip", "cut", "delete"])
def test_a_bad_object_is_damage_and_its_versions_are_lost(harm: str) -> None:
    store, log = build()
    key = object_key(log, 3)
    if harm == "flip":
        flip(store, key)
    elif harm == "cut":
        store.put(key, store.get(key, max_bytes=100)[:-1])
    else:
        store.delete(key)
    report = fsck(store, RUN)
    assert damage_of(report) == [key]
    assert (report.newest, report.restorable) == (5, 2)
    assert "--anchor" in report.damage[0].repair


def test_without_reading_objects_a_flipped_bit_stays_unseen_and_a_cut_does_not() -> None:
    store, log = build()
    flip(store, object_key(log, 3))
    assert fsck(store, RUN, reads_objects=False).damage == ()
    store.put(object_key(log, 2), b"x")
    assert damage_of(fsck(store, RUN, reads_objects=False)) == [object_key(log, 2)]


def test_a_later_full_state_heals_a_bad_object() -> None:
    store, log = build(6, anchors=(4,))
    store.delete(object_key(log, 3))
    report = fsck(store, RUN)
    assert report.restorable == 5
    assert report.damage[0].repair == "readers go on with the full state of version 4"


def test_a_bad_anchor_with_its_chain_intact_loses_nothing() -> None:
    store, log = build(6, anchors=(4,))
    store.delete(object_key(log, 4, "anchor"))
    report = fsck(store, RUN)
    assert report.restorable == 5
    assert report.damage[0].repair.startswith("nothing is lost")


@pytest.mark.parametrize("harm", ["flip", "delete"])
def test_a_bad_record_breaks_the_chain_up_to_the_next_full_state(harm: str) -> None:
    for anchors, restorable in (((), 2), ((4,), 5)):
        store, log = build(6, anchors)
        if harm == "flip":
            flip(store, record_key(log, 3))
        else:
            store.delete(record_key(log, 3))
        report = fsck(store, RUN)
        assert damage_of(report) == [record_key(log, 3)]
        assert (report.newest, report.restorable) == (5, restorable)


def test_records_that_were_swapped_or_come_from_another_log_are_damage() -> None:
    store, log = build()
    other = LogBuilder()
    other.epoch("other")
    other.version("anchor")
    blob = encode(other.version().record)
    store.put(record_key(log, 1), blob)
    report = fsck(store, RUN)
    assert damage_of(report) == [record_key(log, 1)]
    assert "follows" in report.damage[0].problem
    store, log = build()
    one, two = record_key(log, 1), record_key(log, 2)
    first, second = (store.get(key, max_bytes=1 << 20) for key in (one, two))
    store.put(one, second)
    store.put(two, first)
    assert damage_of(fsck(store, RUN))[0] == one


def test_what_no_record_names_is_waste() -> None:
    store, _ = build()
    loose = KEYS.object(1, hex_of("loose"))
    store.put(loose, b"loose")
    strange = f"{RUN}/objects/readme"
    store.put(strange, b"hello")
    report = fsck(store, RUN)
    assert {f.key for f in report.findings} == {loose, strange}
    assert report.damage == ()
    assert report.restorable == 5


def test_records_before_the_floor_are_waste_and_those_of_epochs_belong_there() -> None:
    store, log = build(6, anchors=(3,))
    floor = next(r.seq for r in log.records if r.seq > 2 and not hasattr(r, "base_root"))
    store.put(KEYS.floor(floor), b"")
    report = fsck(store, RUN)
    assert report.damage == ()
    assert report.restorable == 5
    before = [r.seq for r in log.records if r.seq < floor and isinstance(r, StateRecord)]
    records = {f.key for f in report.findings if "/log/" in f.key}
    assert records == {KEYS.record(seq) for seq in before}
    for seq in before:
        store.delete(KEYS.record(seq))
    assert fsck(store, RUN).damage == ()


def test_leases_and_hints_are_checked() -> None:
    store, log = build()
    tip = log.tip
    good = LeaseRecord(1, RUN, "alive", tip.seq, 2**52)
    store.put(KEYS.reader("alive"), encode(good))
    store.put(KEYS.hint, encode(HintRecord(1, RUN, tip.seq, 5, tip.record, 1)))
    assert fsck(store, RUN).findings == ()
    store.put(KEYS.reader("dead"), encode(LeaseRecord(1, RUN, "dead", 1, 1)))
    store.put(KEYS.reader("broken"), b"{")
    store.put(KEYS.hint, encode(HintRecord(1, RUN, tip.seq, 5, hex_of("other"), 1)))
    report = fsck(store, RUN)
    found = {finding.key for finding in report.findings}
    assert found == {KEYS.reader("dead"), KEYS.reader("broken"), KEYS.hint}
    assert report.damage == ()


def test_damage_that_retention_deletes_meanwhile_is_no_damage() -> None:
    """Retention sets a floor and deletes while fsck walks: the floor is read again at the end."""
    store, log = build(6, anchors=(3,))
    floor = next(r.seq for r in log.records if r.seq > 2 and not hasattr(r, "base_root"))

    def retention(done: int, total: int) -> None:
        store.put(KEYS.floor(floor), b"")
        for record in log.records:
            if record.seq < floor and isinstance(record, StateRecord):
                (ref,) = record.frame.objects
                store.delete(KEYS.object(record.epoch, ref.digest))

    assert fsck(store, RUN, advance=retention).damage == ()
