"""Laws of GPU slots, of steps whose rollouts run while the trainer works, of groups."""

from __future__ import annotations

from typing import Literal

import pytest

from gymfast.sandbox.policies import Elastic, FixedPool
from gymfast_sim import theory
from gymfast_sim.engine_simpy import simulate
from gymfast_sim.laws import (
    Constant,
    Exponential,
    Lognormal,
)
from gymfast_sim.replicate import estimate, replications
from gymfast_sim.scenario import Retries, Rollouts, Sandboxes, Scenario, Sync, Training


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
