"""Versions over a long way: the link is as slow as it says, and chains of requests are counted."""

from __future__ import annotations

import pytest

from benchmarks.wan import (
    Options,
    Row,
    check_targets,
    is_wan,
    measure,
    read_csv,
    tables,
    write_csv,
)
from benchmarks.wan_link import PAYLOAD_RATIO, Link, _wire_bytes, why_not
from benchmarks.wan_run import Request, depth, line_rate, round_trips

LINKED = pytest.mark.skipif(bool(why_not()), reason=f"needs kernel feature TUN: {why_not()}")
RTT_S = 0.06


def request(start_s: float, end_s: float, who: str, what: str, key: str, status: int = 200):
    return Request(start_s, end_s, who, what, key, status)


def test_only_requests_that_can_have_waited_count_as_a_chain():
    at_once = [request(0.01 * i, 0.01 * i, "a", "GET", "x") for i in range(5)]
    assert depth(at_once, RTT_S) == 1
    in_turn = [request(0.06 * i, 0.06 * i, "a", "GET", "x") for i in range(5)]
    assert depth(in_turn, RTT_S) == 5
    assert depth([], RTT_S) == 0


def test_round_trips_are_those_after_the_end_of_encoding_of_the_slowest_engine():
    record = "run/log/1"
    log = [
        request(0.03, 0.03, "trainer", "PUT create", "run/objects/a"),  # answered before the end
        request(0.13, 0.14, "trainer", "PUT create", "run/objects/b"),
        request(0.21, 0.21, "trainer", "PUT create", record),
        request(0.28, 0.28, "trainer", "GET", "run/floors"),
        request(0.20, 0.20, "engine0", "GET", record, 404),
        request(0.22, 0.22, "engine0", "GET", record),
        request(0.29, 0.35, "engine0", "GET", "run/objects/b"),
        request(0.23, 0.23, "engine1", "GET", record),
        request(0.30, 0.30, "engine1", "PUT", "run/readers/x"),
        request(0.30, 0.31, "engine1", "GET", "run/objects/b"),
        request(0.37, 0.37, "engine1", "GET", "run/floors"),
        request(0.50, 0.50, "engine1", "DELETE", "run/readers/x"),
    ]
    told = {"start_s": 0.0, "encoded_s": 0.1}
    ends = [{"end_s": 0.5, "apply": 0.1}, {"end_s": 0.51, "apply": 0.1}]
    assert round_trips(log, told, ends, RTT_S) == 2 + 1 + 2


def test_a_packet_of_many_segments_takes_the_wire_that_they_would():
    header = (40).to_bytes(2, "little") + (1448).to_bytes(2, "little") + bytes(4)
    whole = bytes([0, 1]) + header + bytes(40 + 3 * 1448)
    one = bytes(10) + bytes(40 + 1448)
    assert _wire_bytes(whole) == 3 * _wire_bytes(one)


def row(scheme: str, case: str, seconds: float, **changes) -> Row:
    options = {"raw_bytes": 2 * 10**9, "frame_bytes": 10**7, "rounds": 5, "p10_s": 1.0}
    return Row(scheme=scheme, case=case, seconds=seconds, p90_s=2.0, **(options | changes))


def test_targets_and_tables_come_from_the_csv(tmp_path):
    trips = {"round_trips": 5, "rtt_s": 0.06, "encode_s": 0.2, "wire_s": 0.3, "apply_s": 0.25}
    rows = [
        row("gymfast", "warm", 0.7, **trips, predicted_s=0.6),
        row("xor, zstd level 1", "warm", 1.3, **trips, predicted_s=0.6),
        row("gymfast", "late: an engine 50 versions behind", 8.0, predicted_s=5.0, note="plan: x"),
    ]
    path = tmp_path / "wan.csv"
    write_csv(path, rows, {"command": "python -m benchmarks wan"})
    assert is_wan(path)
    found, stamp = read_csv(path)
    assert found == rows
    assert [target.is_met for target in check_targets(found)] == [True, True, False, False]
    assert rows[0].in_turn_s == pytest.approx(5 * 0.06 + 0.2 + 0.3 + 0.25)
    text = tables(found, stamp)
    assert "| gymfast | warm | 10,000,000 | 0.700 |" in text
    assert "| **no** |" in text
    small = [row("gymfast", "warm", 0.7, raw_bytes=10**6, predicted_s=0.1)]
    assert check_targets(small) == [], "a small state says nothing"


@LINKED
@pytest.mark.ci
def test_a_link_carries_no_more_than_its_rate():
    with Link(0.1, 0.005) as link:
        rate = line_rate(link, 2_000_000)
    assert 0.1e9 / 8 * PAYLOAD_RATIO * 0.2 < rate < 0.1e9 / 8 * PAYLOAD_RATIO * 1.02


@LINKED
@pytest.mark.long
def test_all_cases_run_and_every_version_arrives():
    options = Options(size_bytes=4_000_000, rtt_s=0.02, rounds=1, behind=2)
    stamp: dict[str, str] = {}
    rows = list(measure(options, stamp))
    assert len(rows) == 7
    assert all(row.seconds > 0 and row.frame_bytes > 0 for row in rows)
    assert {row.scheme for row in rows} == {"gymfast", "xor, zstd level 1"}
    assert all(row.round_trips > 1 for row in rows if row.scheme == "gymfast" and row.encode_s)
    assert stamp
