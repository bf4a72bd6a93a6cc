"""What retention may delete (sync-protocol.md section 9)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync.logs import RUN, LogBuilder, logs, sample_log

from gymfast.sync.chain import enter, follow, is_full, plan
from gymfast.sync.manifest import EpochRecord, LeaseRecord, StateRecord, digest_of, encode
from gymfast.sync.retention import Deletion, deletion, floor_of, limited, lowest_lease


def objects_of(log: LogBuilder) -> list[tuple[int, str]]:
    return [
        (record.epoch, ref.digest)
        for record in log.records
        if isinstance(record, StateRecord)
        for ref in record.frame.objects
    ]


def remaining(log: LogBuilder, found: Deletion) -> list:
    return [e for e in log.entries if e.record.seq not in found.records]


def lease(seq: int, expires_us: int = 100) -> LeaseRecord:
    return LeaseRecord(1, RUN, "reader", seq, expires_us)


def test_the_floor_is_a_full_state_that_reaches_the_kept_versions():
    log = sample_log(10, anchors=(3, 6, 9))
    versions = {r.seq: r.version for r in log.records if isinstance(r, StateRecord)}
    floors = [versions[floor_of(log.records, keep)] for keep in (1, 2, 3, 5, 6, 8, 11)]
    assert floors == [9, 9, 6, 6, 3, 3, 0]


def test_nothing_is_deleted_where_no_full_state_is_old_enough():
    log = sample_log(10, anchors=(9,))
    records = [r for r in log.records if r.seq > 2]
    assert floor_of(records, 5) == 0
    assert floor_of([], 1) == 0
    assert floor_of([sample_log(0).records[0]], 1) == 0


def test_keep_is_at_least_one():
    with pytest.raises(ValueError, match="at least 1"):
        floor_of([], 0)


def test_a_lease_counts_until_its_grace_is_over():
    leases = [lease(7, 100), lease(3, 50)]
    assert lowest_lease(leases, now_us=0, grace_us=0) == 3
    assert lowest_lease(leases, now_us=50, grace_us=0) == 7
    assert lowest_lease(leases, now_us=50, grace_us=10) == 3
    assert lowest_lease(leases, now_us=100, grace_us=0) is None
    assert limited(5, None) == 5
    assert limited(5, 3) == 3
    assert limited(5, 9) == 5


def test_records_before_the_floor_go_except_those_of_epochs():
    log = sample_log(6, anchors=(4,))
    log.epoch()
    log.version()
    floor = floor_of(log.records, 1)
    found = deletion({r.seq: r for r in log.records}, objects_of(log), floor, 2, is_owner=True)
    left = [e.record for e in remaining(log, found)]
    assert isinstance(left[0], EpochRecord)
    assert left[1].seq == floor
    assert is_full(left[1])


def test_objects_of_a_commit_in_flight_are_kept_unless_their_publisher_asks():
    log = sample_log(2)
    log.epoch()
    records = {r.seq: r for r in log.records}
    stored = [*objects_of(log), (1, "old"), (2, "in flight"), (3, "of a successor")]
    assert deletion(records, stored, 0, 2, is_owner=False).objects == ((1, "old"),)
    assert deletion(records, stored, 0, 2, is_owner=True).objects == ((1, "old"), (2, "in flight"))


@given(logs(), st.integers(1, 8), st.integers(0, 20), st.booleans())
def test_i26_what_stays_is_an_anchor_and_a_complete_chain(log, keep, lease_seq, is_owner):
    held = lease_seq or None
    floor = limited(floor_of(log.records, keep), held)
    newest_epoch = log.tip.epoch
    stored = [*objects_of(log), (1, "loose")]
    found = deletion(
        {r.seq: r for r in log.records}, stored, floor, newest_epoch, is_owner=is_owner
    )
    stays = remaining(log, found)
    kept_objects = set(stored) - set(found.objects)
    for entry in stays:
        if isinstance(entry.record, StateRecord) and entry.record.seq >= floor:
            for ref in entry.record.frame.objects:
                assert (entry.record.epoch, ref.digest) in kept_objects
    if held:
        assert all(e in stays for e in log.entries if e.record.seq >= min(held, floor or held))
    newest = log.tip.version
    policy_floor = floor_of(log.records, keep)
    chain = [e for e in stays if e.record.seq >= policy_floor]
    if policy_floor:
        first = enter(chain[0].record, chain[0].tip.record, RUN)
        tip = first.tip
        for entry in chain[1:]:
            tip = follow(tip, entry.record, digest_of(encode(entry.record)), RUN).tip
        assert tip == log.tip
        for version in range(max(first.tip.version, newest - keep + 1), newest + 1):
            assert plan(chain, None, version).end.version == version
