"""One object of rubbish under a run stops nobody, and fsck names it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sync.harness import (
    RUN,
    FaultyStore,
    ManualClock,
    assert_same,
    history,
    publisher,
    reader,
    zeros_like,
)

from gymfast.errors import ConflictError, FormatError, StoreError
from gymfast.stores import MemoryStore
from gymfast.sync import collect
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import MAX_GAP, Log
from gymfast.sync.manifest import (
    FORMAT,
    MAX_RECORD_BYTES,
    MAX_SMALL_RECORD_BYTES,
    NUMBER_LIMIT,
    EpochRecord,
    LeaseRecord,
    encode,
    sign,
)
from gymfast.sync.status import read_status
from gymfast.sync.view import GAP_PATIENCE_S

KEYS = RunKeys(RUN)
LONG_RECORD = b"x" * (MAX_RECORD_BYTES + 1)
LONG_LEASE = b"x" * (MAX_SMALL_RECORD_BYTES + 1)
FAR = (2**53 - 1, 2**53, 10**20 - 1, MAX_GAP + 100)
FOREIGN = encode(EpochRecord(FORMAT, "other", 1, 1000, "0" * 32, "", 1, "host"))


def rubbish() -> Iterator[tuple[str, bytes]]:
    """Keys that are in nobody's way, and what lies there."""
    for seq in FAR:
        yield f"log/{seq:020d}", b"junk"
        yield f"floors/{seq:020d}", b""
        yield f"objects/{seq:020d}/{'0' * 64}", b"junk"
    yield f"log/{2**53 - 1:020d}", LONG_RECORD
    yield f"log/{2**53 - 1:020d}", FOREIGN
    for name in ("readme", "7", f"{0:020d}", f"copy/{3:020d}", f"{-5:020d}", "9" * 60):
        yield f"log/{name}", b"junk"
        yield f"floors/{name}", b"junk"
        yield f"readers/{name}", b"junk"
        yield f"objects/{name}", b"junk"
    yield f"objects/copy/{1:020d}/{'0' * 64}", b"junk"
    yield "readers/x", LONG_LEASE
    yield "readers/y", encode(LeaseRecord(FORMAT, "other", "y", 1, 2**53 - 1))
    yield "hint", b"junk"
    yield "hint", LONG_LEASE
    yield "hint/x", b"junk"
    yield "tmp/x/y", b"junk"


@pytest.mark.parametrize(("name", "blob"), [*rubbish()], ids=lambda x: str(x[:60]))
def test_a_run_goes_on_beside_rubbish_and_fsck_names_it(name: str, blob: bytes) -> None:
    store, clock, states = MemoryStore(), ManualClock(), history(9)
    options = {"clock": clock, "keep": 2, "anchor_every": 2}
    source = publisher(store, **options)
    for weights in states[:3]:
        source.publish(weights)
    key = f"{RUN}/{name}"
    store.put(key, blob)
    (finding,) = (f for f in fsck(store, RUN).findings if f.key == key)
    assert finding.severity == "waste"
    assert finding.repair
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock)
    assert follower.pull().version == 2
    for version, weights in enumerate(states[3:6], 3):
        source.publish(weights)
        assert follower.pull().version == version
        assert_same(live, weights)
    source = publisher(store, **options)
    for version, weights in enumerate(states[6:], 6):
        assert source.publish(weights).version == version
        clock.now_s += GAP_PATIENCE_S + 1
        assert follower.pull().version == version
        assert_same(live, weights)
    collect(store, RUN, keep=1, clock=clock)
    assert read_status(store, RUN).versions[-1].version == 9
    fresh = zeros_like(states[0])
    reader(store, fresh, clock=clock).pull()
    assert_same(fresh, states[9])
    report = fsck(store, RUN)
    assert not report.damage
    assert report.restorable == 9
    is_replaced = name == "hint"
    assert is_replaced or key in [f.key for f in report.findings]


@pytest.mark.parametrize("blob", [b"junk", LONG_RECORD, FOREIGN])
@pytest.mark.parametrize("distance", [1, 2, 1000])
def test_a_new_publisher_and_readers_pass_rubbish_after_the_end(distance: int, blob: bytes) -> None:
    store, clock, states = MemoryStore(), ManualClock(), history(4)
    source = publisher(store, clock=clock)
    for weights in states[:3]:
        source.publish(weights)
    live = zeros_like(states[0])
    follower = reader(store, live, clock=clock)
    follower.pull()
    key = KEYS.record(4 + distance)
    store.put(key, blob)
    assert follower.poll() == 2
    report = fsck(store, RUN)
    assert report.restorable == 2
    assert key in [f.key for f in report.damage]
    assert len(report.damage) <= 2, "a gap is one finding"
    again = publisher(store, clock=clock)
    again.publish(states[3])
    follower.poll()
    clock.now_s += GAP_PATIENCE_S + 1
    report = follower.pull()
    assert report.kind == "anchor"
    assert_same(live, states[3])
    again.publish(states[4])
    assert follower.pull().kind == "deltas"
    assert_same(live, states[4])


def test_a_record_of_another_run_does_not_make_objects_under_way_old() -> None:
    """Its epoch, 1000, would: gc deletes what older epochs than the newest left."""
    store, states = MemoryStore(), history(2)
    source = publisher(store)
    source.publish(states[0])
    store.put(KEYS.record(1000), FOREIGN)
    store.put(KEYS.object(1, "0" * 64), b"under way")
    assert collect(store, RUN, keep=1).num_objects == 0
    assert store.size(KEYS.object(1, "0" * 64))


def test_a_mark_counts_where_its_record_or_a_later_one_is_there() -> None:
    store, states = MemoryStore(), history(3)
    source = publisher(store)
    for weights in states:
        source.publish(weights)
    log = Log(store, KEYS)
    store.put(KEYS.floor(4), b"")
    assert log.floor() == 4
    store.delete(KEYS.record(4))
    assert log.floor() == 4
    store.put(KEYS.floor(6), b"")
    assert log.floor() == 4
    assert log.floor(6) == 6


def test_a_record_that_is_too_long_is_damage_and_a_store_that_fails_is_not() -> None:
    inner = MemoryStore()
    publisher(inner)
    store = FaultyStore(inner)
    log = Log(store, KEYS)
    store.put(KEYS.record(2), LONG_RECORD)
    with pytest.raises(
        FormatError, match=f"{KEYS.record(2)}.* has {len(LONG_RECORD)} bytes"
    ) as error:
        log.read(2)
    assert error.value.number == NUMBER_LIMIT
    store.arm(lambda number, operation, key: "before" if operation == "get" else "")
    with pytest.raises(StoreError, match="injected"):
        log.read(1)


@pytest.mark.parametrize("blob", [b"junk", b"", LONG_RECORD, FOREIGN])
@pytest.mark.parametrize("is_publisher", [True, False])
def test_retention_removes_a_damaged_record_below_the_floor(
    is_publisher: bool, blob: bytes
) -> None:
    """As fsck says. An epoch record that is damaged goes too: the floor fences as well."""
    store, states = MemoryStore(), history(6)
    source = publisher(store, anchor_every=2, keep=50)
    for weights in states:
        source.publish(weights)
    for place in (1, 3):
        store.put(KEYS.record(place), blob)
    if is_publisher:
        source = publisher(store, keep=1)
        source.publish(states[5])
    else:
        report = collect(store, RUN, keep=1, dry_run=True)
        assert {1, 3} <= set(report.records)
        assert store.size(KEYS.record(1)) == len(blob)
        store.put(KEYS.floor(6), b"")
        waste = {f.key: f.repair for f in fsck(store, RUN).findings}
        assert "sync gc" in waste[KEYS.record(3)]
        collect(store, RUN, keep=1)
    for place in (1, 3):
        assert KEYS.record(place) not in store.list(KEYS.log_prefix)
    report = fsck(store, RUN)
    assert not report.damage
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[5 if is_publisher else 6])


def test_retention_leaves_records_that_another_key_signed() -> None:
    store, states = MemoryStore(), history(4)
    source = publisher(store)
    for weights in states[:3]:
        source.publish(weights)
    key = b"0123456789abcdef"
    assert list(Log(store, KEYS).read_all()[0]) == [1, 2, 3, 4]
    with pytest.raises(FormatError, match="none of its 4 records is signed with this key"):
        collect(store, RUN, keep=1, key=key)
    ours = sign(Log(store, KEYS).read(4)[0], key)
    store.put(KEYS.record(4), encode(ours))
    assert Log(store, KEYS, key).read_all() == ({4: ours}, frozenset())
    collect(store, RUN, keep=1, key=key)
    assert list(Log(store, KEYS).read_all()[0]) == [1, 2, 3, 4]


def test_a_publisher_whose_place_a_damaged_epoch_record_had_is_fenced_by_the_floor() -> None:
    """Retention removes the damaged record of the take-over: the floor mark fences alone."""
    store, states = MemoryStore(), history(8)
    old = publisher(store)
    old.publish(states[0])
    new = publisher(store, keep=1, anchor_every=2)
    store.put(KEYS.record(3), b"junk")
    for weights in states[1:6]:
        new.publish(weights, anchor=True)
    newest = publisher(store, keep=1)
    newest.publish(states[6])
    assert KEYS.record(3) not in store.list(KEYS.log_prefix)
    with pytest.raises(ConflictError, match="fenced"):
        old.publish(states[7])
    with pytest.raises(ConflictError, match="fenced"):
        old.publish(states[7])
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[6])


@pytest.mark.parametrize("is_publisher", [True, False])
def test_what_a_killed_test_of_the_store_left_goes_a_day_later(is_publisher: bool) -> None:
    store, clock, states = FaultyStore(MemoryStore()), ManualClock(), history(2)
    store.arm(lambda _, operation, key: "before" if operation == "delete" else "")
    with pytest.raises(StoreError, match="injected: delete"):
        publisher(store, clock=clock)
    store.arm(None)
    left = set(store.list(KEYS.probe_prefix))
    junk = f"{KEYS.probe_prefix}junk"
    store.put(junk, b"")
    assert left
    source = publisher(store, clock=clock, keep=1)
    source.publish(states[0])
    collect(store, RUN, keep=1, clock=clock)
    assert left < set(store.list(KEYS.probe_prefix)), "it may be of a publisher that starts now"
    waste = {f.key: f.repair for f in fsck(store, RUN).findings}
    assert all("sync gc" in waste[key] for key in left)
    assert "by hand" in waste[junk]
    clock.now_s += 86_401
    if is_publisher:
        publisher(store, clock=clock, keep=1).publish(states[1])
    else:
        assert collect(store, RUN, keep=1, clock=clock, dry_run=True).num_probes == len(left)
        assert left < set(store.list(KEYS.probe_prefix))
        assert collect(store, RUN, keep=1, clock=clock).num_probes == len(left)
    assert list(store.list(KEYS.probe_prefix)) == [junk]
