"""Scenarios that the tests of the simulator share."""

from __future__ import annotations

from gymfast.sandbox.policies import AnyPolicy, Elastic
from gymfast_sim.laws import NONE, AnyLaw, Constant, PlainLaw
from gymfast_sim.scenario import Limits, Rollouts, Sandboxes, Scenario

TEN = Constant(value_s=10.0)


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
