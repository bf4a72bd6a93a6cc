"""The reference engine: worked examples of docs/simulator.md, one rule each."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from sim_scenarios import TEN, one_step

from gymfast.sandbox.policies import (
    ClaimBackfill,
    Elastic,
    FixedPool,
    Hedged,
    KeepWarm,
    Lead,
    OnePerRollout,
    Reactive,
    SnapshotResume,
    TickRefill,
)
from gymfast.sandbox.policy import (
    Cancel,
    Create,
    Decision,
    Memory,
    Policy,
    Terminate,
    View,
)
from gymfast_sim.clock import SimulationError
from gymfast_sim.engine_simpy import simulate
from gymfast_sim.laws import Constant, Crowded, Empirical, Exponential, Lognormal
from gymfast_sim.records import RunRecord, State, cost
from gymfast_sim.scenario import (
    ClassSettings,
    Limits,
    NotSimulatedError,
    Prices,
    Retries,
    Rollouts,
    Sandboxes,
    Scenario,
    Sync,
    Training,
)

SECOND = 10**9


def _work(count: int, seconds: float = 10.0, **settings: object) -> Rollouts:
    return Rollouts(prompts=count, work=Constant(value_s=seconds), **settings)  # type: ignore[arg-type]


def _run(rollouts: Rollouts, policy: object, **settings: object) -> RunRecord:
    scenario = Scenario(name="test", rollouts=rollouts, policy=policy, **settings)  # type: ignore[arg-type]
    return simulate(scenario, keep_trace=True)


def _causes(record: RunRecord, step: int = 0) -> dict[str, float]:
    found = record.steps[step].causes_ns
    assert sum(found.values()) == record.steps[step].end_ns - record.steps[step].start_ns
    return {name: ns / SECOND for name, ns in found.items() if ns}


def _times(record: RunRecord, state: State) -> list[float]:
    return [row.time_ns / SECOND for row in record.trace if row.kind == 0 and row.state == state]


def test_a_start_is_charged_phase_by_phase() -> None:
    phases = {
        n: Constant(value_s=s)
        for n, s in zip(("api", "queue", "boot", "setup"), (1, 2, 3, 4), strict=True)
    }
    record = _run(_work(1), Elastic(max_size=1), sandboxes=Sandboxes(**phases))  # type: ignore[arg-type]
    assert _causes(record) == {"api": 1, "queue": 2, "boot": 3, "setup": 4, "work": 10}
    assert record.steps[0].blocked_s == 20.0


def test_a_wait_for_a_sandbox_that_serves_others_is_capacity() -> None:
    boxes = Sandboxes(boot=Constant(value_s=1.0), reset=Constant(value_s=2.0))
    record = _run(_work(3), Elastic(max_size=1), sandboxes=boxes)
    assert _causes(record) == {"boot": 1, "capacity": 20, "reset": 4, "work": 10}
    assert record.steps[0].all_causes_ns["reset"] == (2 + 4) * SECOND


def test_the_rate_lets_one_pass_at_a_time() -> None:
    record = _run(_work(4), Elastic(max_size=4), limits=Limits(rate_per_s=0.5, burst=2))
    assert _times(record, State.STARTING) == [0, 0, 2, 4]
    assert _causes(record) == {"rate": 4, "work": 10}


def test_the_cap_on_starting_makes_waves() -> None:
    boxes = Sandboxes(boot=Constant(value_s=1.0))
    record = _run(_work(5), Elastic(max_size=5), sandboxes=boxes, limits=Limits(max_starting=2))
    assert _times(record, State.STARTING) == [0, 0, 1, 1, 2]
    assert _causes(record) == {"starting_cap": 2, "boot": 1, "work": 10}


def test_the_client_waits_for_its_calls_only() -> None:
    boxes = Sandboxes(api=Constant(value_s=1.0), boot=Constant(value_s=5.0))
    limits = Limits(client_concurrency=2)
    record = _run(_work(5), Elastic(max_size=5), sandboxes=boxes, limits=limits)
    assert _times(record, State.STARTING) == [0, 0, 1, 1, 2]
    assert _causes(record) == {"client": 2, "api": 1, "boot": 5, "work": 10}


@pytest.mark.parametrize(("counts", "end_s"), [(True, 23.0), (False, 20.0)])
def test_teardown_holds_the_quota_if_it_counts(counts: bool, end_s: float) -> None:
    boxes = Sandboxes(teardown=Constant(value_s=3.0))
    limits = Limits(max_live=2, teardown_counts=counts)
    record = _run(_work(4), Elastic(max_size=2, max_uses=1), sandboxes=boxes, limits=limits)
    assert record.steps[0].rollouts_s == end_s
    assert _causes(record).get("quota", 0) == end_s - 20


def test_a_sandbox_that_dies_is_noticed_then_replaced() -> None:
    """Attempt 0 of rollout 0 dies; the time of that, the detection and the back-off are lost."""
    rollouts = _work(1, fail_ratio=0.999, retries=Retries(max_retries=2, initial_delay_s=4.0))
    boxes = Sandboxes(boot=Constant(value_s=1.0), detection_s=0.5)
    record = _run(rollouts, Elastic(max_size=1), sandboxes=boxes)
    assert (record.num_died, record.steps[0].num_dropped) == (3, 1)
    causes = _causes(record)
    assert causes["backoff"] == 4 + 8
    # The second start happens during the back-off: the pool replaces what died when it is noticed.
    assert causes["boot"] == 1
    lost_s = record.sandbox_ns["lost"] / SECOND
    assert lost_s == 3 * 0.5
    assert causes["retry"] == pytest.approx(record.sandbox_ns["working"] / SECOND + lost_s)


def test_back_off_grows_to_its_maximum_and_jitter_shortens_it() -> None:
    retries = Retries(max_retries=6, initial_delay_s=1.0, max_delay_s=5.0)
    plain = _run(_work(1, fail_ratio=0.9999, retries=retries), Elastic(max_size=1))
    assert plain.num_died == 7
    assert _causes(plain)["backoff"] == 1 + 2 + 4 + 5 + 5 + 5
    jittered = msgspec.structs.replace(retries, jitter_ratio=0.5)
    found = _run(_work(1, fail_ratio=0.9999, retries=jittered), Elastic(max_size=1))
    assert 11 < _causes(found)["backoff"] < 22


def test_a_lifetime_ends_a_sandbox_under_its_rollout() -> None:
    record = _run(_work(4), Elastic(max_size=1), sandboxes=Sandboxes(lifetime_s=25.0))
    assert record.num_expired == 1
    assert record.steps[0].rollouts_s == 25 + 20
    assert record.sandbox_ns["working"] == 45 * SECOND


def test_a_lifetime_ends_an_idle_sandbox_and_the_pool_replaces_it() -> None:
    training = Training(steps=2, train=Constant(value_s=100.0))
    boxes = Sandboxes(lifetime_s=60.0, prewarmed=2)
    record = _run(_work(2), FixedPool(size=2), sandboxes=boxes, training=training)
    assert _times(record, State.GONE) == [60, 60, 120, 120, 180, 180]
    assert record.num_expired == 6 and record.num_left == 2


def test_a_time_out_cuts_the_action_and_spares_the_sandbox() -> None:
    rollouts = Rollouts(prompts=2, work=Empirical(values_s=(3.0, 50.0)), timeout_s=5.0)
    runs = [_run(rollouts, Elastic(max_size=1), seed=seed) for seed in range(20)]
    assert {r.steps[0].rollouts_s for r in runs} == {6.0, 8.0, 10.0}
    assert {r.num_timeouts for r in runs} == {0, 1, 2}
    assert all(r.num_started == 1 and r.steps[0].num_done == 2 for r in runs)


def test_a_start_that_fails_is_made_again() -> None:
    boxes = Sandboxes(boot=Constant(value_s=1.0), start_fail_ratio=0.5)
    for policy in (Elastic(max_size=8), OnePerRollout(max_size=8)):
        record = _run(_work(8), policy, sandboxes=boxes)
        assert record.num_start_failed > 0
        assert record.steps[0].num_done == record.num_served == 8
        assert record.num_started == 8 + record.num_start_failed


def test_an_episode_keeps_its_sandbox_while_it_thinks() -> None:
    rollouts = _work(2, 1.0, turns=3, think=Constant(value_s=2.0))
    record = _run(rollouts, Elastic(max_size=1))
    assert record.steps[0].rollouts_s == 2 + (1 + 2 + 1 + 2 + 1) * 2
    assert record.sandbox_ns["held"] == 2 * 2 * 2 * SECOND
    assert _causes(record) == {"think": 6, "work": 3, "capacity": 7}
    assert record.steps[0].blocked_s == 10


def test_actions_share_a_sandbox() -> None:
    rollouts = _work(2, 1.0, turns=3, think=Constant(value_s=2.0), hold="action")
    record = _run(rollouts, Elastic(max_size=1))
    assert record.steps[0].rollouts_s == 10
    assert record.sandbox_ns["held"] == 0 and record.num_served == 6


def test_an_episode_begins_anew_where_an_action_is_only_repeated() -> None:
    think = Exponential(mean_s=2.0)
    for hold in ("episode", "action"):
        rollouts = _work(30, 1.0, turns=4, think=think, hold=hold, fail_ratio=0.2,
                         retries=Retries(max_retries=50))  # fmt: skip
        record = _run(rollouts, Elastic(max_size=30))
        assert record.num_died > 10
        served = 30 + record.num_died if hold == "episode" else 120 + record.num_died
        assert record.num_served == served
        _causes(record)


def test_a_class_serves_its_own_prompts_only() -> None:
    boxes = Sandboxes(classes=2, boot=Constant(value_s=1.0))
    record = _run(_work(3), FixedPool(size=2), sandboxes=boxes)
    # Prompts 0 and 2 need class 0, prompt 1 class 1: one sandbox each.
    assert record.steps[0].rollouts_s == 21
    assert record.num_started == 2


def test_groups_share_a_class() -> None:
    rollouts = Rollouts(prompts=2, group_size=3, work=Constant(value_s=10.0))
    record = _run(rollouts, Elastic(max_size=6), sandboxes=Sandboxes(classes=2))
    assert record.steps[0].rollouts_s == 10 and record.num_started == 6


def test_a_crowded_start_sees_all_that_start_with_it() -> None:
    boot = Crowded(base=Constant(value_s=1.0), counts=(1, 11), factors=(1.0, 11.0))
    together = _run(_work(11), Elastic(max_size=11), sandboxes=Sandboxes(boot=boot))
    assert _causes(together)["boot"] == 11
    limits = Limits(max_starting=1)
    alone = _run(_work(11), Elastic(max_size=11), sandboxes=Sandboxes(boot=boot), limits=limits)
    assert _times(alone, State.STARTING)[:10] == list(range(10))


def test_early_binding_waits_for_its_own_sandbox() -> None:
    """With one slow start, late binding lets others do its work."""
    boot = Empirical(values_s=(1.0, 1.0, 1.0, 100.0))
    boxes = Sandboxes(boot=boot)
    early = _run(_work(40), OnePerRollout(max_size=40), sandboxes=boxes)
    late = _run(_work(40), Elastic(max_size=40), sandboxes=boxes)
    assert early.steps[0].rollouts_s == 110
    assert late.steps[0].rollouts_s == 21


def test_one_per_rollout_stays_within_its_size() -> None:
    record = _run(
        _work(10), OnePerRollout(max_size=4), sandboxes=Sandboxes(boot=Constant(value_s=1.0))
    )
    assert record.steps[0].rollouts_s == 33 and record.num_started == 10


TRAINING = Training(steps=3, train=Constant(value_s=60.0), sync=Sync(seconds=5.0))
BOXES = Sandboxes(boot=Constant(value_s=20.0))


def test_an_elastic_pool_starts_again_in_each_step() -> None:
    record = _run(_work(4), Elastic(max_size=4), sandboxes=BOXES, training=TRAINING)
    assert [step.rollouts_s for step in record.steps] == [30, 30, 30]
    assert [step.step_s for step in record.steps] == [95, 95, 95]
    assert record.num_started == 12 and record.sandbox_ns["idle"] == 0


def test_a_warm_pool_waits_through_the_training() -> None:
    policy = KeepWarm(warm=4, max_size=4)
    record = _run(_work(4), policy, sandboxes=BOXES, training=TRAINING)
    assert [step.rollouts_s for step in record.steps] == [30, 10, 10]
    assert record.sandbox_ns["idle"] == 3 * 4 * 65 * SECOND


def test_a_lead_starts_sandboxes_just_before_the_step() -> None:
    policy = Lead(max_size=4, lead_s=20.0)
    record = _run(_work(4), policy, sandboxes=BOXES, training=TRAINING)
    assert [step.rollouts_s for step in record.steps] == [30, 10, 10]
    assert record.sandbox_ns["idle"] == 0
    short = _run(_work(4), Lead(max_size=4, lead_s=8.0), sandboxes=BOXES, training=TRAINING)
    assert [step.rollouts_s for step in short.steps] == [30, 22, 22]


def test_causes_name_training_and_sync() -> None:
    record = _run(_work(1), Elastic(max_size=1), training=TRAINING)
    assert _causes(record, 2) == {"work": 10, "train": 60, "sync": 5}
    assert record.steps[2].blocked_s == 10


def test_costs_are_those_of_the_record() -> None:
    prices = Prices(gpus=8, gpu_per_s=0.001, cores=2.0, core_per_s=4e-5, gib=4.0, gib_per_s=7e-6)
    policy = KeepWarm(warm=4, max_size=4)
    record = _run(_work(4), policy, sandboxes=BOXES, training=TRAINING)
    found = cost(record, prices)
    per_s = 2 * 4e-5 + 4 * 7e-6
    assert found.gpu == pytest.approx(8 * 0.001 * (95 + 75 + 75))
    assert found.gpu_blocked == pytest.approx(8 * 0.001 * (30 + 10 + 10))
    assert found.sandbox_idle == pytest.approx(per_s * 3 * 4 * 65)
    assert found.sandbox == pytest.approx(per_s * 4 * (20 + 3 * 10 + 3 * 65))
    free = msgspec.structs.replace(prices, starting_is_billed=False)
    assert found.sandbox - cost(record, free).sandbox == pytest.approx(per_s * 4 * 20)


def test_an_elastic_pool_takes_back_what_still_waits() -> None:
    record = _run(_work(12, 1.0), Elastic(max_size=12), limits=Limits(rate_per_s=1.0, burst=5))
    # 5 at 0 s, one more each second: at 1 s five are done, seven remain, six sandboxes wait.
    assert record.num_cancelled == 5
    assert record.num_started + record.num_cancelled == record.num_asked
    # The newest are taken back, so those that started are the first that were asked for.
    started = [row.number for row in record.trace if row.kind == 0 and row.state == State.STARTING]
    assert started == list(range(record.num_started))


def test_what_an_episode_lost_is_no_work() -> None:
    rollouts = _work(1, 1.0, turns=4, think=Constant(value_s=2.0), fail_ratio=0.3,
                     retries=Retries(max_retries=100))  # fmt: skip
    runs = [_run(rollouts, Elastic(max_size=1), seed=seed) for seed in range(10)]
    assert sum(record.num_died for record in runs) > 10
    for record in runs:
        causes = _causes(record)
        assert (causes["work"], causes["think"]) == (4, 8)
        assert ("retry" in causes) == (record.num_died > 0)


def test_a_sandbox_may_expire_before_it_is_ready() -> None:
    boot = Empirical(values_s=(*[1.0] * 9, 50.0))
    boxes = Sandboxes(boot=boot, lifetime_s=20.0)
    limits = Limits(max_starting=4)
    record = _run(_work(60, 5.0), Elastic(max_size=60, max_uses=1), sandboxes=boxes, limits=limits)
    assert record.num_expired > 0 and record.steps[0].num_done == 60
    assert max(record.steps[0].causes_ns["boot"], SECOND) == SECOND


def test_a_dead_sandbox_costs_nothing() -> None:
    rollouts = _work(20, fail_ratio=0.5, retries=Retries(max_retries=50))
    record = _run(rollouts, Elastic(max_size=20), sandboxes=Sandboxes(detection_s=3.0))
    prices = Prices(gpus=0, gpu_per_s=0.0, cores=1.0, core_per_s=1.0, gib=0.0, gib_per_s=0.0)
    assert record.sandbox_ns["lost"] == record.num_died * 3 * SECOND > 0
    alive_ns = record.sandbox_ns["working"] + record.sandbox_ns["idle"]
    assert cost(record, prices).sandbox == pytest.approx(alive_ns / SECOND)


def test_at_one_instant_actions_end_before_teardowns() -> None:
    """Sandbox 0 is torn down from 3 to 6 s, sandbox 1 works from 3 to 6 s."""
    boxes = Sandboxes(teardown=Constant(value_s=3.0))
    limits = Limits(rate_per_s=1 / 3)
    record = _run(_work(3, 3.0), Elastic(max_size=3, max_uses=1), sandboxes=boxes, limits=limits)
    at_6 = [(row.number, row.state) for row in record.trace if row.time_ns == 6 * SECOND]
    sandboxes = [row for row in at_6 if row in {(1, State.STOPPING), (0, State.GONE)}]
    assert sandboxes == [(1, State.STOPPING), (0, State.GONE)]


class _Stub:
    """A policy that says what it is told to say."""

    binding = "late"
    max_uses = None

    def __init__(self, *decisions: Decision, forever: Decision | None = None) -> None:
        self._decisions, self._forever = list(decisions), forever or Decision()

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        at = memory[0] if memory else 0
        decisions = self._decisions
        return decisions[at] if at < len(decisions) else self._forever, (at + 1,)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            _Stub(),
            "step 0 cannot end: 0 rollouts .*, 2 of class 0 wait.*_Stub asks for no",
        ),
        (
            _Stub(forever=Decision((Create(0, 1),))),
            "2000 changes by 0 s and no end: either the policy does not settle, or",
        ),
        (_Stub(Decision((Create(1, 1),))), "expected a class below 1"),
        (_Stub(Decision((Create(0, 0),))), "a count of at least 1"),
        (_Stub(Decision((Terminate(0, 1),))), "only 0 sandboxes are idle"),
        (_Stub(Decision((Cancel(0, 1),))), "only 0 sandboxes are pending"),
        (_Stub(Decision((Create(0, 3, is_bound=True),))), "only 2 rollouts of that class wait"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_with_the_reason(policy: Policy, text: str) -> None:
    scenario = msgspec.structs.replace(one_step(2, 2), max_changes=2000)
    with pytest.raises(SimulationError, match=text):
        simulate(scenario, policy=policy)


def test_a_run_in_no_time_at_all_ends() -> None:
    """3,000 rollouts one after another at one instant: legal, and no sign of a bad policy."""
    record = simulate(one_step(3000, 1, work=Constant(value_s=0.0), max_uses=1))
    assert record.end_ns == 0 and record.num_started == 3000
    short = msgspec.structs.replace(one_step(3000, 1, work=Constant(value_s=0.0)), max_changes=100)
    with pytest.raises(SimulationError, match="100 changes by 0 s and no end"):
        simulate(short)


def test_a_wait_behind_a_failed_start_is_charged_to_it() -> None:
    """Limits to limits, the start itself to start_failed: bound late or early."""
    boxes = Sandboxes(boot=Constant(value_s=3.0), start_fail_ratio=0.9)
    for policy in (Elastic(max_size=1), OnePerRollout(max_size=1)):
        limits = Limits(rate_per_s=0.2)
        record = _run(_work(1), policy, sandboxes=boxes, limits=limits, seed=3)
        failed = record.num_start_failed
        assert failed > 1
        causes = _causes(record)
        # The limit lets one pass every 5 s, a start takes 3.
        assert causes == {"start_failed": 3 * failed, "rate": 2 * failed, "boot": 3, "work": 10}
        assert record.steps[0].all_causes_ns == record.steps[0].causes_ns


def test_a_wait_in_the_midst_of_resets_counts_their_part_only() -> None:
    """Rollout 3 comes 1 s into the reset after the first use, and waits for two more."""
    rollouts = Rollouts(prompts=4, work=Constant(value_s=10.0),
                        arrival_gap=Empirical(values_s=(3.0,)))  # fmt: skip
    boxes = Sandboxes(reset=Constant(value_s=4.0), prewarmed=1)
    record = _run(rollouts, FixedPool(size=1), sandboxes=boxes)
    # Served at 3, 17, 31 and 45 s; the last came at 12 s, before the first reset, from 13 to 17 s.
    assert _causes(record) == {"arrival": 12, "capacity": 1 + 10 + 10, "reset": 12, "work": 10}
    late = msgspec.structs.replace(rollouts, arrival_gap=Constant(value_s=3.75))
    found = _causes(_run(late, FixedPool(size=1), sandboxes=boxes))
    # Served at 3.75, 17.75, 31.75, 45.75; the last came at 15 s, in the reset from 13.75 on.
    assert found == {"arrival": 15, "capacity": 20, "reset": 2.75 + 8, "work": 10}


def test_no_class_waits_for_ever_behind_another() -> None:
    """Class 0 has work all the time; class 1 comes later, and drains half of the pool."""
    rollouts = Rollouts(prompts=12, group_size=4, work=Constant(value_s=10.0),
                        arrival_gap=Constant(value_s=0.25))  # fmt: skip
    for policy in (Elastic(max_size=4), KeepWarm(warm=2, max_size=4)):
        record = _run(rollouts, policy, sandboxes=Sandboxes(classes=2))
        cls = {n: n // 4 % 2 for n in range(48)}
        served = [(row.time_ns, cls[row.number]) for row in record.trace
                  if (row.kind, row.state) == (1, 3)]  # fmt: skip
        early = [c for at, c in served if at <= 60 * SECOND]
        assert abs(early.count(0) - early.count(1)) <= 4
        assert record.steps[0].num_done == 48


class _Counting(_Stub):
    """Notes when it is asked, and what changed."""

    def __init__(self, wakes_ns: dict[int, int | None]) -> None:
        super().__init__()
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self._wakes_ns = wakes_ns

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        self.asked.append((view.now_ns // SECOND, tuple(view.changed)))
        found, memory = Elastic(max_size=4).decide(view, memory)
        wake = self._wakes_ns.get(view.now_ns // SECOND)
        return Decision(found.actions, None if wake is None else wake * SECOND), memory


def test_a_policy_is_asked_once_at_the_begin_and_then_at_changes_and_wakes() -> None:
    """A wake that a later decision does not repeat is void."""
    policy = _Counting({0: 7, 2: 7, 7: 8, 8: 12, 10: None})
    boxes = Sandboxes(classes=2, boot=Constant(value_s=2.0))
    training = Training(steps=2, train=Constant(value_s=5.0))
    record = simulate(
        Scenario(name="x", rollouts=_work(1, 8.0), policy=Elastic(max_size=4), training=training,
                 sandboxes=msgspec.structs.replace(boxes, classes=1)),
        policy=policy,
    )  # fmt: skip
    # Begin, ready, wakes, done, the next step, ready and done; nothing at 12 s.
    assert [at for at, _ in policy.asked] == [0, 2, 7, 8, 10, 15, 17, 25]
    assert [cls for _, cls in policy.asked] == [(0,), (0,), (), (), (0,), (0,), (0,), (0,)]
    assert record.num_decisions == len(policy.asked)


def test_waits_are_counted_by_their_length() -> None:
    record = _run(_work(5, 1.0), Elastic(max_size=1))
    assert record.wait_counts[0] == 1 and sum(record.wait_counts) == 5
    assert record.wait_counts[30:33] == (1, 1, 2)  # 1 s; 2 s; 3 and 4 s


def test_a_run_ends_at_its_horizon_with_the_reason() -> None:
    scenario = msgspec.structs.replace(one_step(4, 1), horizon_s=25.0)
    with pytest.raises(SimulationError, match=r"not over after horizon_s, 25 s, with 2 of 4"):
        simulate(scenario)


def test_a_policy_of_your_own_runs() -> None:
    record = simulate(one_step(4, 4), policy=_Stub(Decision((Create(0, 2),))))
    assert record.steps[0].rollouts_s == 20


def test_the_same_numbers_come_whatever_the_policy() -> None:
    """Common random numbers: without failures, pools of any size do the same work."""
    law = Lognormal(median_s=2.0, sigma=1.0)
    work = {simulate(one_step(50, size, work=law)).sandbox_ns["working"] for size in (1, 7, 50)}
    assert len(work) == 1


def test_replications_and_seeds_differ_and_a_trace_changes_nothing() -> None:
    scenario = one_step(50, 10, work=Exponential(mean_s=1.0), fail_ratio=0.05)
    first, again = simulate(scenario, keep_trace=True), simulate(scenario)
    bare = msgspec.structs.replace(first, digest="", trace=())
    assert again == bare
    assert simulate(scenario, replication=1).end_ns != first.end_ns
    assert simulate(msgspec.structs.replace(scenario, seed=1)).end_ns != first.end_ns


def test_no_sandbox_of_a_larger_pool_is_slower_without_failures() -> None:
    """First come, first served, the same work for each rollout: Graham's anomalies need more."""
    law = Lognormal(median_s=2.0, sigma=1.0)
    for seed in range(5):
        runs = [one_step(60, k, work=law, prewarmed=k, seed=seed) for k in (2, 5, 9, 30, 60)]
        steps = [simulate(run).end_ns for run in runs]
        assert steps == sorted(steps, reverse=True)


def test_a_missing_simpy_is_named_with_its_extra() -> None:
    program = (
        "import sys; sys.modules['simpy'] = None\n"
        "import gymfast_sim.laws, gymfast_sim.scenario, gymfast_sim.presets\n"
        "import gymfast_sim.engine_simpy"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert "MissingDependencyError: " in done.stderr
    assert "needs simpy: pip install 'gymfast[sim]'" in done.stderr


def test_another_process_gives_the_same_record() -> None:
    program = (
        "from gymfast_sim.engine_simpy import simulate\n"
        "from gymfast_sim.scenario import Scenario\nimport sys\n"
        "print(simulate(Scenario.from_toml(sys.stdin.read()), keep_trace=True).digest)"
    )
    scenario = one_step(40, 9, work=Lognormal(median_s=2.0, sigma=1.0), fail_ratio=0.1)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        input=scenario.to_toml(),
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == simulate(scenario, keep_trace=True).digest


def test_a_hang_lasts_until_the_time_out_and_is_lost() -> None:
    rollouts = _work(1, 1.0, hang_ratio=0.5, timeout_s=20.0, retries=Retries(max_retries=50))
    runs = [_run(rollouts, Elastic(max_size=1), seed=seed) for seed in range(12)]
    assert sum(record.num_hung for record in runs) > 4
    for record in runs:
        assert record.steps[0].rollouts_s == 1 + 20 * record.num_hung
        assert _causes(record).get("retry", 0) == 20 * record.num_hung


def test_a_lost_completion_is_noticed_by_the_watchdog() -> None:
    rollouts = _work(1, 1.0, lost_ratio=0.5, watchdog_s=30.0, retries=Retries(max_retries=50))
    runs = [_run(rollouts, Elastic(max_size=1), seed=seed) for seed in range(12)]
    assert sum(record.num_lost_completions for record in runs) > 4
    for record in runs:
        assert record.steps[0].rollouts_s == 1 + 30 * record.num_lost_completions


def test_a_preempted_sandbox_dies_under_its_rollout() -> None:
    boxes = Sandboxes(preempted_after=Empirical(values_s=(6.0, 500.0)))
    runs = [_run(_work(1), Elastic(max_size=1), sandboxes=boxes, seed=s) for s in range(12)]
    assert sum(record.num_preempted for record in runs) > 4
    for record in runs:
        assert record.steps[0].rollouts_s == 10 + 6 * record.num_preempted


def test_a_refused_creation_tries_again_after_its_back_off() -> None:
    """One passes at 0 s; the second is refused at 0, 1 and 3 s, and passes at 7."""
    refused = Retries(initial_delay_s=1.0)
    limits = Limits(rate_per_s=0.2, refused=refused)
    record = _run(_work(2), Elastic(max_size=2), limits=limits)
    assert _times(record, State.STARTING) == [0, 7]
    assert record.num_refused == 3
    assert _causes(record) == {"rate": 7, "work": 10}


def test_jitter_spreads_refused_creations() -> None:
    limits = Limits(rate_per_s=10.0, refused=Retries(initial_delay_s=1.0, max_delay_s=2.0))
    plain = _run(_work(40), Elastic(max_size=40), limits=limits)
    spread = msgspec.structs.replace(limits, refused=Retries(initial_delay_s=1.0, max_delay_s=2.0,
                                                            jitter_ratio=1.0))  # fmt: skip
    jittered = _run(_work(40), Elastic(max_size=40), limits=spread)
    # Without it all come back at the same moments, of which each lets one pass.
    times = _times(plain, State.STARTING)
    assert len(set(times)) == len(times) > 10
    assert jittered.end_ns < plain.end_ns


def test_thoughts_wait_for_their_slot_on_the_gpus() -> None:
    rollouts = _work(4, 1.0, think=Constant(value_s=5.0), gpu_slots=2)
    record = _run(rollouts, Elastic(max_size=4))
    assert record.steps[0].rollouts_s == 11
    assert _causes(record) == {"gpu": 5, "think": 5, "work": 1}
    assert record.steps[0].all_causes_ns["gpu"] == 2 * 5 * SECOND


def test_what_is_given_up_frees_its_slot_and_its_sandbox() -> None:
    think = Empirical(values_s=(1.0, 1.0, 1.0, 100.0))
    rollouts = _work(8, 1.0, think=think, turns=2, gpu_slots=4, enough=4)
    training = Training(steps=4, train=Constant(value_s=5.0))
    for policy in (Elastic(max_size=8), OnePerRollout(max_size=3)):
        record = _run(rollouts, policy, training=training)
        assert {(s.num_done, s.num_aborted) for s in record.steps} == {(4, 4)}
        for step in range(4):
            _causes(record, step)
        busy = [row for row in record.trace if row.kind == 0][-1]
        assert busy.time_ns < record.end_ns
        assert record.num_left == 0


def test_one_step_off_trains_while_rollouts_run() -> None:
    training = Training(mode="one-step-off", steps=3, train=Constant(value_s=25.0),
                        sync=Sync(seconds=2.0))  # fmt: skip
    record = _run(_work(2), Elastic(max_size=2), training=training)
    assert [step.step_s for step in record.steps] == [12, 27, 27]
    assert _causes(record, 1) == {"work": 10, "train": 15, "sync": 2}


def test_an_asynchronous_trainer_takes_batches_as_they_come() -> None:
    training = Training(mode="async", steps=3, in_flight=2, train=Constant(value_s=4.0))
    record = _run(_work(4), Elastic(max_size=2), training=training)
    # Two are done every 10 s: batches of four at 20, 40 and 60 s.
    assert [step.rollouts_end_ns // SECOND for step in record.steps] == [20, 40, 60]
    assert _causes(record, 1) == {"starved": 16, "train": 4}
    assert [step.staleness for step in record.steps] == [0, 2, 2]


def test_means_leave_the_warm_up_out() -> None:
    training = Training(steps=3, warm_up_steps=1, train=Constant(value_s=60.0))
    record = _run(_work(4), KeepWarm(warm=4, max_size=4), sandboxes=BOXES, training=training)
    assert [step.step_s for step in record.steps] == [90, 70, 70]
    assert record.mean_step_s == 70


def test_occupancy_is_what_was_there_at_the_points_of_a_grid() -> None:
    boxes = Sandboxes(boot=Constant(value_s=2.5))
    record = _run(_work(3, 3.0), Elastic(max_size=2), sandboxes=boxes, grid_s=1.0)
    by_state = list(zip(*record.occupancy, strict=True))
    assert by_state[State.STARTING] == (2, 2, 2, 0, 0, 0, 0, 0, 0)
    assert by_state[State.WORKING] == (0, 0, 0, 2, 2, 2, 1, 1, 1)


@pytest.mark.parametrize(
    "policy",
    [
        Hedged(max_size=12, extra_ratio=0.5),
        ClaimBackfill(size=3, max_size=12, top_up_s=30.0),
        TickRefill(size=6),
        Reactive(max_size=12),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_every_policy_brings_a_run_to_its_end(policy: Policy) -> None:
    boxes = Sandboxes(classes=2, boot=Exponential(mean_s=2.0), start_fail_ratio=0.05)
    training = Training(steps=3, train=Constant(value_s=20.0))
    rollouts = _work(6, 3.0, group_size=2, fail_ratio=0.05)
    record = _run(rollouts, policy, sandboxes=boxes, training=training)
    for step in range(3):
        _causes(record, step)
        assert record.steps[step].num_done == 12


def test_a_tick_refill_is_as_slow_as_its_ticks() -> None:
    """Four at a time, awaited for 2 s, then a pause of 1 s."""
    boxes = Sandboxes(boot=Constant(value_s=2.0))
    record = _run(_work(12, 100.0), TickRefill(size=12), sandboxes=boxes)
    assert sorted(set(_times(record, State.STARTING)[:12])) == [0, 3, 6]


@pytest.mark.parametrize(
    ("rollouts", "boxes", "text"),
    [
        ({"is_partial": True}, {}, "rollouts.is_partial"),
        ({"grading": TEN}, {}, "rollouts.grading"),
        ({"gpu_speed": (1.0, 1.5)}, {}, "rollouts.gpu_speed"),
        ({"group_fail": "retry"}, {}, "rollouts.group_fail = 'retry'"),
        ({}, {"leak_ratio": 0.1}, "sandboxes.leak_ratio"),
        ({}, {"new_classes": 1}, "sandboxes.new_classes"),
        ({}, {"snapshot": TEN}, "sandboxes.snapshot"),
        ({}, {"resume": TEN}, "sandboxes.resume"),
        ({}, {"table": (ClassSettings(name="a", prompts=1),)}, "sandboxes.table"),
    ],
)
def test_what_no_engine_does_yet_is_refused(
    rollouts: dict[str, object], boxes: dict[str, object], text: str
) -> None:
    with pytest.raises(NotSimulatedError, match=f"not simulated yet: {text}"):
        _run(_work(2, **rollouts), Elastic(max_size=2), sandboxes=Sandboxes(**boxes))  # type: ignore[arg-type]
    with pytest.raises(NotSimulatedError, match="policy = 'snapshot-resume'"):
        _run(_work(2), SnapshotResume(max_size=2))
