"""What holds in every run, on scenarios at random; and traces that never change."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymfast.sandbox.policies import (
    AnyPolicy,
    ClaimBackfill,
    Elastic,
    FixedPool,
    Hedged,
    KeepWarm,
    Lead,
    OnePerRollout,
    Reactive,
    TickRefill,
)
from gymfast_sim.engine_simpy import simulate
from gymfast_sim.gates import RateLimit
from gymfast_sim.laws import NONE, Constant, Exponential, Lognormal, PlainLaw
from gymfast_sim.records import RunRecord, State
from gymfast_sim.scenario import Limits, Retries, Rollouts, Sandboxes, Scenario, Training

# From each state to those that may follow.
FOLLOWS = {
    State.PENDING: {State.STARTING, State.IDLE, State.GONE},
    State.STARTING: {State.IDLE, State.WORKING, State.STOPPING, State.GONE},
    State.IDLE: {State.WORKING, State.STOPPING, State.GONE},
    State.WORKING: {*State} - {State.PENDING, State.STARTING},
    State.HELD: {State.WORKING, State.LOST, State.STOPPING, State.GONE},
    State.RESETTING: {State.IDLE, State.GONE},
    State.LOST: {State.GONE},
    State.STOPPING: {State.GONE},
    State.GONE: set(),
}

REFUSED = Retries(initial_delay_s=0.5, jitter_ratio=0.5)


def _laws(mean_s: float) -> st.SearchStrategy[PlainLaw]:
    return st.sampled_from(
        [
            NONE,
            Constant(value_s=mean_s),
            Exponential(mean_s=mean_s),
            Lognormal(median_s=mean_s / 2, sigma=1.0),
        ]
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small scenarios with every feature."""
    classes = draw(st.integers(1, 3))
    prompts, group = draw(st.integers(classes, 8)), draw(st.integers(1, 3))
    size = draw(st.integers(classes, 12))
    max_uses = draw(st.sampled_from([None, 1, 2]))
    policy: AnyPolicy = draw(
        st.sampled_from(
            [
                OnePerRollout(max_size=size),
                FixedPool(size=size, max_uses=max_uses),
                Elastic(max_size=size, max_uses=max_uses),
                KeepWarm(warm=draw(st.integers(classes, size)), max_size=size, max_uses=max_uses),
                Lead(max_size=size, lead_s=draw(st.sampled_from([0.0, 2.0, 50.0]))),
                Hedged(max_size=size, extra_ratio=0.5),
                ClaimBackfill(size=size, max_size=size + 3, top_up_s=20.0),
                TickRefill(size=size),
                Reactive(max_size=size + 3),
            ]
        )
    )
    rate = draw(st.sampled_from([None, 0.7, 3.0]))
    has_life = draw(st.booleans())
    rollouts = Rollouts(
        prompts=prompts,
        group_size=group,
        turns=draw(st.integers(1, 3)),
        hold=draw(st.sampled_from(["episode", "action"])),
        work=draw(_laws(2.0)),
        think=draw(_laws(1.0)),
        timeout_s=draw(st.sampled_from([None, 3.0])),
        fail_ratio=draw(st.sampled_from([0.0, 0.1, 0.5])),
        lost_ratio=draw(st.sampled_from([0.0, 0.1])),
        watchdog_s=5.0,
        gpu_slots=draw(st.sampled_from([None, 2])),
        enough=draw(st.sampled_from([None, 1, prompts])),
        group_fail=draw(st.sampled_from(["keep", "drop"])),
        retries=Retries(
            max_retries=draw(st.integers(0, 4)),
            initial_delay_s=draw(st.sampled_from([0.0, 0.5])),
            jitter_ratio=draw(st.sampled_from([0.0, 1.0])),
        ),
    )
    early = policy.binding == "early"
    return Scenario(
        name="random",
        rollouts=rollouts,
        policy=policy,
        sandboxes=Sandboxes(
            classes=classes,
            prewarmed=0 if early else draw(st.integers(0, size)),
            api=draw(_laws(0.2)),
            boot=draw(_laws(1.0)),
            setup=draw(_laws(1.0)),
            reset=draw(_laws(0.5)),
            teardown=draw(_laws(0.5)),
            start_fail_ratio=draw(st.sampled_from([0.0, 0.3])),
            lifetime_s=60.0 if has_life else None,
            preempted_after=draw(st.sampled_from([None, Exponential(mean_s=100.0)])),
            detection_s=draw(st.sampled_from([0.0, 0.7])),
        ),
        limits=Limits(
            rate_per_s=rate,
            burst=1 if rate is None else draw(st.integers(1, 5)),
            max_starting=draw(st.sampled_from([None, 1, 3])),
            max_live=draw(st.sampled_from([None, size + 3])),
            refused=draw(st.sampled_from([None, REFUSED])) if rate is not None else None,
            client_concurrency=draw(st.sampled_from([None, 1, 4])),
            teardown_counts=draw(st.booleans()),
        ),
        training=Training(
            mode=draw(st.sampled_from(["sync", "one-step-off"])),
            steps=draw(st.integers(1, 3)),
            train=draw(_laws(5.0)),
        ),
        seed=draw(st.integers(0, 1000)),
    )


def _check_sandboxes(scenario: Scenario, record: RunRecord) -> Counter[State]:
    """Legal changes of state, limits at every instant, times by state; returns the last states."""
    states: dict[int, State] = {}
    since: dict[int, int] = {}
    by_state: Counter[str] = Counter()
    counts: Counter[State] = Counter()
    limits, slots = scenario.limits, []
    for row in record.trace:
        if row.kind != 0:
            continue
        state, old = State(row.state), states.get(row.number)
        if old is None:
            assert state is State.PENDING
        else:
            assert state in FOLLOWS[old], f"{old.name} to {state.name}"
            by_state[old.name.lower()] += row.time_ns - since[row.number]
            counts[old] -= 1
        states[row.number], since[row.number] = state, row.time_ns
        counts[state] += 1
        if state is State.STARTING:
            slots.append(row.time_ns)
        live = sum(counts[s] for s in State if s not in {State.PENDING, State.GONE})
        if not limits.teardown_counts:
            live -= counts[State.STOPPING]
        assert limits.max_live is None or live <= limits.max_live
        assert limits.max_starting is None or counts[State.STARTING] <= limits.max_starting
    for number, state in states.items():
        by_state[state.name.lower()] += record.end_ns - since[number]
    assert {k: v for k, v in by_state.items() if k != "gone" and v} == {
        k: v for k, v in record.sandbox_ns.items() if k != "gone" and v
    }
    if limits.interval_ns is not None:
        for i, first in enumerate(slots):
            for j in range(i, len(slots)):
                assert j - i + 1 <= limits.burst + (slots[j] - first) // limits.interval_ns
    return Counter(states.values())


def _check_counts(scenario: Scenario, record: RunRecord, last: Counter[State]) -> None:
    boxes, pending = scenario.sandboxes, last[State.PENDING]
    assert record.num_asked + boxes.prewarmed == record.num_cancelled + record.num_started + pending
    ended = record.num_start_failed + record.num_died + record.num_expired + record.num_terminated
    ended += record.num_hung + record.num_lost_completions + record.num_preempted
    under_way = sum(last[s] for s in State if s not in {State.PENDING, State.GONE})
    # Sandboxes that are being torn down, or are dead unnoticed, have ended and are not gone.
    assert record.num_started == ended + under_way - last[State.STOPPING] - last[State.LOST]
    assert record.num_left == under_way + pending
    for step in record.steps:
        over = step.num_done + step.num_dropped + step.num_aborted
        assert over == scenario.rollouts.num_rollouts
        assert sum(step.causes_ns.values()) == step.end_ns - step.start_ns
        assert all(ns >= 0 for ns in step.causes_ns.values())
    ends = [step.end_ns for step in record.steps]
    assert [step.start_ns for step in record.steps] == [0, *ends[:-1]]


def _check_rollouts(scenario: Scenario, record: RunRecord) -> None:
    finished = [row.number for row in record.trace if row.kind == 1 and row.state in {0, 1, 5}]
    total = scenario.rollouts.num_rollouts * scenario.training.steps
    assert sorted(finished) == list(range(total))
    times = [row.time_ns for row in record.trace]
    assert times == sorted(times)
    queued: dict[int, int] = defaultdict(int)
    for row in record.trace:
        queued[row.number] += row.kind == 1 and row.state == 2
    if scenario.rollouts.hold == "episode":
        most = scenario.rollouts.retries.max_retries + 1
        # Early binding queues a rollout again where its sandbox was lost before it was ready.
        if scenario.policy.binding == "late":
            assert max(queued.values()) <= most


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios())
def test_every_run_conserves_and_keeps_its_limits(scenario: Scenario) -> None:
    record = simulate(scenario, keep_trace=True)
    last = _check_sandboxes(scenario, record)
    _check_counts(scenario, record, last)
    _check_rollouts(scenario, record)
    assert simulate(scenario, keep_trace=True) == record
    assert Scenario.from_toml(scenario.to_toml()) == scenario


@pytest.mark.long
@settings(max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios())
def test_five_thousand_runs_conserve_and_keep_their_limits(scenario: Scenario) -> None:
    record = simulate(scenario, keep_trace=True)
    last = _check_sandboxes(scenario, record)
    _check_counts(scenario, record, last)
    _check_rollouts(scenario, record)


@settings(max_examples=200, deadline=None)
@given(
    interval=st.integers(1, 50), burst=st.integers(1, 8),
    gaps=st.lists(st.integers(0, 120), max_size=60),
)  # fmt: skip
def test_a_rate_limit_is_the_token_bucket(interval: int, burst: int, gaps: list[int]) -> None:
    """Against a bucket of burst * interval units, of which a creation takes interval."""
    limit, now, level, at = RateLimit(interval, burst), 0, burst * interval, 0
    for gap in gaps:
        now = max(now + gap, limit.next_ns)
        level = min(burst * interval, level + now - at)
        at = now
        assert level >= interval
        assert limit.next_ns <= now
        if limit.next_ns == now and now > 0 and gap == 0:
            assert level == interval  # it waited, so it came at the first moment
        limit.take(now)
        level -= interval


GOLDEN = {
    "one-per-rollout": "53ed8302962a9a2e8645155c70295bedd6dbdda389631a5a2444b5ad79cf9f92",
    "fixed": "a9df3627ed548f44e40f8c4d939f2c3aa18f09da7ceda2ebf8428d4a6ef7fe85",
    "elastic": "d5a5bb8ab90ece8a5eca6868a6a8e84c34243f2266bd8bd9bf16e1aa28373719",
    "keep-warm": "53615d97f1af369f10c94574ea9cb3f3190d671400e9638e55dff066e9d79474",
    "lead": "69c5443d449eb6297263a8d95d357191079c342575188d21ccfa7024c81e2b5f",
}
POLICIES: dict[str, AnyPolicy] = {
    "one-per-rollout": OnePerRollout(max_size=40),
    "fixed": FixedPool(size=24, max_uses=3),
    "elastic": Elastic(max_size=32),
    "keep-warm": KeepWarm(warm=10, max_size=32),
    "lead": Lead(max_size=32, lead_s=20.0),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_trace_never_changes(name: str) -> None:
    """A change of these is a change of docs/simulator.md, and of every result ever published."""
    scenario = Scenario(
        name="golden",
        seed=2026,
        rollouts=Rollouts(
            prompts=16,
            group_size=4,
            turns=3,
            work=Lognormal(median_s=2.0, sigma=1.0, cap_s=10.0),
            think=Exponential(mean_s=3.0),
            fail_ratio=0.05,
            retries=Retries(initial_delay_s=0.5, jitter_ratio=0.5),
        ),
        policy=POLICIES[name],
        sandboxes=Sandboxes(
            classes=4,
            boot=Lognormal(median_s=2.0, sigma=0.3),
            setup=Exponential(mean_s=5.0),
            reset=Constant(value_s=0.25),
            teardown=Constant(value_s=1.0),
            start_fail_ratio=0.02,
            lifetime_s=200.0,
            detection_s=0.1,
        ),
        limits=Limits(rate_per_s=3.0, burst=10, max_starting=12, max_live=40, client_concurrency=8),
        training=Training(steps=2, train=Exponential(mean_s=60.0)),
    )
    assert simulate(scenario, keep_trace=True).digest == GOLDEN[name]
