"""Scenarios that the tests of the simulator share."""

from __future__ import annotations

from gymfast.sandbox.policies import AnyPolicy, Elastic
from gymfast_sim.engine_simpy import simulate
from gymfast_sim.laws import NONE, AnyLaw, Constant, PlainLaw
from gymfast_sim.records import RunRecord, State
from gymfast_sim.scenario import Limits, Rollouts, Sandboxes, Scenario

TEN = Constant(value_s=10.0)
SECOND = 10**9


def one_step(
    num_rollouts: int,
    policy: AnyPolicy | int,
    *,
    work: PlainLaw = TEN,
    boot: AnyLaw = NONE,
    prewarmed: int = 0,
    fail_ratio: float = 0.0,
    rate_per_s: float | None = None,
    burst: int = 1,
    max_uses: int | None = None,
    seed: int = 0,
) -> Scenario:
    """One step of single actions; a number is the size of an elastic pool."""
    if isinstance(policy, int):
        policy = Elastic(max_size=policy, max_uses=max_uses)
    return Scenario(
        name="test",
        rollouts=Rollouts(prompts=num_rollouts, work=work, fail_ratio=fail_ratio),
        policy=policy,
        sandboxes=Sandboxes(prewarmed=prewarmed, boot=boot),
        limits=Limits(rate_per_s=rate_per_s, burst=burst),
        seed=seed,
    )


def work_of(count: int, seconds: float = 10.0, **settings: object) -> Rollouts:
    """So many rollouts of one action each."""
    return Rollouts(prompts=count, work=Constant(value_s=seconds), **settings)  # type: ignore[arg-type]


def record_of(rollouts: Rollouts, policy: object, **settings: object) -> RunRecord:
    """The record, with its trace, of a scenario on the reference engine."""
    scenario = Scenario(name="test", rollouts=rollouts, policy=policy, **settings)  # type: ignore[arg-type]
    return simulate(scenario, keep_trace=True)


def causes_of(record: RunRecord, step: int = 0) -> dict[str, float]:
    """Seconds that a step waited, by cause; they sum to the step."""
    found = record.steps[step].causes_ns
    assert sum(found.values()) == record.steps[step].end_ns - record.steps[step].start_ns
    return {name: ns / SECOND for name, ns in found.items() if ns}


def times_of(record: RunRecord, state: State) -> list[float]:
    """When sandboxes came into a state, in seconds."""
    return [row.time_ns / SECOND for row in record.trace if row.kind == 0 and row.state == state]
