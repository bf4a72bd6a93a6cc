"""Plans over folds, and which folds retention may delete (sync-protocol.md sections 8, 15)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sync.logs import LogBuilder, changed, fold_of, hex_of, logs, sample_log

from gymfast.errors import ChainError, FormatError, NotFoundError
from gymfast.sync.chain import EMPTY_ROOT, Costs, Tip, end_of, needs_no_base, plan
from gymfast.sync.keys import RunKeys, Span, folded_of, span_of, span_of_fold
from gymfast.sync.manifest import (
    FoldRecord,
    StateRecord,
    VersionRecord,
    encode,
    parse_fold,
    sign,
)
from gymfast.sync.retention import floor_of, limited, passed_folds, version_at

CHEAP = Costs(request_bytes=0)
KEY = bytes(range(16))


def steps_of(found) -> list[tuple[int, int]]:
    return [(getattr(s.record, "base_version", -1), s.record.version) for s in found.steps]


def at(log: LogBuilder, version: int) -> tuple[Tip, list]:
    index = next(i for i, e in enumerate(log.entries) if e.tip.version == version)
    return log.entries[index].tip, log.entries[index + 1 :]


def test_a_reader_far_behind_takes_the_longest_folds_that_fit():
    log = sample_log(20)
    tip, rest = at(log, 3)
    folds = [fold_of(log, v, v + 4) for v in (0, 4, 8, 12)] + [fold_of(log, 4, 20, 30)]
    assert steps_of(plan(rest, tip, folds=folds)) == [(3, 4), (4, 20)]
    assert steps_of(plan(rest, tip, 19, folds=folds)) == [
        *((3, 4), (4, 8), (8, 12), (12, 16)),
        *((16, 17), (17, 18), (18, 19)),
    ]


def test_a_fold_that_costs_more_than_its_deltas_is_not_taken():
    log = sample_log(4)
    tip, rest = at(log, 0)
    deltas = [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert steps_of(plan(rest, tip, costs=CHEAP, folds=[fold_of(log, 0, 4, 41)])) == deltas
    assert steps_of(plan(rest, tip, costs=CHEAP, folds=[fold_of(log, 0, 4, 40)])) == [(0, 4)]


def test_on_a_tie_the_frames_of_the_log_are_taken():
    log = sample_log(1)
    tip, rest = at(log, 0)
    assert not plan(rest, tip, folds=[fold_of(log, 0, 1)]).steps[0].is_fold
    fresh = plan(log.entries, None, 0, folds=[fold_of(log, None, 0, 80)])
    assert not fresh.steps[0].is_fold


def test_a_full_state_of_a_compactor_is_a_start():
    log = sample_log(20)
    folds = [fold_of(log, None, 18, 90)]
    assert steps_of(plan(log.entries, None, folds=folds)) == [(-1, 18), (18, 19), (19, 20)]
    assert plan(log.entries, None, folds=folds).first_seq == folds[0].seq


def test_a_fold_leads_across_a_version_that_is_an_anchor_or_cannot_be_read():
    log = sample_log(2)
    tip = log.tip
    log.version("anchor", 10**9)
    log.version("delta")
    rest = log.entries[-2:]
    assert steps_of(plan(rest, tip, folds=[fold_of(log, 2, 4)])) == [(2, 4)]
    log = sample_log(4)
    tip, rest = at(log, 1)
    broken = [e.record.seq for e in log.entries if e.tip.version == 3]
    with pytest.raises(ChainError):
        plan(rest, tip, unusable=broken)
    assert steps_of(plan(rest, tip, unusable=broken, folds=[fold_of(log, 1, 4)])) == [(1, 4)]


def test_the_lease_of_a_fold_names_the_newest_place_of_its_base():
    log = sample_log(8, anchors=(2,))
    tip, rest = at(log, 2)
    found = plan(rest, tip, folds=[fold_of(log, 2, 8)])
    assert found.first_seq == tip.seq + 1  # the anchor record behind version 2
    tip, rest = at(log, 5)
    assert plan(rest, tip, folds=[fold_of(log, 5, 8)]).first_seq == tip.seq


WRONG = {
    "another state at its end": {"root": hex_of("other")},
    "another base": {"base_root": hex_of("other")},
    "another record at its end": {"record": hex_of("other")},
    "another place": {"seq": 3},
    "another epoch, as of a fenced branch": {"epoch": 2},
    "a place beyond the log": {"seq": 10**6},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("base", [0, None])
def test_a_fold_that_does_not_fit_the_log_is_left_out(fields, base):
    log = sample_log(6)
    tip, rest = at(log, 0)
    fold = fold_of(log, base, 6, 1, **fields)
    found = plan(rest, tip, folds=[fold])
    assert [s.is_fold for s in found.steps] == [False] * 6
    assert not any(s.is_fold for s in plan(log.entries, None, folds=[fold]).steps)


@st.composite
def folded_logs(draw):
    """A log and folds over it; some do not fit."""
    log = draw(logs())
    versions = sorted({e.tip.version for e in log.entries if e.tip.version is not None})
    folds = []
    for _ in range(draw(st.integers(0, 8))):
        version = draw(st.sampled_from(versions))
        base = draw(st.sampled_from([None, *(v for v in versions if v < version)]))
        wrong = draw(st.sampled_from([{}, {}, {}, *WRONG.values()]))
        folds.append(fold_of(log, base, version, draw(st.integers(1, 200)), **wrong))
    return log, folds


def cheapest(entries, start: Tip | None, is_next: bool, target: int, costs: Costs, folds):
    """Cost of the cheapest way by brute force: every path over every frame that fits."""
    tips = {entry.tip for entry in entries}
    roots = {e.tip.version: e.tip.root for e in entries}
    if start is not None:
        roots.setdefault(start.version, start.root)
    edges: list[tuple[int, int, int, bool]] = []  # base (-1 for none), version, cost, is a fold
    for entry in entries:
        record = entry.record
        if isinstance(record, StateRecord):
            base = -1 if needs_no_base(record) else record.base_version
            edges.append((base, record.version, costs.of(record.frame), False))
    for fold in folds:
        base_root = EMPTY_ROOT if fold.base_version < 0 else roots.get(fold.base_version)
        if end_of(fold) in tips and fold.base_root == base_root:
            edges.append((fold.base_version, fold.version, costs.of(fold.frame), True))

    def from_(version: int, is_held: bool) -> list[int]:
        if version == target:
            return [0]
        return [
            cost + rest
            for base, end, cost, is_fold in edges
            if base == version and version < end <= target and (is_next or is_fold or not is_held)
            for rest in from_(end, False)
        ]

    found = [c + rest for base, end, c, _ in edges if base < 0 for rest in from_(end, False)]
    if start is not None:
        found += from_(start.version, True)
    return min(found, default=None)


@given(folded_logs(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_plan_over_folds_is_the_cheapest_and_replays_to_the_target(made, data):
    log, folds = made
    first = data.draw(st.integers(0, len(log.entries) - 1))
    start = log.entries[first - 1].tip if first and data.draw(st.booleans()) else None
    if start is not None and start.version is None:
        start = None
    target = data.draw(st.integers(0, log.entries[-1].tip.version))
    costs = Costs(request_bytes=data.draw(st.sampled_from([0, 7, 1000])))
    gap = data.draw(st.sampled_from([0, 0, 1])) if start is not None else 0
    rest = log.entries[first + gap :]
    newest = rest[-1].tip.version if rest else None
    if start is not None and target == start.version:
        return
    expected = cheapest(rest, start, gap == 0, target, costs, folds)
    is_refused = start is not None and target < start.version
    if is_refused or expected is None or newest is None or target > newest:
        with pytest.raises((ChainError, NotFoundError)):
            plan(rest, start, target, costs=costs, folds=folds)
        return
    found = plan(rest, start, target, costs=costs, folds=folds)
    assert found.cost == expected == sum(costs.of(s.record.frame) for s in found.steps)
    version, root = (None, None) if start is None else (start.version, start.root)
    for step in found.steps:
        if step.kind == "delta":
            assert (step.record.base_version, step.record.base_root) == (version, root)
        else:
            assert step is found.steps[0]
        version, root = step.record.version, step.record.root
    assert (version, root) == (target, found.end.root)


# Records and names


def test_the_record_of_a_fold_survives_storage_and_is_signed():
    fold = sign(fold_of(sample_log(4), 0, 4), KEY)
    assert parse_fold(encode(fold), "fold", KEY) == fold
    for other in (fold_of(sample_log(4), 0, 4), changed(fold, num_changed=4)):
        with pytest.raises(FormatError) as caught:
            parse_fold(encode(other), "fold", KEY)
        assert caught.value.number == 104


@pytest.mark.parametrize(
    "fields", [{"base_version": 4}, {"version": 0}, {"base_version": -2}, {"root": None}]
)
def test_a_fold_that_leads_nowhere_is_refused(fields):
    fold = fold_of(sample_log(4), 0, 4)
    if "root" in fields:
        fields = {"root": fold.base_root}  # changes that change nothing
    with pytest.raises(FormatError):
        parse_fold(encode(changed(fold, **fields)), "fold")


def test_objects_that_do_not_add_up_are_refused():
    fold = fold_of(sample_log(4), 0, 4)
    frame = changed(fold.frame, num_bytes=fold.frame.num_bytes + 1)
    with pytest.raises(FormatError, match="make a frame"):
        parse_fold(encode(changed(fold, frame=frame)), "fold")
    blob = encode(fold)
    for bad in (blob[:-1], b" " + blob, blob.replace(b'"fold"', b'"version"'), b"{}", b"\xff"):
        with pytest.raises(FormatError):
            parse_fold(bad, "fold")


@given(st.integers(-1, 2**53 - 2), st.integers(0, 2**53 - 1))
def test_keys_of_folds_are_read_back(base, version):
    keys, span = RunKeys("run-a"), Span(base, version)
    expected = span if base < version else None
    assert span_of(keys.fold(span), keys.folds_prefix) == expected
    folded = keys.folded_prefix
    assert folded_of(f"{folded}{span}/{'0' * 64}", folded) == expected


@pytest.mark.parametrize("name", ["", "full-1", "x", f"{1:020d}", f"{1:020d}-{2**53:020d}", "a/b"])
def test_other_names_are_no_folds(name):
    keys = RunKeys("run-a")
    assert span_of(f"{keys.folds_prefix}{name}", keys.folds_prefix) is None


# Retention


@given(folded_logs(), st.integers(1, 8), st.integers(0, 20), st.data())
def test_a_fold_that_a_kept_state_or_a_lease_needs_stays(made, keep, lease_seq, data):
    """Whoever holds a version that the floor leaves, and has a lease for it, finds its folds."""
    log, folds = made
    lease = lease_seq or None
    floor = limited(floor_of(log.records, keep), lease)
    spans = {span_of_fold(fold) for fold in folds}
    finished = {span for span in spans if data.draw(st.booleans())}
    leased = None if lease is None else version_at(log.records, lease)
    passed = passed_folds(spans, finished, version_at(log.records, floor), leased)
    for fold in folds:
        span = span_of_fold(fold)
        if fold.base_version >= 0:
            base = [e.tip.seq for e in log.entries if e.tip.version == fold.base_version][-1]
            assert (span in passed) == (
                version_at(log.records, base) < version_at(log.records, floor)
            )
            if lease is not None and base >= lease:
                assert span not in passed
        elif lease is not None and fold.seq >= lease and not any(fold.seq == s for s in (3, 10**6)):
            assert span not in passed
    full = sorted(span for span in finished if span.is_full)
    for span in full[-2:]:
        assert span not in passed or span.version < version_at(log.records, floor)


def test_older_full_states_of_compactors_go_unless_they_are_leased():
    spans = [Span(-1, v) for v in (10, 20, 30, 40)]
    assert passed_folds(spans, spans, 0, None) == {Span(-1, 10), Span(-1, 20)}
    assert passed_folds(spans, spans, 0, 15) == {Span(-1, 10)}
    assert passed_folds(spans, spans, 35, 35) == set(spans[:3])
    assert passed_folds(spans, spans[:2], 0, None) == set()


def test_what_holds_at_a_place_is_the_newest_state_before_it():
    log = sample_log(3)
    log.epoch()
    places = {r.seq: r.version for r in log.records if isinstance(r, VersionRecord)}
    for seq, version in places.items():
        assert version_at(log.records, seq) == version
    assert version_at(log.records, log.tip.seq) == 3
    assert version_at(log.records, 1) == -1
    assert isinstance(fold_of(log, 0, 3), FoldRecord)
