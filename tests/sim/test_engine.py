"""The reference engine: worked examples of docs/simulator.md, one rule each."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from sim_scenarios import SECOND, causes_of, one_step, record_of, times_of, work_of

from gymfast.sandbox.policies import (
    Elastic,
    FixedPool,
    KeepWarm,
    Lead,
    OnePerRollout,
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
from gymfast_sim.records import State, cost
from gymfast_sim.scenario import (
    Limits,
    Prices,
    Retries,
    Rollouts,
    Sandboxes,
    Scenario,
    Sync,
    Training,
)


def test_a_start_is_charged_phase_by_phase() -> None:
    phases = {
        n: Constant(value_s=s)
        for n, s in zip(("api", "queue", "boot", "setup"), (1, 2, 3, 4), strict=True)
    }
    record = record_of(work_of(1), Elastic(max_size=1), sandboxes=Sandboxes(**phases))  # type: ignore[arg-type]
    assert causes_of(record) == {"api": 1, "queue": 2, "boot": 3, "setup": 4, "work": 10}
    assert record.steps[0].blocked_s == 20.0


def test_a_wait_for_a_sandbox_that_serves_others_is_capacity() -> None:
    boxes = Sandboxes(boot=Constant(value_s=1.0), reset=Constant(value_s=2.0))
    record = record_of(work_of(3), Elastic(max_size=1), sandboxes=boxes)
    assert causes_of(record) == {"boot": 1, "capacity": 20, "reset": 4, "work": 10}
    assert record.steps[0].all_causes_ns["reset"] == (2 + 4) * SECOND


def test_the_rate_lets_one_pass_at_a_time() -> None:
    record = record_of(work_of(4), Elastic(max_size=4), limits=Limits(rate_per_s=0.5, burst=2))
    assert times_of(record, State.STARTING) == [0, 0, 2, 4]
    assert causes_of(record) == {"rate": 4, "work": 10}


def test_the_cap_on_starting_makes_waves() -> None:
    boxes = Sandboxes(boot=Constant(value_s=1.0))
    record = record_of(
        work_of(5), Elastic(max_size=5), sandboxes=boxes, limits=Limits(max_starting=2)
    )
    assert times_of(record, State.STARTING) == [0, 0, 1, 1, 2]
    assert causes_of(record) == {"starting_cap": 2, "boot": 1, "work": 10}


def test_the_client_waits_for_its_calls_only() -> None:
    boxes = Sandboxes(api=Constant(value_s=1.0), boot=Constant(value_s=5.0))
    limits = Limits(client_concurrency=2)
    record = record_of(work_of(5), Elastic(max_size=5), sandboxes=boxes, limits=limits)
    assert times_of(record, State.STARTING) == [0, 0, 1, 1, 2]
    assert causes_of(record) == {"client": 2, "api": 1, "boot": 5, "work": 10}


@pytest.mark.parametrize(("counts", "end_s"), [(True, 23.0), (False, 20.0)])
def test_teardown_holds_the_quota_if_it_counts(counts: bool, end_s: float) -> None:
    boxes = Sandboxes(teardown=Constant(value_s=3.0))
    limits = Limits(max_live=2, teardown_counts=counts)
    record = record_of(work_of(4), Elastic(max_size=2, max_uses=1), sandboxes=boxes, limits=limits)
    assert record.steps[0].rollouts_s == end_s
    assert causes_of(record).get("quota", 0) == end_s - 20


def test_a_sandbox_that_dies_is_noticed_then_replaced() -> None:
    """Attempt 0 of rollout 0 dies; the time of that, the detection and the back-off are lost."""
    rollouts = work_of(1, fail_ratio=0.999, retries=Retries(max_retries=2, initial_delay_s=4.0))
    boxes = Sandboxes(boot=Constant(value_s=1.0), detection_s=0.5)
    record = record_of(rollouts, Elastic(max_size=1), sandboxes=boxes)
    assert (record.num_died, record.steps[0].num_dropped) == (3, 1)
    causes = causes_of(record)
    assert causes["backoff"] == 4 + 8
    # The second start happens during the back-off: the pool replaces what died when it is noticed.
    assert causes["boot"] == 1
    lost_s = record.sandbox_ns["lost"] / SECOND
    assert lost_s == 3 * 0.5
    assert causes["retry"] == pytest.approx(record.sandbox_ns["working"] / SECOND + lost_s)


def test_back_off_grows_to_its_maximum_and_jitter_shortens_it() -> None:
    retries = Retries(max_retries=6, initial_delay_s=1.0, max_delay_s=5.0)
    plain = record_of(work_of(1, fail_ratio=0.9999, retries=retries), Elastic(max_size=1))
    assert plain.num_died == 7
    assert causes_of(plain)["backoff"] == 1 + 2 + 4 + 5 + 5 + 5
    jittered = msgspec.structs.replace(retries, jitter_ratio=0.5)
    found = record_of(work_of(1, fail_ratio=0.9999, retries=jittered), Elastic(max_size=1))
    assert 11 < causes_of(found)["backoff"] < 22


def test_a_lifetime_ends_a_sandbox_under_its_rollout() -> None:
    record = record_of(work_of(4), Elastic(max_size=1), sandboxes=Sandboxes(lifetime_s=25.0))
    assert record.num_expired == 1
    assert record.steps[0].rollouts_s == 25 + 20
    assert record.sandbox_ns["working"] == 45 * SECOND


def test_a_lifetime_ends_an_idle_sandbox_and_the_pool_replaces_it() -> None:
    training = Training(steps=2, train=Constant(value_s=100.0))
    boxes = Sandboxes(lifetime_s=60.0, prewarmed=2)
    record = record_of(work_of(2), FixedPool(size=2), sandboxes=boxes, training=training)
    assert times_of(record, State.GONE) == [60, 60, 120, 120, 180, 180]
    assert record.num_expired == 6 and record.num_left == 2


def test_a_time_out_cuts_the_action_and_spares_the_sandbox() -> None:
    rollouts = Rollouts(prompts=2, work=Empirical(values_s=(3.0, 50.0)), timeout_s=5.0)
    runs = [record_of(rollouts, Elastic(max_size=1), seed=seed) for seed in range(20)]
    assert {r.steps[0].rollouts_s for r in runs} == {6.0, 8.0, 10.0}
    assert {r.num_timeouts for r in runs} == {0, 1, 2}
    assert all(r.num_started == 1 and r.steps[0].num_done == 2 for r in runs)


def test_a_start_that_fails_is_made_again() -> None:
    boxes = Sandboxes(boot=Constant(value_s=1.0), start_fail_ratio=0.5)
    for policy in (Elastic(max_size=8), OnePerRollout(max_size=8)):
        record = record_of(work_of(8), policy, sandboxes=boxes)
        assert record.num_start_failed > 0
        assert record.steps[0].num_done == record.num_served == 8
        assert record.num_started == 8 + record.num_start_failed


def test_an_episode_keeps_its_sandbox_while_it_thinks() -> None:
    rollouts = work_of(2, 1.0, turns=3, think=Constant(value_s=2.0))
    record = record_of(rollouts, Elastic(max_size=1))
    assert record.steps[0].rollouts_s == 2 + (1 + 2 + 1 + 2 + 1) * 2
    assert record.sandbox_ns["held"] == 2 * 2 * 2 * SECOND
    assert causes_of(record) == {"think": 6, "work": 3, "capacity": 7}
    assert record.steps[0].blocked_s == 10


def test_actions_share_a_sandbox() -> None:
    rollouts = work_of(2, 1.0, turns=3, think=Constant(value_s=2.0), hold="action")
    record = record_of(rollouts, Elastic(max_size=1))
    assert record.steps[0].rollouts_s == 10
    assert record.sandbox_ns["held"] == 0 and record.num_served == 6


def test_an_episode_begins_anew_where_an_action_is_only_repeated() -> None:
    think = Exponential(mean_s=2.0)
    for hold in ("episode", "action"):
        rollouts = work_of(30, 1.0, turns=4, think=think, hold=hold, fail_ratio=0.2,
                         retries=Retries(max_retries=50))  # fmt: skip
        record = record_of(rollouts, Elastic(max_size=30))
        assert record.num_died > 10
        served = 30 + record.num_died if hold == "episode" else 120 + record.num_died
        assert record.num_served == served
        causes_of(record)


def test_a_class_serves_its_own_prompts_only() -> None:
    boxes = Sandboxes(classes=2, boot=Constant(value_s=1.0))
    record = record_of(work_of(3), FixedPool(size=2), sandboxes=boxes)
    # Prompts 0 and 2 need class 0, prompt 1 class 1: one sandbox each.
    assert record.steps[0].rollouts_s == 21
    assert record.num_started == 2


def test_groups_share_a_class() -> None:
    rollouts = Rollouts(prompts=2, group_size=3, work=Constant(value_s=10.0))
    record = record_of(rollouts, Elastic(max_size=6), sandboxes=Sandboxes(classes=2))
    assert record.steps[0].rollouts_s == 10 and record.num_started == 6


def test_a_crowded_start_sees_all_that_start_with_it() -> None:
    boot = Crowded(base=Constant(value_s=1.0), counts=(1, 11), factors=(1.0, 11.0))
    together = record_of(work_of(11), Elastic(max_size=11), sandboxes=Sandboxes(boot=boot))
    assert causes_of(together)["boot"] == 11
    limits = Limits(max_starting=1)
    alone = record_of(
        work_of(11), Elastic(max_size=11), sandboxes=Sandboxes(boot=boot), limits=limits
    )
    assert times_of(alone, State.STARTING)[:10] == list(range(10))


def test_early_binding_waits_for_its_own_sandbox() -> None:
    """With one slow start, late binding lets others do its work."""
    boot = Empirical(values_s=(1.0, 1.0, 1.0, 100.0))
    boxes = Sandboxes(boot=boot)
    early = record_of(work_of(40), OnePerRollout(max_size=40), sandboxes=boxes)
    late = record_of(work_of(40), Elastic(max_size=40), sandboxes=boxes)
    assert early.steps[0].rollouts_s == 110
    assert late.steps[0].rollouts_s == 21


def test_one_per_rollout_stays_within_its_size() -> None:
    record = record_of(
        work_of(10), OnePerRollout(max_size=4), sandboxes=Sandboxes(boot=Constant(value_s=1.0))
    )
    assert record.steps[0].rollouts_s == 33 and record.num_started == 10


TRAINING = Training(steps=3, train=Constant(value_s=60.0), sync=Sync(seconds=5.0))
BOXES = Sandboxes(boot=Constant(value_s=20.0))


def test_an_elastic_pool_starts_again_in_each_step() -> None:
    record = record_of(work_of(4), Elastic(max_size=4), sandboxes=BOXES, training=TRAINING)
    assert [step.rollouts_s for step in record.steps] == [30, 30, 30]
    assert [step.step_s for step in record.steps] == [95, 95, 95]
    assert record.num_started == 12 and record.sandbox_ns["idle"] == 0


def test_a_warm_pool_waits_through_the_training() -> None:
    policy = KeepWarm(warm=4, max_size=4)
    record = record_of(work_of(4), policy, sandboxes=BOXES, training=TRAINING)
    assert [step.rollouts_s for step in record.steps] == [30, 10, 10]
    assert record.sandbox_ns["idle"] == 3 * 4 * 65 * SECOND


def test_a_lead_starts_sandboxes_just_before_the_step() -> None:
    policy = Lead(max_size=4, lead_s=20.0)
    record = record_of(work_of(4), policy, sandboxes=BOXES, training=TRAINING)
    assert [step.rollouts_s for step in record.steps] == [30, 10, 10]
    assert record.sandbox_ns["idle"] == 0
    short = record_of(work_of(4), Lead(max_size=4, lead_s=8.0), sandboxes=BOXES, training=TRAINING)
    assert [step.rollouts_s for step in short.steps] == [30, 22, 22]


def test_causes_name_training_and_sync() -> None:
    record = record_of(work_of(1), Elastic(max_size=1), training=TRAINING)
    assert causes_of(record, 2) == {"work": 10, "train": 60, "sync": 5}
    assert record.steps[2].blocked_s == 10


def test_costs_are_those_of_the_record() -> None:
    prices = Prices(gpus=8, gpu_per_s=0.001, cores=2.0, core_per_s=4e-5, gib=4.0, gib_per_s=7e-6)
    policy = KeepWarm(warm=4, max_size=4)
    record = record_of(work_of(4), policy, sandboxes=BOXES, training=TRAINING)
    found = cost(record, prices)
    per_s = 2 * 4e-5 + 4 * 7e-6
    assert found.gpu == pytest.approx(8 * 0.001 * (95 + 75 + 75))
    assert found.gpu_blocked == pytest.approx(8 * 0.001 * (30 + 10 + 10))
    assert found.sandbox_idle == pytest.approx(per_s * 3 * 4 * 65)
    assert found.sandbox == pytest.approx(per_s * 4 * (20 + 3 * 10 + 3 * 65))
    free = msgspec.structs.replace(prices, starting_is_billed=False)
    assert found.sandbox - cost(record, free).sandbox == pytest.approx(per_s * 4 * 20)


def test_an_elastic_pool_takes_back_what_still_waits() -> None:
    record = record_of(
        work_of(12, 1.0), Elastic(max_size=12), limits=Limits(rate_per_s=1.0, burst=5)
    )
    # 5 at 0 s, one more each second: at 1 s five are done, seven remain, six sandboxes wait.
    assert record.num_cancelled == 5
    assert record.num_started + record.num_cancelled == record.num_asked
    # The newest are taken back, so those that started are the first that were asked for.
    started = [row.number for row in record.trace if row.kind == 0 and row.state == State.STARTING]
    assert started == list(range(record.num_started))


def test_what_an_episode_lost_is_no_work() -> None:
    rollouts = work_of(1, 1.0, turns=4, think=Constant(value_s=2.0), fail_ratio=0.3,
                     retries=Retries(max_retries=100))  # fmt: skip
    runs = [record_of(rollouts, Elastic(max_size=1), seed=seed) for seed in range(10)]
    assert sum(record.num_died for record in runs) > 10
    for record in runs:
        causes = causes_of(record)
        assert (causes["work"], causes["think"]) == (4, 8)
        assert ("retry" in causes) == (record.num_died > 0)


def test_a_sandbox_may_expire_before_it_is_ready() -> None:
    boot = Empirical(values_s=(*[1.0] * 9, 50.0))
    boxes = Sandboxes(boot=boot, lifetime_s=20.0)
    limits = Limits(max_starting=4)
    record = record_of(
        work_of(60, 5.0), Elastic(max_size=60, max_uses=1), sandboxes=boxes, limits=limits
    )
    assert record.num_expired > 0 and record.steps[0].num_done == 60
    assert max(record.steps[0].causes_ns["boot"], SECOND) == SECOND


def test_a_dead_sandbox_costs_nothing() -> None:
    rollouts = work_of(20, fail_ratio=0.5, retries=Retries(max_retries=50))
    record = record_of(rollouts, Elastic(max_size=20), sandboxes=Sandboxes(detection_s=3.0))
    prices = Prices(gpus=0, gpu_per_s=0.0, cores=1.0, core_per_s=1.0, gib=0.0, gib_per_s=0.0)
    assert record.sandbox_ns["lost"] == record.num_died * 3 * SECOND > 0
    alive_ns = record.sandbox_ns["working"] + record.sandbox_ns["idle"]
    assert cost(record, prices).sandbox == pytest.approx(alive_ns / SECOND)


def test_at_one_instant_actions_end_before_teardowns() -> None:
    """Sandbox 0 is torn down from 3 to 6 s, sandbox 1 works from 3 to 6 s."""
    boxes = Sandboxes(teardown=Constant(value_s=3.0))
    limits = Limits(rate_per_s=1 / 3)
    record = record_of(
        work_of(3, 3.0), Elastic(max_size=3, max_uses=1), sandboxes=boxes, limits=limits
    )
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
        Scenario(name="x", rollouts=work_of(1, 8.0), policy=Elastic(max_size=4), training=training,
                 sandboxes=msgspec.structs.replace(boxes, classes=1)),
        policy=policy,
    )  # fmt: skip
    # Begin, ready, wakes, done, the next step, ready and done; nothing at 12 s.
    assert [at for at, _ in policy.asked] == [0, 2, 7, 8, 10, 15, 17, 25]
    assert [cls for _, cls in policy.asked] == [(0,), (0,), (), (), (0,), (0,), (0,), (0,)]
    assert record.num_decisions == len(policy.asked)


def test_waits_are_counted_by_their_length() -> None:
    record = record_of(work_of(5, 1.0), Elastic(max_size=1))
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
