"""Chain rules, plans and the states of a target (sync-protocol.md sections 4, 7, 8)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sync.logs import LogBuilder, changed, hex_of, logs, sample_log

from gymfast.errors import ChainError, NotFoundError
from gymfast.sync.chain import EMPTY_ROOT, Costs, Entry, Plan, Tip, enter, follow, is_full, plan
from gymfast.sync.machine import TRANSITIONS, Event, State, after, is_serving
from gymfast.sync.manifest import EpochRecord, digest_of, encode

CHEAP = Costs(request_bytes=0)


def check(log: LogBuilder, record, tip: Tip | None = None) -> Entry:
    return follow(log.tip if tip is None else tip, record, digest_of(encode(record)), log.run)


# Chain rules


def test_c1_a_record_of_another_run_is_refused():
    log = sample_log()
    with pytest.raises(ChainError, match="belongs to run 'run-b'"):
        check(log, changed(log.version_record(), run="run-b"))


def test_c2_a_record_in_another_place_is_refused():
    log = sample_log()
    for seq in (log.tip.seq, log.tip.seq + 2):
        with pytest.raises(ChainError, match="moved or mixed"):
            check(log, changed(log.version_record(), seq=seq))


def test_c3_a_record_that_follows_another_one_is_refused():
    log = sample_log()
    for previous in ("", hex_of("other")):
        with pytest.raises(ChainError, match="replaced or rolled back"):
            check(log, changed(log.version_record(), previous=previous))


def test_c4_the_first_record_is_epoch_1():
    log = LogBuilder()
    with pytest.raises(ChainError, match="epoch"):
        check(log, log.version_record("anchor"))
    with pytest.raises(ChainError, match="epoch"):
        check(log, EpochRecord(**{**log.common(), "epoch": 2}, publisher="x"))
    log.epoch()


def test_c5_a_record_of_another_epoch_is_refused():
    log = sample_log()
    old = log.version_record()
    log.epoch()
    record = changed(old, seq=log.tip.seq + 1, previous=log.tip.record)
    with pytest.raises(ChainError, match="publisher in charge"):
        check(log, record)
    with pytest.raises(ChainError, match="publisher in charge"):
        check(log, changed(record, epoch=3))
    assert check(log, changed(record, epoch=2)).tip.epoch == 2


def test_c6_versions_are_contiguous_and_may_begin_anywhere():
    log = sample_log(3)
    for version in (0, 3, 5):
        kind = "delta" if version else "anchor"
        with pytest.raises(ChainError, match=f"commits version {version} after version 3"):
            check(log, log.version_record(kind, version=version))
    fresh = LogBuilder()
    fresh.epoch()
    assert check(fresh, fresh.version_record("anchor", version=120)).tip.version == 120


def test_c7_a_delta_on_another_state_is_refused():
    log = sample_log()
    with pytest.raises(ChainError, match="is a delta on state"):
        check(log, changed(log.version_record(), base_root=hex_of("other")))
    with pytest.raises(ChainError, match="is a delta on state"):
        check(log, changed(log.version_record("anchor"), base_root=log.tip.root))
    fresh = LogBuilder()
    fresh.epoch()
    with pytest.raises(ChainError, match="is a delta on state"):
        check(fresh, changed(fresh.version_record(version=1), base_root=EMPTY_ROOT))


def test_c8_an_anchor_of_another_state_is_refused():
    log = sample_log()
    with pytest.raises(ChainError, match="is an anchor of version"):
        check(log, changed(log.anchor_record(), root=hex_of("other")))
    with pytest.raises(ChainError, match="is an anchor of version"):
        check(log, changed(log.anchor_record(), version=3))


def test_only_a_full_state_can_be_entered_without_its_predecessors():
    log = sample_log(3, anchors=(2,))
    for entry in log.entries:
        digest = entry.tip.record
        if is_full(entry.record):
            assert enter(entry.record, digest, log.run) == entry
            with pytest.raises(ChainError, match="belongs to run"):
                enter(entry.record, digest, "run-b")
        else:
            with pytest.raises(ChainError, match="no full state"):
                enter(entry.record, digest, log.run)


def test_the_empty_root_is_that_of_the_wire_format():
    from gymfast.delta.records import root_of

    assert root_of([]).hex() == EMPTY_ROOT


def test_a_tip_survives_storage():
    tip = sample_log().tip
    assert Tip.from_record(tip.to_record()) == tip
    with pytest.raises(ValueError, match="before the first"):
        Tip().to_record()


# Plans


def steps_of(found: Plan) -> list[tuple[str, int]]:
    return [(step.kind, step.record.version) for step in found.steps]


def at(log: LogBuilder, version: int) -> tuple[Tip, list[Entry]]:
    """The tip right after the record that commits `version`, and the entries after it."""
    index = next(i for i, e in enumerate(log.entries) if e.tip.version == version)
    return log.entries[index].tip, log.entries[index + 1 :]


def test_a_resident_reader_gets_the_missing_deltas_in_order():
    log = sample_log(5)
    tip, rest = at(log, 2)
    assert steps_of(plan(rest, tip)) == [("delta", 3), ("delta", 4), ("delta", 5)]


def test_a_reader_that_is_up_to_date_gets_nothing_and_moves_past_records_without_a_change():
    log = sample_log(3, anchors=(3,))
    log.epoch()
    tip, rest = at(log, 3)
    found = plan(rest, tip)
    assert found.steps == ()
    assert found.end == log.tip
    assert plan([], log.tip) == Plan((), log.tip)


def test_a_fresh_reader_gets_the_newest_anchor_and_its_tail():
    log = sample_log(5, anchors=(3,))
    assert steps_of(plan(log.entries, None)) == [("anchor", 3), ("delta", 4), ("delta", 5)]


def test_a_fresh_reader_takes_an_older_anchor_if_that_is_cheaper():
    log = LogBuilder()
    log.epoch()
    log.version("anchor", 10)
    log.version("delta", 5)
    log.anchor(1000)
    assert steps_of(plan(log.entries, None, costs=CHEAP)) == [("anchor", 0), ("delta", 1)]


def test_a_lagging_reader_takes_the_anchor_where_the_deltas_cost_more():
    log = LogBuilder()
    log.epoch()
    log.version("anchor", 100)
    tip = log.tip
    for _ in range(5):
        log.version("delta", 30)
    log.anchor(100)
    rest = log.entries[2:]
    assert steps_of(plan(rest, tip, costs=CHEAP)) == [("anchor", 5)]
    assert steps_of(plan(rest, tip, 3, costs=CHEAP)) == [("delta", v) for v in (1, 2, 3)]


def test_requests_count():
    log = LogBuilder()
    log.epoch()
    log.version("anchor", 100)
    tip = log.tip
    for _ in range(5):
        log.version("delta", 1)
    log.anchor(100)
    rest = log.entries[2:]
    assert len(plan(rest, tip, costs=CHEAP).steps) == 5
    assert steps_of(plan(rest, tip, costs=Costs(request_bytes=1000))) == [("anchor", 5)]


def test_no_plan_leads_across_a_version_that_was_committed_as_an_anchor():
    log = sample_log(2)
    tip = log.tip
    log.version("anchor", 10**9)
    log.version("delta")
    assert steps_of(plan(log.entries[-2:], tip)) == [("anchor", 3), ("delta", 4)]


def test_i32_rollback_is_refused():
    log = sample_log(5)
    tip, rest = at(log, 4)
    with pytest.raises(ChainError, match="rollback is refused"):
        plan(rest, tip, 3)
    with pytest.raises(ChainError, match="rollback is refused"):
        plan(log.entries, None, 3, at_least=4)
    assert plan(log.entries, None, 4, at_least=4).end.version == 4


def test_a_version_that_is_not_there_yet_is_not_found():
    log = sample_log(5)
    with pytest.raises(NotFoundError, match="version 6 is not published yet; the newest is 5"):
        plan(log.entries, None, 6)
    with pytest.raises(NotFoundError, match="no version"):
        plan([], None)
    only_epoch = LogBuilder()
    only_epoch.epoch()
    with pytest.raises(NotFoundError, match="no version"):
        plan(only_epoch.entries, None)
    with pytest.raises(NotFoundError, match="newest is none"):
        plan([], None, 1)


def test_r28_a_version_that_cannot_be_reached_is_refused_never_skipped():
    log = sample_log(5)
    tip, _ = at(log, 1)
    tail = log.entries[-2:]
    with pytest.raises(ChainError, match="holds version 1"):
        plan(tail, tip)
    with pytest.raises(ChainError, match="holds nothing usable"):
        plan(tail, None)
    with pytest.raises(ChainError, match="cannot be reached"):
        plan(sample_log(5, anchors=(4,)).entries[5:], None, 3)


def cheapest(log: LogBuilder, start: Tip | None, first: int, target: int, costs: Costs):
    """Cost of the cheapest way by brute force over all starts and every record in between."""
    found = []
    starts: list[tuple[int, int, int]] = []  # index of the next record, version, cost
    if start is not None:
        starts.append((first, start.version, 0))
    for index, entry in enumerate(log.entries):
        if index >= first and is_full(entry.record):
            starts.append((index + 1, entry.tip.version, costs.of(entry.record.frame)))
    for start_index, start_version, start_cost in starts:
        index, version, cost = start_index, start_version, start_cost
        while version < target:
            record = log.entries[index].record
            index += 1
            if isinstance(record, EpochRecord) or record.version == version:
                continue
            if record.kind == "anchor":
                break
            version, cost = record.version, cost + costs.of(record.frame)
        if version == target:
            found.append(cost)
    return min(found, default=None)


@given(logs(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_plan_is_the_cheapest_and_replays_to_the_target(log, data):
    first = data.draw(st.integers(0, len(log.entries) - 1))
    start = log.entries[first - 1].tip if first and data.draw(st.booleans()) else None
    if start is not None and start.version is None:
        start = None
    newest = log.entries[-1].tip.version
    target = data.draw(st.integers(0, newest))
    costs = Costs(request_bytes=data.draw(st.sampled_from([0, 7, 1000])))
    rest = log.entries[first:]
    expected = cheapest(log, start, first, target, costs)
    if (start is not None and target < start.version) or expected is None:
        with pytest.raises((ChainError, NotFoundError)):
            plan(rest, start, target, costs=costs)
        return
    found = plan(rest, start, target, costs=costs)
    assert found.cost == expected
    assert found.end.version == target
    assert found.num_bytes == sum(step.record.frame.num_bytes for step in found.steps)
    version = None if start is None else start.version
    root = None if start is None else start.root
    for step in found.steps:
        if step.kind == "delta":
            assert step.record.base_version == version
            assert step.record.base_root == root
        else:
            assert step is found.steps[0]
        version, root = step.record.version, step.record.root
    assert (version, root) == (found.end.version, found.end.root)


# States


def test_every_pair_of_state_and_event_is_either_in_the_table_or_refused():
    for state, event in itertools.product(State, Event):
        if (state, event) in TRANSITIONS:
            assert after(state, event) is TRANSITIONS[state, event]
        else:
            with pytest.raises(ChainError, match=f"that is {state.value} does not allow"):
                after(state, event)


def test_deltas_never_start_on_anything_but_a_clean_target():
    assert [s for s in State if (s, Event.BEGIN) in TRANSITIONS] == [State.CLEAN]


def test_a_target_serves_again_only_after_verification_or_proof_that_nothing_changed():
    into_clean = {(s, e) for (s, e), to in TRANSITIONS.items() if to is State.CLEAN}
    assert {e for _, e in into_clean} == {Event.VERIFIED, Event.UNTOUCHED, Event.ADOPT}
    assert (State.HEALING, Event.UNTOUCHED) not in into_clean
    assert (State.FILLING, Event.UNTOUCHED) not in into_clean


def test_every_state_can_be_left_towards_clean():
    for state in State:
        reached = {state}
        while True:
            more = {to for (s, _), to in TRANSITIONS.items() if s in reached} - reached
            if not more:
                break
            reached |= more
        assert State.CLEAN in reached


def test_only_a_clean_target_serves():
    assert [s for s in State if is_serving(s)] == [State.CLEAN]
