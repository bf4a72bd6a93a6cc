"""The formula of a transfer in buckets, against buckets that are moved one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymfast.cost import Stage, best_bucket, pipeline_s


def moved_one_by_one(sizes: list[float], stages: list[Stage], depth: int, ack_s: float) -> float:
    """When the last bucket leaves the last stage; each stage holds one bucket at a time."""
    free = [0.0] * len(stages)
    acknowledged: list[float] = []
    now = 0.0
    for i, size in enumerate(sizes):
        now = acknowledged[i - depth] if i >= depth else 0.0
        for number, stage in enumerate(stages):
            now = max(now, free[number]) + stage.bucket_s(size)
            free[number] = now
        acknowledged.append(now + ack_s)
    return now


STAGES = st.lists(
    st.builds(Stage, st.just("s"), st.floats(0, 0.1), st.floats(1e3, 1e6)), min_size=1, max_size=4
)


@given(STAGES, st.integers(1, 60), st.integers(1, 6), st.floats(0, 0.2))
def test_the_formula_agrees_with_buckets_moved_one_by_one(
    stages: list[Stage], num_buckets: int, depth: int, ack_s: float
) -> None:
    bucket = 1000.0
    expected = moved_one_by_one([bucket] * num_buckets, stages, depth, ack_s)
    found = pipeline_s(num_buckets * bucket, bucket, stages, depth=depth, ack_s=ack_s)
    # A window of d buckets leaves in bursts: up to d - 1 periods before the average.
    seconds = [stage.bucket_s(bucket) for stage in stages]
    period_s = max(*seconds, (sum(seconds) + ack_s) / depth)
    assert expected <= found * (1 + 1e-9)
    assert found - expected <= (depth - 1) * period_s + 1e-9 * found


@given(STAGES, st.integers(1, 60))
def test_the_formula_is_exact_where_the_window_never_closes(
    stages: list[Stage], num_buckets: int
) -> None:
    expected = moved_one_by_one([1000.0] * num_buckets, stages, 10**6, 0.0)
    found = pipeline_s(num_buckets * 1000.0, 1000, stages, depth=10**6)
    assert found == pytest.approx(expected)


def test_a_chain_of_three_hops_takes_what_was_measured() -> None:
    """125 MB over three links of 2 Gb/s, measured in network namespaces."""
    measured = {16e3: 0.505, 1 << 20: 0.510, 4 << 20: 0.538, 14.9 * 2**20: 0.629, 125e6: 1.510}
    hops = [Stage(f"hop {i}", 0, 2e9 / 8) for i in range(3)]
    for bucket, seconds in measured.items():
        assert pipeline_s(125e6, bucket, hops, depth=8) == pytest.approx(seconds, rel=0.012)


def test_stop_and_wait_pays_a_round_trip_for_each_bucket() -> None:
    """125 MB at 1 Gb/s and 60 ms in buckets of 1 MiB: 8.37 to 11.05 s at depth 1, 1.1 at 8."""
    link = [Stage("link", 0, 125e6)]
    assert pipeline_s(125e6, 1 << 20, link, depth=1, ack_s=0.06) == pytest.approx(8.1, abs=0.1)
    assert pipeline_s(125e6, 1 << 20, link, depth=8, ack_s=0.06) == pytest.approx(1.04, abs=0.1)


def test_the_best_bucket_is_that_of_the_closed_formula() -> None:
    """Equal stages: b* = sqrt(N a B / (K - 1))."""
    stages = [Stage(f"s{i}", 300e-6, 6.25e9) for i in range(3)]
    num_bytes = 16.381e9
    expected = math.sqrt(num_bytes * 300e-6 * 6.25e9 / 2)
    found = best_bucket(num_bytes, stages, depth=3, slack_ratio=0)
    assert found == pytest.approx(expected, rel=0.05)
    best_s = (math.sqrt(num_bytes / 6.25e9) + math.sqrt(2 * 300e-6)) ** 2
    assert pipeline_s(num_bytes, found, stages, depth=3) == pytest.approx(best_s, rel=1e-3)


def test_the_best_bucket_stays_within_its_limits() -> None:
    stage = [Stage("link", 0, 1e9), Stage("load", 0, 1e9)]
    assert best_bucket(1e12, stage) == 16 << 20
    slow = [Stage("link", 1.0, 1e9), Stage("load", 1.0, 1e9)]
    assert best_bucket(1e12, slow, slack_ratio=0) == 1 << 30


def test_a_bucket_a_little_slower_may_be_much_smaller() -> None:
    stages = [Stage(f"s{i}", 300e-6, 6.25e9) for i in range(3)]
    exact, small = (best_bucket(16.381e9, stages, slack_ratio=ratio) for ratio in (0, 0.005))
    assert small < exact / 1.5
    times = [pipeline_s(16.381e9, size, stages) for size in (exact, small)]
    assert times[1] <= times[0] * 1.005


def test_nothing_takes_no_time_and_nonsense_is_refused() -> None:
    stage = Stage("link", 1, 1)
    assert pipeline_s(0, 1, [stage]) == 0
    for arguments in ((1, 0, [stage]), (1, 1, [])):
        with pytest.raises(ValueError, match=r"bucket_bytes is 0|without stages"):
            pipeline_s(*arguments)
    with pytest.raises(ValueError, match="depth is 0"):
        pipeline_s(1, 1, [stage], depth=0)
    with pytest.raises(ValueError, match="expected 0 or more"):
        Stage("link", -1, 1)
