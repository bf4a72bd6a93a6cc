"""What readers tell of themselves: never in the way of an install, and told as it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

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

from gymfast.errors import FormatError, NotFoundError, StoreError
from gymfast.stores import MemoryStore, open_store
from gymfast.stores.store_server import StoreServer
from gymfast.sync import State, SubscriberStatus, collect
from gymfast.sync.cleaner import DAY_US
from gymfast.sync.fleet import Fleet, FleetWatch, ReaderRow
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import FORMAT, MAX_OBJECT_BYTES, MAX_STATUS_BYTES, StatusRecord, encode
from gymfast.sync.reader_status import (
    StatusReporter,
    period_s,
    printable,
    read_statuses,
    reader_name,
)
from gymfast.sync.relay import RelayCache, is_of_reader

KEYS = RunKeys(RUN)
LIMIT_S = 60.0
NOW_US = 1_700_000_000_000_000


def wait_for(holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def record(reader: str = "a", **fields: object) -> StatusRecord:
    given = {
        "state": "clean",
        "version": 3,
        "root": "0123456789abcdef",
        "newest": 3,
        "installed_us": NOW_US,
        "updated_us": NOW_US,
        "period_us": 30_000_000,
        "is_stale": False,
        "error": "",
    }
    return StatusRecord(FORMAT, RUN, reader, **(given | fields))


def put(store: MemoryStore, *records: StatusRecord) -> MemoryStore:
    for each in records:
        store.put(KEYS.status(each.reader), encode(each))
    return store


def clock_at(us: int) -> ManualClock:
    clock = ManualClock()
    clock.wall_offset_s = us / 1e6 - clock.now_s
    return clock


def rows(store: MemoryStore, newest: int | None = 3, us: int = NOW_US) -> list[ReaderRow]:
    return list(FleetWatch(store, RUN, clock_at(us)).look(newest).readers)


def statuses(store: MemoryStore) -> list[StatusRecord]:
    return [s for _, s in read_statuses(store, KEYS) if isinstance(s, StatusRecord)]


def test_a_reader_tells_each_install_and_its_last_error() -> None:
    store, states = MemoryStore(), history(3)
    source, live = publisher(store), zeros_like(states[0])
    source.publish(states[0])
    with reader(store, live, reader_id="a", report_s=1000.0) as subscriber:
        subscriber.pull()
        wait_for(lambda: statuses(store) and statuses(store)[0].version == 0)
        (told,) = statuses(store)
        assert (told.reader, told.state, told.root) == ("a", "clean", subscriber.root[:16])
        source.publish(states[1])
        with pytest.raises(NotFoundError):
            subscriber.pull(9)
        wait_for(lambda: "version 9 is not published" in statuses(store)[0].error)
        subscriber.pull()
        wait_for(lambda: statuses(store)[0].version == 1 and not statuses(store)[0].error)
        assert_same(live, states[1])
    assert statuses(store) == [], "a reader that ends takes its status away"


def test_no_status_is_written_unless_it_is_asked_for() -> None:
    store, states = MemoryStore(), history(1)
    publisher(store).publish(states[0])
    before = set(threading.enumerate())  # other tests may have left some
    with reader(store, zeros_like(states[0])) as subscriber:
        subscriber.pull()
        assert not [t for t in set(threading.enumerate()) - before if t.name == "gymfast-status"]
    assert list(store.list(KEYS.status_prefix)) == []


def test_a_store_that_cannot_be_written_holds_no_install_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner, states = MemoryStore(), history(3)
    source, live = publisher(inner), zeros_like(states[0])
    store = FaultyStore(inner)
    tries: list[str] = []

    def fault(_: int, operation: str, key: str) -> str:
        is_status = key.startswith(KEYS.status_prefix)
        tries.extend([operation] * is_status)
        return "before" if is_status else ""

    store.arm(fault)
    with reader(store, live, reader_id="a", report_s=0.01) as subscriber:
        for state in states:
            source.publish(state)
            subscriber.pull()
            assert_same(live, state)
        wait_for(lambda: len(tries) > 5)
    said = [r for r in caplog.records if "is not told" in r.message]
    assert len(said) == 1, "a store that goes on failing is told once"


def test_a_store_that_hangs_holds_no_install_up() -> None:
    inner, states = MemoryStore(), history(2)
    source, live = publisher(inner), zeros_like(states[0])
    store, is_hanging, goes_on = FaultyStore(inner), threading.Event(), threading.Event()

    def fault(_: int, operation: str, key: str) -> str:
        if key.startswith(KEYS.status_prefix):
            is_hanging.set()
            goes_on.wait(LIMIT_S)
        return ""

    store.arm(fault)
    subscriber = reader(store, live, reader_id="a", report_s=1000.0)
    for state in states:
        source.publish(state)
        subscriber.pull()
        assert is_hanging.wait(LIMIT_S) and not goes_on.is_set()
    assert_same(live, states[-1])
    goes_on.set()
    subscriber.close()


def test_a_status_is_written_again_and_again() -> None:
    store = MemoryStore()
    reporter = StatusReporter(store, KEYS, "a", period_s=0.01)
    reporter.tell(SubscriberStatus(RUN, State.CLEAN, 1, 1, False, 0.0), "ab" * 32)
    wait_for(lambda: statuses(store))
    first = statuses(store)[0]
    wait_for(lambda: statuses(store)[0].updated_us > first.updated_us)
    assert statuses(store)[0].installed_us == first.installed_us
    reporter.close()
    reporter.close()


def test_only_what_people_wait_for_is_written_at_once() -> None:
    store = FaultyStore(MemoryStore())
    reporter = StatusReporter(store, KEYS, "a", period_s=1000.0)
    for newest in range(5):
        reporter.tell(SubscriberStatus(RUN, State.CLEAN, 1, newest, False, 0.0), "ab" * 32)
        wait_for(lambda: store.calls)
    reporter.tell(SubscriberStatus(RUN, State.CLEAN, 2, 9, False, 0.0), "cd" * 32)
    wait_for(lambda: statuses(store.inner) and statuses(store.inner)[0].version == 2)
    assert [call for call, _ in store.calls].count("put") == 2
    reporter.close()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../a", "a b", "x" * 129, "é"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="reader"):
        StatusReporter(MemoryStore(), KEYS, name)
    with pytest.raises(ValueError, match="period"):
        StatusReporter(MemoryStore(), KEYS, "a", period_s=0.0)


@pytest.mark.parametrize(
    ("text", "expected"), [("", 30.0), ("0", None), ("0.0", None), ("7.5", 7.5)]
)
def test_the_period_is_a_setting(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: float | None
) -> None:
    monkeypatch.setenv("GYMFAST_REPORT_S", text)
    assert period_s() == expected


@pytest.mark.parametrize("text", ["often", "-1", "nan", "inf"])
def test_a_period_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GYMFAST_REPORT_S", text)
    with pytest.raises(ValueError, match="expected seconds"):
        period_s()


@pytest.mark.parametrize("host", ["engine-3", ".a/b c", "ü", "", "x" * 500])
def test_names_of_readers_are_names(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("GYMFAST_READER", host)
    name = reader_name()
    StatusReporter(MemoryStore(), KEYS, name)
    assert name != reader_name()
    assert host != "engine-3" or name.startswith("engine-3-")


def test_I84_a_status_shows_no_secret() -> None:
    text = (
        "put 's3://AKIA:hunter2@bucket/run' failed:\nAuthorization: Bearer abcdef, "
        "secret_access_key=hunter3&x-amz-signature=hunter4 token: hunter5 é\x1b[31m"
    )
    shown = printable(text)
    assert "hunter" not in shown and "abcdef" not in shown
    assert shown.isascii() and shown.isprintable() and "bucket/run" in shown
    assert len(printable("x" * 10_000)) == 256


def test_rows_say_how_far_a_reader_is() -> None:
    store = put(
        MemoryStore(),
        record("a"),
        record("b", version=1, error="the store is away", is_stale=True),
        record("c", state="inconsistent", version=-1, root=""),
        record("d", updated_us=NOW_US - 151_000_000),
        record("e", updated_us=NOW_US - 149_000_000),
    )
    a, b, c, d, e = rows(store)
    assert (a.version, a.lag, a.age_s, a.is_ready(3), a.is_ready(4)) == (3, 0, 0.0, True, False)
    assert (b.lag, b.error, b.is_ready()) == (2, "the store is away", False)
    assert (c.version, c.lag, c.is_ready()) == (None, None, False)
    assert (d.is_silent, d.is_ready()) == (True, False)
    assert (e.is_silent, e.is_ready()) == (False, True)


def test_a_fleet_is_ready_when_all_that_are_heard_of_are() -> None:
    def fleet(*records: StatusRecord) -> Fleet:
        return Fleet(RUN, 3, tuple(rows(put(MemoryStore(), *records))))

    assert not fleet().is_ready(None, None), "nobody is no fleet"
    assert fleet(record("a"), record("b")).is_ready(3, None)
    assert not fleet(record("a"), record("b", version=2)).is_ready(3, None)
    assert fleet(record("a"), record("b", version=2)).is_ready(3, 1)
    assert not fleet(record("a"), record("b", version=2)).is_ready(3, 2)
    assert fleet(record("a"), record("b", updated_us=0)).is_ready(3, None), "b is gone"


@pytest.mark.parametrize("skew_s", [-86_400.0, -3600.0, 0.0, 3600.0, 86_400.0])
def test_a_reader_that_writes_lives_whatever_its_clock_says(skew_s: float) -> None:
    store, clock = MemoryStore(), clock_at(NOW_US)
    fleet = FleetWatch(store, RUN, clock)
    silent = []
    for _ in range(20):
        put(store, record("a", updated_us=int(clock.wall_us() + skew_s * 1e6)))
        silent.append(fleet.look(3).readers[0].is_silent)
        clock.now_s += 30
    assert not any(silent[1:]), "two words tell that it lives"
    for _ in range(4):
        clock.now_s += 30
        last = fleet.look(3).readers[0]
    assert last.is_silent, "and then it does not write any more"
    assert last.age_s >= 0


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"{",
        b"\x80\x04.",
        b"[" * 100_000,
        b"x" * (MAX_STATUS_BYTES + 1),
        encode(record("a")) + b" ",
        encode(record("b")),
        encode(record("a")).replace(RUN.encode(), b"another"),
        encode(record("a")).replace(b'"clean"', b'"fine"'),
        encode(record("a")).replace(b'"clean"', b'"\\u001b[31m\\u202e"'),
        encode(record("a")).replace(b'"version":3', b'"version":-2'),
        encode(record("a")).replace(b'"error":""', b'"error":"\\u001b[31m"'),
    ],
)
def test_a_damaged_status_is_one_row(blob: bytes) -> None:
    store = put(MemoryStore(), record("z"))
    store.put(KEYS.status("a"), blob)
    damaged, sound = rows(store)
    assert (damaged.reader, damaged.state, damaged.is_ready()) == ("a", "damaged", False)
    assert KEYS.status("a") in damaged.error
    assert damaged.error.isascii() and damaged.error.isprintable()
    assert sound.is_ready(3)


def test_names_that_are_none_are_left_out_and_found_by_fsck() -> None:
    store = put(MemoryStore(), record("a"))
    publisher(store).publish(history(1)[0])
    store.put(f"{KEYS.status_prefix}a/b", encode(record("a")))
    store.put(f"{KEYS.status_prefix}{'x' * 150}", b"damaged")
    assert [row.state for row in rows(store)] == ["clean"]
    found = {f.key: f for f in fsck(store, RUN).findings}
    assert set(found) == {f"{KEYS.status_prefix}a/b", f"{KEYS.status_prefix}{'x' * 150}"}
    assert {f.severity for f in found.values()} == {"waste"}


def test_thousands_of_readers_are_read_and_no_more_than_a_limit() -> None:
    store = put(MemoryStore(), *(record(f"r{i:05d}") for i in range(3000)))
    assert len(rows(store)) == 3000
    assert len(list(read_statuses(store, KEYS, max_readers=100))) == 100


def test_a_reader_that_ends_meanwhile_is_left_out() -> None:
    store = FaultyStore(put(MemoryStore(), record("a"), record("b")))

    def fault(_: int, operation: str, key: str) -> str:
        if operation == "get" and key == KEYS.status("a"):
            store.inner.delete(key)
        return ""

    store.arm(fault)
    assert [row.reader for row in rows(store)] == ["b"]


def test_a_store_that_fails_is_an_error_of_the_store() -> None:
    store = FaultyStore(put(MemoryStore(), record("a")))
    store.arm(lambda number, operation, key: "before" if operation == "get" else "")
    with pytest.raises(StoreError):
        rows(store)


@pytest.mark.parametrize("is_dry", [True, False])
def test_gc_takes_what_nobody_writes_any_more(is_dry: bool) -> None:
    store = MemoryStore()
    source = publisher(store)
    source.publish(history(1)[0])
    put(
        store,
        record("old", updated_us=NOW_US - DAY_US),
        record("ahead", updated_us=NOW_US + DAY_US),
        record("young", updated_us=NOW_US - DAY_US + 1),
    )
    store.put(KEYS.status("damaged"), b"?")
    report = collect(store, RUN, keep=50, dry_run=is_dry, clock=clock_at(NOW_US))
    assert (report.num_statuses, report.failures) == (3, ())
    names = [key.rpartition("/")[2] for key in store.list(KEYS.status_prefix)]
    assert names == (["ahead", "damaged", "old", "young"] if is_dry else ["young"])


def test_a_publisher_does_not_read_what_readers_tell() -> None:
    store = FaultyStore(MemoryStore())
    source = publisher(store, keep=1, anchor_every=1)
    for state in history(4):
        source.publish(state)
    assert not [key for _, key in store.calls if key.startswith(KEYS.status_prefix)]


def test_a_relay_passes_statuses_on_and_keeps_what_it_knows() -> None:
    upstream = FaultyStore(MemoryStore())
    states = history(1)
    publisher(upstream.inner).publish(states[0])
    relay = RelayCache(upstream, max_bytes=MAX_OBJECT_BYTES, freshness_s=1000.0)
    with StoreServer("127.0.0.1", 0, relay, may_write=is_of_reader) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            live, store = zeros_like(states[0]), open_store(server.url)
            with reader(store, live, reader_id="a", report_s=1000.0) as subscriber:
                subscriber.pull()
                wait_for(lambda: [s.version for s in statuses(upstream.inner)] == [0])
                assert FleetWatch(store, RUN).look(0).readers[0].is_ready(0)
                store.get(KEYS.record(1), max_bytes=1 << 20)
                upstream.arm(None)
                put(store, record("b"))
                store.get(KEYS.record(1), max_bytes=1 << 20)
                names = [row.reader for row in FleetWatch(store, RUN).look(0).readers]
                assert names == ["a", "b"], "what was listed before is asked anew"
                assert ("get", KEYS.record(1)) not in upstream.calls
            assert [s.reader for s in statuses(upstream.inner)] == ["b"]
            with pytest.raises(StoreError, match="leases and statuses of readers only"):
                store.put(f"{RUN}/status", b"")
        finally:
            server.shutdown()
            thread.join()
            relay.close()


def test_readers_leave_nothing_behind() -> None:
    store, states = MemoryStore(), history(1)
    publisher(store).publish(states[0])
    num_threads, num_files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        with reader(store, zeros_like(states[0]), report_s=1000.0) as subscriber:
            subscriber.pull()
    assert threading.active_count() == num_threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_files + 1
    assert statuses(store) == []


def test_a_damaged_status_is_an_error_with_its_name() -> None:
    store = MemoryStore()
    store.put(KEYS.status("a"), b"?")
    ((key, error),) = read_statuses(store, KEYS)
    assert key == KEYS.status("a") and isinstance(error, FormatError) and key in str(error)
