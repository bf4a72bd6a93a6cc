"""The laws that a simulator has to reproduce (docs/simulator.md section 10), with worked numbers.

Exact laws are compared exactly. A mean is compared within 3 standard errors of its replications.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_scenarios import one_step

from gymfast.sandbox.policies import Elastic, FixedPool, OnePerRollout
from gymfast_sim import theory
from gymfast_sim.draws import Draws, Purpose
from gymfast_sim.engine_simpy import simulate
from gymfast_sim.laws import (
    Constant,
    Erlang,
    Exponential,
    Law,
    Lognormal,
    Pareto,
    PlainLaw,
    QuantileGrid,
    Uniform,
    duration_ns,
)
from gymfast_sim.records import RunRecord, State
from gymfast_sim.replicate import Estimate, estimate, estimate_of, replications
from gymfast_sim.scenario import Retries, Rollouts, Sandboxes, Scenario, Sync, Training

N = 10_000
POINT_3 = Constant(value_s=0.3)


def _step_s(record: RunRecord) -> float:
    return record.steps[0].step_s


@pytest.mark.parametrize(
    ("size", "expected_s"),
    [
        (100, 1000),
        (10_000, 10),
        *(pytest.param(*p, marks=pytest.mark.ci) for p in [(500, 200), (1000, 100), (2000, 50)]),
        pytest.param(5000, 20, marks=pytest.mark.ci),
    ],
)
def test_G1_fixed_work_on_ready_sandboxes(size: int, expected_s: float) -> None:
    record = simulate(one_step(N, size, prewarmed=size))
    assert _step_s(record) == theory.fixed_makespan_s(N, size, 10.0) == expected_s


@pytest.mark.parametrize("size", [500, 10_000])
def test_G2_started_on_demand_and_reused(size: int) -> None:
    expected = theory.fixed_makespan_s(N, size, 10.0) + 0.3
    assert _step_s(simulate(one_step(N, size, boot=POINT_3))) == pytest.approx(expected, abs=1e-9)


def test_G3_used_once() -> None:
    assert _step_s(simulate(one_step(N, 2000, boot=POINT_3, max_uses=1))) == 51.5


def test_G3_a_reset_that_takes_as_long_as_a_start() -> None:
    scenario = one_step(N, 2000, boot=POINT_3)
    boxes = Sandboxes(boot=POINT_3, reset=POINT_3)
    settings = {f: getattr(scenario, f) for f in ("name", "rollouts", "policy")}
    assert _step_s(simulate(Scenario(**settings, sandboxes=boxes))) == 51.5


def test_G4_used_once_from_ready_sandboxes() -> None:
    pool = FixedPool(size=2000, max_uses=1)
    assert _step_s(simulate(one_step(N, pool, boot=POINT_3, prewarmed=2000))) == 51.2


@pytest.mark.parametrize(
    ("n", "rate", "burst", "last_s"),
    [
        (2500, 30.0, 2000, 16.6667),
        pytest.param(N, 1000.0, 1, 9.999, marks=pytest.mark.ci),
        pytest.param(N, 30.0, 2000, 266.6667, marks=pytest.mark.ci),
    ],
)
def test_G5_creations_pass_the_token_bucket(n: int, rate: float, burst: int, last_s: float) -> None:
    scenario = one_step(n, n, max_uses=1, rate_per_s=rate, burst=burst)
    rows = simulate(scenario, keep_trace=True).trace
    slots = sorted(row.time_ns for row in rows if row.kind == 0 and row.state == State.STARTING)
    expected = [theory.slot_s(i, rate, burst) for i in range(1, n + 1)]
    # An interval is rounded up to whole nanoseconds: the n-th slot is at most n ns late.
    assert all(-1e-9 < s / 1e9 - e < n * 1e-9 for s, e in zip(slots, expected, strict=True))
    assert slots[-1] / 1e9 == pytest.approx(last_s, abs=1e-4)


@pytest.mark.parametrize(("rate", "about_s"), [(5.0, 102.2), (40.0, 12.775)])
def test_G5b_published_ramps(rate: float, about_s: float) -> None:
    record = simulate(one_step(512, 512, work=Constant(value_s=0.0), rate_per_s=rate, max_uses=1))
    assert _step_s(record) == pytest.approx(about_s, abs=1e-6)


@pytest.mark.parametrize(
    ("rate", "burst", "expected_s"),
    [(1000.0, 1, 20.299), pytest.param(30.0, 2000, 276.967, marks=pytest.mark.ci)],
)
def test_G6_used_once_at_a_rate(rate: float, burst: int, expected_s: float) -> None:
    record = simulate(one_step(N, N, boot=POINT_3, max_uses=1, rate_per_s=rate, burst=burst))
    assert _step_s(record) == pytest.approx(expected_s, abs=1e-3)


@pytest.mark.ci
def test_G7_a_rate_is_a_floor_for_sandboxes_used_once() -> None:
    scenario = one_step(N, N, boot=POINT_3, max_uses=1, rate_per_s=4.0, fail_ratio=0.02)
    for record in replications(scenario, 3):
        assert _step_s(record) >= (record.num_served - 1) / 4.0
        assert record.num_served >= N


@pytest.mark.ci
def test_G8_little_at_a_rate() -> None:
    record = simulate(
        one_step(12_000, 12_000, boot=POINT_3, max_uses=1, rate_per_s=1000.0), keep_trace=True
    )
    at_ns = 11 * 10**9
    started = sum(
        r.state == State.STARTING for r in record.trace if r.kind == 0 and r.time_ns <= at_ns
    )
    gone = sum(r.state == State.GONE for r in record.trace if r.kind == 0 and r.time_ns <= at_ns)
    assert started - gone == 10_300


def _exponential(num_rollouts: int, size: int, runs: int) -> Estimate:
    law = Exponential(mean_s=2.0)
    return estimate_of(one_step(num_rollouts, size, work=law, prewarmed=size), runs, _step_s)


def test_G9_exponential_work() -> None:
    assert _exponential(400, 40, 30).agrees(theory.exponential_makespan_s(400, 40, 2.0))


@pytest.mark.parametrize(
    ("size", "exact_s"),
    [
        pytest.param(100, 208.375, marks=pytest.mark.long),
        pytest.param(1000, 32.971, marks=pytest.mark.ci),
        pytest.param(10_000, 19.575, marks=pytest.mark.ci),
    ],
)
def test_G9_exponential_work_at_the_stated_size(size: int, exact_s: float) -> None:
    assert theory.exponential_makespan_s(N, size, 2.0) == pytest.approx(exact_s, abs=1e-3)
    assert _exponential(N, size, 10).agrees(exact_s)


@settings(max_examples=30, deadline=None)
@given(
    num_rollouts=st.integers(1, 60), size=st.integers(1, 20), seed=st.integers(0, 2**32 - 1),
    sigma=st.floats(0.1, 2.5),
)  # fmt: skip
def test_G10_list_scheduling_bounds(num_rollouts: int, size: int, seed: int, sigma: float) -> None:
    law = Lognormal(median_s=1.0, sigma=sigma)
    record = simulate(one_step(num_rollouts, size, work=law, prewarmed=size, seed=seed))
    draws = Draws(seed)
    work = [duration_ns(law, draws(i, 0, Purpose.WORK)) for i in range(num_rollouts)]
    assert record.sandbox_ns["working"] == sum(work)
    end, total, longest = record.end_ns, sum(work), max(work)
    assert max(total, longest * size) <= end * size <= total + (size - 1) * longest


MAXIMA: list[tuple[Law, int, float]] = [
    (Exponential(mean_s=1.0), 512, 6.8165),
    (Uniform(low_s=0.0, high_s=1.0), 512, 0.99805),
    (Lognormal(median_s=1.0, sigma=0.5), 512, 4.664),
    (Lognormal(median_s=1.0, sigma=1.0), 512, 22.635),
    (Lognormal(median_s=1.0, sigma=1.5), 512, 115.12),
    (Exponential(mean_s=1.0), 10_000, 9.788),
    (Lognormal(median_s=1.0, sigma=0.5), 10_000, 6.944),
    (Lognormal(median_s=1.0, sigma=1.0), 10_000, 49.52),
    (Lognormal(median_s=1.0, sigma=1.5), 10_000, 364.3),
]


@pytest.mark.parametrize(("law", "n", "exact_s"), MAXIMA)
def test_G11_the_expected_longest_in_closed_form(law: Law, n: int, exact_s: float) -> None:
    assert theory.expected_max_s(law, n) == pytest.approx(exact_s, rel=2e-4)


@pytest.mark.parametrize("law", [MAXIMA[0][0], MAXIMA[1][0], MAXIMA[3][0]])
def test_G11_a_step_lasts_as_long_as_its_longest_rollout(law: PlainLaw) -> None:
    found = estimate_of(one_step(128, 128, work=law, prewarmed=128), 40, _step_s)
    assert found.agrees(theory.expected_max_s(law, 128))


@pytest.mark.parametrize(("n", "exact_s"), [(512, 18.06), (10_000, 59.29)])
def test_G12_the_longest_of_pareto(n: int, exact_s: float) -> None:
    law = Pareto(minimum_s=1.0, alpha=2.5)
    closed = math.exp(math.lgamma(n + 1) + math.lgamma(0.6) - math.lgamma(n + 0.6))
    assert closed == pytest.approx(exact_s, rel=1e-3)
    assert theory.expected_max_s(law, n) == pytest.approx(closed, rel=2e-3)


def test_G13_attempts_in_closed_form() -> None:
    assert theory.expected_attempts(0.02) == pytest.approx(1.0204, abs=5e-5)
    assert theory.some_needs_ratio(N, 0.02, 3) == pytest.approx(0.9817, abs=5e-5)
    assert theory.some_needs_ratio(N, 0.02, 4) == pytest.approx(0.0769, abs=5e-5)
    expected_most = 1 + sum(theory.some_needs_ratio(N, 0.02, k) for k in range(2, 30))
    assert expected_most == pytest.approx(3.060, abs=1e-3)


def test_G13_attempts_and_drops_in_runs() -> None:
    scenario = one_step(200, 200, fail_ratio=0.1)
    runs = list(replications(scenario, 25))
    assert estimate([r.num_served / 200 for r in runs]).agrees(
        sum(0.1**k for k in range(6))  # six attempts at most
    )
    rollouts = Rollouts(prompts=200, work=Constant(value_s=1.0), fail_ratio=0.1,
                        retries=Retries(max_retries=1))  # fmt: skip
    dropping = Scenario(name="drops", rollouts=rollouts, policy=scenario.policy)
    dropped = [r.steps[0].num_dropped / 200 for r in replications(dropping, 25)]
    assert estimate(dropped).agrees(0.01)


def test_G14_failures_in_mid_run() -> None:
    scenario = one_step(200, 200, prewarmed=200, fail_ratio=0.05)
    found = estimate_of(scenario, 60, _step_s)
    assert found.agrees(theory.failing_makespan_s(200, 10.0, 0.05))


@pytest.mark.ci
def test_G14_failures_in_mid_run_at_the_stated_size() -> None:
    exact_s = theory.failing_makespan_s(N, 10.0, 0.02)
    assert exact_s == pytest.approx(24.196, abs=1e-3)
    scenario = one_step(N, N, prewarmed=N, fail_ratio=0.02)
    assert estimate_of(scenario, 15, _step_s).agrees(exact_s)


@pytest.mark.parametrize(("size", "expected"), [(8, 0.8508), (16, 0.7238)])
def test_G15_groups_without_a_failure(size: int, expected: float) -> None:
    assert theory.group_survival(0.02, size) == pytest.approx(expected, abs=5e-5)
    assert 64 / theory.group_survival(0.02, 8) == pytest.approx(75.2, abs=0.05)


def test_G16_one_server() -> None:
    assert theory.erlang_c(0.8, 1.0, 1).length == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("rate", "servers", "waits", "wait_s"),
    [(8, 10, 0.409180, 0.204590), (90, 100, 0.216940, 0.021694), (950, 1000, 0.068253, 0.001365)],
)
def test_G17_erlang_in_closed_form(rate: int, servers: int, waits: float, wait_s: float) -> None:
    found = theory.erlang_c(rate, 1.0, servers)
    assert found.wait_ratio == pytest.approx(waits, abs=1e-6)
    assert found.wait_s == pytest.approx(wait_s, abs=1e-6)


def _queue(num_rollouts: int, rate_per_s: float, servers: int) -> Scenario:
    return Scenario(
        name="M/M/c",
        rollouts=Rollouts(
            prompts=num_rollouts,
            work=Exponential(mean_s=1.0),
            arrival_gap=Exponential(mean_s=1 / rate_per_s),
        ),
        policy=FixedPool(size=servers),
        sandboxes=Sandboxes(prewarmed=servers),
    )


@pytest.mark.ci
def test_G17_rollouts_that_arrive_at_random() -> None:
    runs = list(replications(_queue(20_000, 8.0, 10), 8))
    exact = theory.erlang_c(8.0, 1.0, 10)
    assert estimate([r.wait_ns / r.num_served / 1e9 for r in runs]).agrees(exact.wait_s)
    assert estimate([r.num_waited / r.num_served for r in runs]).agrees(exact.wait_ratio)


def test_G18_pools_sized_by_delay_and_by_loss() -> None:
    assert [theory.smallest_pool(load, 0.01) for load in (100, 512, 1000)] == [125, 567, 1077]
    for load, servers in ((100, 117), (512, 539), (1000, 1029)):
        assert theory.erlang_b(load, servers) <= 0.01 < theory.erlang_b(load, servers - 1)


@pytest.mark.parametrize(("beta", "servers", "waits"), [(1, 930, 0.2280), (2, 960, 0.0290)])
def test_G19_square_root_staffing(beta: int, servers: int, waits: float) -> None:
    assert 900 + beta * math.sqrt(900) == servers
    assert theory.erlang_c(900, 1.0, servers).wait_ratio == pytest.approx(waits, abs=5e-5)


STARTS: list[PlainLaw] = [
    Constant(value_s=0.3),
    Exponential(mean_s=0.3),
    Lognormal(median_s=0.3 * math.exp(-0.5), sigma=1.0),
    Erlang(mean_s=0.3, shape=3),
]


@pytest.mark.parametrize(
    "law",
    [
        pytest.param(law, marks=[pytest.mark.ci, pytest.mark.long][i % 2])
        for i, law in enumerate(STARTS)
    ],
    ids=lambda law: type(law).__name__,
)
def test_G20_starting_sandboxes_are_poisson_whatever_the_law(law: PlainLaw) -> None:
    """Sampled once in 2 s, when those of the sample before are ready."""
    rollouts = Rollouts(
        prompts=15_000, work=Constant(value_s=0.01), arrival_gap=Exponential(mean_s=1 / 50)
    )
    scenario = Scenario(
        name="M/G/inf",
        rollouts=rollouts,
        policy=OnePerRollout(max_size=15_000),
        sandboxes=Sandboxes(boot=law),
    )
    samples: list[int] = []
    for record in replications(scenario, 2, keep_trace=True):
        change: Counter[int] = Counter()
        for row in record.trace:
            if row.kind == 0 and row.state in {State.STARTING, State.WORKING}:
                change[row.time_ns] += 1 if row.state == State.STARTING else -1
        times = np.array(sorted(change))
        counts = np.cumsum([change[t] for t in times.tolist()])
        at = np.arange(4e9, 280e9, 2e9)
        samples += counts[np.searchsorted(times, at, side="right") - 1].tolist()
    found = estimate([float(x) for x in samples])
    assert found.agrees(15.0)
    variance = np.var(samples, ddof=1)
    # The variance of a variance of n Poisson numbers is (m + 2 m^2) / n, nearly.
    assert abs(variance - 15.0) <= 3 * math.sqrt((15 + 2 * 15**2) / len(samples))


@pytest.mark.parametrize(
    ("sandboxes", "per_s", "wait_s"),
    [(48, 15.888, 1.112), (56, 16.949, 0.1042), (64, 17.061, 0.0053), (72, 17.0665, 0.0001)],
)
def test_G21_machine_repair_in_closed_form(sandboxes: int, per_s: float, wait_s: float) -> None:
    found = theory.machine_repair(256, 12.0, 3.0, sandboxes)
    assert found.actions_per_s == pytest.approx(per_s, abs=5e-4)
    assert found.wait_s == pytest.approx(wait_s, abs=5e-4)


@pytest.mark.ci
def test_G21_episodes_that_share_sandboxes_for_their_actions() -> None:
    scenario = Scenario(
        name="machine repair",
        rollouts=Rollouts(
            prompts=256,
            turns=60,
            hold="action",
            work=Exponential(mean_s=3.0),
            think=Exponential(mean_s=12.0),
        ),
        policy=FixedPool(size=56),
        sandboxes=Sandboxes(prewarmed=56),
    )
    exact = theory.machine_repair(256, 12.0, 3.0, 56)
    assert exact.wait_ratio == pytest.approx(0.3013, abs=5e-5)
    per_s, waits = [], []
    begin, end = 60 * 10**9, 480 * 10**9  # all think or act, and the start is forgotten
    for record in replications(scenario, 6, keep_trace=True):
        found: list[int] = []
        waiting: list[int] = []
        for row in record.trace:
            if row.kind == 1 and row.state == 2:
                waiting.append(row.time_ns)
            elif row.kind == 0 and row.state == State.WORKING:
                since = waiting.pop(0)  # first come, first served
                if begin <= since < end:
                    found.append(row.time_ns - since)
        per_s.append(len(found) / ((end - begin) / 1e9))
        waits.append(sum(found) / len(found) / 1e9)
    assert estimate(per_s).agrees(exact.actions_per_s)
    assert estimate(waits).agrees(exact.wait_s)


def test_G23_a_synchronous_step() -> None:
    law = Lognormal(median_s=120.0, sigma=0.8)
    assert law.expected_s == pytest.approx(165.26, abs=5e-3)
    assert theory.expected_max_s(law, 512) + 60 == pytest.approx(1436.5 + 60, abs=0.1)
    scenario = Scenario(
        name="synchronous",
        rollouts=Rollouts(prompts=16, group_size=8, work=law),
        policy=FixedPool(size=128),
        sandboxes=Sandboxes(prewarmed=128),
        training=Training(steps=20, train=Constant(value_s=45.0), sync=Sync(seconds=15.0)),
    )
    steps = [step.step_s for r in replications(scenario, 3) for step in r.steps]
    assert estimate(steps).agrees(theory.expected_max_s(law, 128) + 60)


@pytest.mark.parametrize(
    ("slots", "num_runs", "turns"),
    [(10, 5, 100), pytest.param(12, 12, 300, marks=pytest.mark.ci)],
)
def test_G22_episodes_that_share_gpu_slots_and_sandboxes(
    slots: int, num_runs: int, turns: int
) -> None:
    """Exponential: a closed network of two stations, exact from its birth-death equations."""
    scenario = Scenario(
        name="two stations",
        rollouts=Rollouts(
            prompts=20,
            turns=turns,
            hold="action",
            gpu_slots=slots,
            work=Exponential(mean_s=1.0),
            think=Exponential(mean_s=2.0),
        ),
        policy=FixedPool(size=5),
        sandboxes=Sandboxes(prewarmed=5),
    )
    exact = theory.machine_repair(20, 2.0, 1.0, 5, slots)
    assert exact.gpu_wait_s > 0.05 and exact.wait_s > 0.3, "both stations are short"
    per_s, waits, gpu_waits = [], [], []
    begin, end = 40 * 10**9, turns * 3 * 10**9  # the first episode is not yet over
    for record in replications(scenario, num_runs, keep_trace=True):
        queued = [r.time_ns for r in record.trace if (r.kind, r.state) == (1, 2)]
        served = [r.time_ns for r in record.trace if (r.kind, r.state) == (1, 3)]
        pairs = list(zip(queued, served, strict=True))  # first come, first served
        found = [after - since for since, after in pairs if begin <= since < end]
        per_s.append(len(found) / ((end - begin) / 1e9))
        waits.append(sum(found) / len(found) / 1e9)
        gpu_waits.append(record.steps[0].all_causes_ns["gpu"] / len(queued) / 1e9)
    assert estimate(per_s).agrees(exact.actions_per_s)
    assert estimate(waits).agrees(exact.wait_s)
    # The begin, when all think at once, and the end, when few are left, are part of this one.
    assert estimate(gpu_waits).mean == pytest.approx(exact.gpu_wait_s, rel=0.25)


HEAVY = Lognormal(median_s=120.0, sigma=0.8)


def test_G24_one_step_off() -> None:
    """A step is the longer of the longest rollout and the training of the step before."""
    assert theory.expected_max_s(HEAVY, 512, 60.0) == pytest.approx(1436.5, abs=0.1)
    for train_s in (60.0, 600.0):
        scenario = Scenario(
            name="one step off",
            rollouts=Rollouts(prompts=32, work=HEAVY),
            policy=FixedPool(size=32),
            sandboxes=Sandboxes(prewarmed=32),
            training=Training(
                mode="one-step-off",
                steps=21,
                train=Constant(value_s=train_s),
                sync=Sync(seconds=15.0),
            ),
        )
        steps = [step for r in replications(scenario, 4) for step in r.steps[1:]]
        found = estimate([step.step_s for step in steps])
        assert found.agrees(theory.expected_max_s(HEAVY, 32, train_s) + 15)
        assert all(sum(s.causes_ns.values()) == s.end_ns - s.start_ns for s in steps)
        waits_for_training = [s.causes_ns["train"] > 0 for s in steps]
        assert any(waits_for_training) == (train_s > 300)


def _asynchronous(in_flight: int, **settings: int) -> Scenario:
    return Scenario(
        name="asynchronous",
        rollouts=Rollouts(prompts=32, work=HEAVY),
        policy=FixedPool(size=in_flight),
        sandboxes=Sandboxes(prewarmed=in_flight),
        training=Training(
            mode="async",
            in_flight=in_flight,
            steps=60,
            warm_up_steps=20,
            train=Constant(value_s=60.0),
            **settings,
        ),
    )


@pytest.mark.parametrize("in_flight", [16, 64, 128])
def test_G25_G26_asynchronous_steps_and_their_staleness(in_flight: int) -> None:
    runs = list(replications(_asynchronous(in_flight), 8))
    exact_s = max(60.0, 32 * HEAVY.expected_s / in_flight)
    found = estimate([record.mean_step_s for record in runs])
    if exact_s == 60:
        assert found.mean == 60.0, "bound by the trainer"
        return
    assert found.agrees(exact_s)
    stale = [sum(s.staleness for s in r.steps[20:]) / (40 * 32) for r in runs]
    assert estimate(stale).agrees(in_flight / 32 + 60 / exact_s)


def test_G26_mean_staleness_has_its_bound() -> None:
    """Where the trainer is the bottleneck, rollouts wait instead of growing old."""
    free = simulate(_asynchronous(128))
    assert free.steps[-1].staleness > 5 * 32
    for bound in (4, 5):
        bounded = simulate(_asynchronous(128, max_staleness=bound))
        age = sum(step.staleness for step in bounded.steps[20:]) / (40 * 32)
        assert bound - 1.5 < age <= bound + 1  # Little: (bound + 1) * 32 are not trained on yet
    assert bounded.mean_step_s == pytest.approx(60.0, rel=0.1)


def test_G27_the_first_of_more_rollouts_than_needed() -> None:
    for num, expected_s in ((537, 517.7), (563, 408.7), (640, 294.9), (768, 229.1)):
        assert theory.expected_order_s(HEAVY, num, 512) + 60 == pytest.approx(expected_s, rel=6e-3)
    for num in (32, 35, 48):
        scenario = Scenario(
            name="over-launch",
            rollouts=Rollouts(prompts=num, enough=32, work=HEAVY),
            policy=Elastic(max_size=num),
            training=Training(steps=20, train=Constant(value_s=60.0)),
        )
        steps = [step for r in replications(scenario, 3) for step in r.steps]
        found = estimate([step.step_s for step in steps])
        assert found.agrees(theory.expected_order_s(HEAVY, num, 32) + 60)
        assert {(s.num_done, s.num_aborted) for s in steps} == {(32, num - 32)}


@pytest.mark.parametrize("group_fail", ["keep", "drop"])
def test_G15_groups_without_a_failure_in_runs(group_fail: Literal["keep", "drop"]) -> None:
    rollouts = Rollouts(prompts=64, group_size=8, work=Exponential(mean_s=5.0), fail_ratio=0.02,
                        group_fail=group_fail, retries=Retries(max_retries=0))  # fmt: skip
    scenario = Scenario(name="groups", rollouts=rollouts, policy=Elastic(max_size=100))
    runs = list(replications(scenario, 30))
    kept = estimate([1 - r.steps[0].num_spoilt_groups / 64 for r in runs])
    assert kept.agrees(theory.group_survival(0.02, 8))
    aborted = sum(r.steps[0].num_aborted for r in runs)
    assert (aborted > 0) == (group_fail == "drop")


def test_G29_keep_warm_pays_from_so_much_time_on() -> None:
    found = [
        theory.keep_warm_break_even_s(
            512, 60.0, sandbox_per_s=0.00003942 + 0.00000672, gpus=gpus, gpu_per_s=per_h / 3600
        )
        for gpus, per_h in ((8, 3.95), (128, 4.54), (32, 6.25))
    ]
    assert found == pytest.approx([161, 8.8, 25.5], rel=6e-3)


def test_G30_the_best_pool_of_one_period() -> None:
    hold = 4.6e-5 * 60
    assert theory.newsvendor_ratio(0.161 * 2, hold) == pytest.approx(0.9915, abs=5e-5)


@pytest.mark.parametrize(
    ("rate", "burst", "expected_s"),
    [
        (4.0, 1, 228.80),
        pytest.param(30.0, 2000, 41.967, marks=pytest.mark.ci),
        pytest.param(100.0, 1, 50.29, marks=pytest.mark.ci),
        pytest.param(1000.0, 1, 20.299, marks=pytest.mark.ci),
    ],
)
def test_G31_reused_while_more_come(rate: float, burst: int, expected_s: float) -> None:
    found = simulate(one_step(N, N, boot=POINT_3, rate_per_s=rate, burst=burst))
    exact = theory.reuse_ramp_s(N, rate, burst, start_s=0.3, work_s=10.0)
    assert exact == pytest.approx(expected_s, abs=1e-3)
    assert _step_s(found) == pytest.approx(exact, abs=N * 1e-9 + 2e-9)


# Mean step of 20 runs of another program with the same semantics, half-width 1 s.
VIDEO_4 = [
    ("ready, reused", {"prewarmed": N}, 25.1),
    ("used once", {"max_uses": 1}, 25.7),
    ("used once, 1000/s", {"max_uses": 1, "rate_per_s": 1000.0}, 32.1),
    ("used once, 30/s after 2000", {"max_uses": 1, "rate_per_s": 30.0, "burst": 2000}, 289.4),
    ("used once, 4/s", {"max_uses": 1, "rate_per_s": 4.0}, 2563.0),
    ("reused, 4/s", {"rate_per_s": 4.0}, 256.0),
    ("reused, 30/s after 2000", {"rate_per_s": 30.0, "burst": 2000}, 54.4),
]


@pytest.mark.parametrize(
    ("name", "options", "expected_s"),
    [
        pytest.param(*case, marks=pytest.mark.ci if i == 0 else pytest.mark.long)
        for i, case in enumerate(VIDEO_4)
    ],
)
def test_video_4_with_two_percent_failures(
    name: str, options: dict[str, object], expected_s: float
) -> None:
    scenario = one_step(N, N, boot=POINT_3, fail_ratio=0.02, **options)  # type: ignore[arg-type]
    found = estimate_of(scenario, 12, _step_s)
    assert abs(found.mean - expected_s) <= 3 * math.hypot(found.standard_error, 1 / 1.96), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("max_uses", "size", "expected_s"), [(1, 10_000, 43.4), (1, 5000, 55.0), (None, 10_000, 29.3)]
)
def test_video_4_with_measured_starts(max_uses: int | None, size: int, expected_s: float) -> None:
    """From a grid of the measurements, as there: the tail of a fit to them has no end."""
    boot = QuantileGrid(
        probabilities=(0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0),
        values_s=(1.31, 1.48, 1.6, 1.83, 2.14, 2.5, 2.94, 3.38, 5.46, 8.37, 12.81, 24.95, 29.38),
    )
    scenario = one_step(N, size, boot=boot, fail_ratio=0.02, max_uses=max_uses)
    found = estimate_of(scenario, 20, _step_s)
    assert abs(found.mean - expected_s) <= 3 * math.hypot(found.standard_error, 1 / 1.96)


@pytest.mark.long
@pytest.mark.parametrize(("classes", "expected_s"), [(1, 34.3), (64, 44.6), (512, 142.0)])
def test_only_sandboxes_of_one_image_serve_each_other(classes: int, expected_s: float) -> None:
    """512 rollouts; the means of the other program have an error of the size of ours."""
    prompts = max(classes, 64)
    scenario = Scenario(
        name="images",
        rollouts=Rollouts(
            prompts=prompts,
            group_size=512 // prompts,
            work=Lognormal(median_s=2.0, sigma=1.0, cap_s=10.0),
            fail_ratio=0.02,
        ),
        policy=Elastic(max_size=512),
        sandboxes=Sandboxes(classes=classes, setup=Lognormal(median_s=30.0, sigma=0.5)),
    )
    found = estimate_of(scenario, 20, _step_s)
    assert abs(found.mean - expected_s) <= 3 * math.sqrt(2) * found.standard_error
