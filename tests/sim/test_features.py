"""The reference engine: modes, GPU slots, what goes wrong, what is given up, what is refused."""

from __future__ import annotations

import msgspec
import pytest
from sim_scenarios import SECOND, TEN, causes_of, record_of, times_of, work_of

from gymfast.sandbox.policies import (
    ClaimBackfill,
    Elastic,
    FixedPool,
    Hedged,
    KeepWarm,
    OnePerRollout,
    Reactive,
    SnapshotResume,
    TickRefill,
)
from gymfast.sandbox.policy import (
    Policy,
)
from gymfast_sim.laws import Constant, Empirical, Exponential
from gymfast_sim.records import State
from gymfast_sim.scenario import (
    ClassSettings,
    Limits,
    NotSimulatedError,
    Retries,
    Rollouts,
    Sandboxes,
    Sync,
    Training,
)

BOXES = Sandboxes(boot=Constant(value_s=20.0))


def test_a_hang_lasts_until_the_time_out_and_is_lost() -> None:
    rollouts = work_of(1, 1.0, hang_ratio=0.5, timeout_s=20.0, retries=Retries(max_retries=50))
    runs = [record_of(rollouts, Elastic(max_size=1), seed=seed) for seed in range(12)]
    assert sum(record.num_hung for record in runs) > 4
    for record in runs:
        assert record.steps[0].rollouts_s == 1 + 20 * record.num_hung
        assert causes_of(record).get("retry", 0) == 20 * record.num_hung


def test_a_lost_completion_is_noticed_by_the_watchdog() -> None:
    rollouts = work_of(1, 1.0, lost_ratio=0.5, watchdog_s=30.0, retries=Retries(max_retries=50))
    runs = [record_of(rollouts, Elastic(max_size=1), seed=seed) for seed in range(12)]
    assert sum(record.num_lost_completions for record in runs) > 4
    for record in runs:
        assert record.steps[0].rollouts_s == 1 + 30 * record.num_lost_completions


def test_a_preempted_sandbox_dies_under_its_rollout() -> None:
    boxes = Sandboxes(preempted_after=Empirical(values_s=(6.0, 500.0)))
    runs = [record_of(work_of(1), Elastic(max_size=1), sandboxes=boxes, seed=s) for s in range(12)]
    assert sum(record.num_preempted for record in runs) > 4
    for record in runs:
        assert record.steps[0].rollouts_s == 10 + 6 * record.num_preempted


def test_a_refused_creation_tries_again_after_its_back_off() -> None:
    """One passes at 0 s; the second is refused at 0, 1 and 3 s, and passes at 7."""
    refused = Retries(initial_delay_s=1.0)
    limits = Limits(rate_per_s=0.2, refused=refused)
    record = record_of(work_of(2), Elastic(max_size=2), limits=limits)
    assert times_of(record, State.STARTING) == [0, 7]
    assert record.num_refused == 3
    assert causes_of(record) == {"rate": 7, "work": 10}


def test_jitter_spreads_refused_creations() -> None:
    limits = Limits(rate_per_s=10.0, refused=Retries(initial_delay_s=1.0, max_delay_s=2.0))
    plain = record_of(work_of(40), Elastic(max_size=40), limits=limits)
    spread = msgspec.structs.replace(limits, refused=Retries(initial_delay_s=1.0, max_delay_s=2.0,
                                                            jitter_ratio=1.0))  # fmt: skip
    jittered = record_of(work_of(40), Elastic(max_size=40), limits=spread)
    # Without it all come back at the same moments, of which each lets one pass.
    times = times_of(plain, State.STARTING)
    assert len(set(times)) == len(times) > 10
    assert jittered.end_ns < plain.end_ns


def test_thoughts_wait_for_their_slot_on_the_gpus() -> None:
    rollouts = work_of(4, 1.0, think=Constant(value_s=5.0), gpu_slots=2)
    record = record_of(rollouts, Elastic(max_size=4))
    assert record.steps[0].rollouts_s == 11
    assert causes_of(record) == {"gpu": 5, "think": 5, "work": 1}
    assert record.steps[0].all_causes_ns["gpu"] == 2 * 5 * SECOND


def test_what_is_given_up_frees_its_slot_and_its_sandbox() -> None:
    think = Empirical(values_s=(1.0, 1.0, 1.0, 100.0))
    rollouts = work_of(8, 1.0, think=think, turns=2, gpu_slots=4, enough=4)
    training = Training(steps=4, train=Constant(value_s=5.0))
    for policy in (Elastic(max_size=8), OnePerRollout(max_size=3)):
        record = record_of(rollouts, policy, training=training)
        assert {(s.num_done, s.num_aborted) for s in record.steps} == {(4, 4)}
        for step in range(4):
            causes_of(record, step)
        busy = [row for row in record.trace if row.kind == 0][-1]
        assert busy.time_ns < record.end_ns
        assert record.num_left == 0


def test_one_step_off_trains_while_rollouts_run() -> None:
    training = Training(mode="one-step-off", steps=3, train=Constant(value_s=25.0),
                        sync=Sync(seconds=2.0))  # fmt: skip
    record = record_of(work_of(2), Elastic(max_size=2), training=training)
    assert [step.step_s for step in record.steps] == [12, 27, 27]
    assert causes_of(record, 1) == {"work": 10, "train": 15, "sync": 2}


def test_an_asynchronous_trainer_takes_batches_as_they_come() -> None:
    training = Training(mode="async", steps=3, in_flight=2, train=Constant(value_s=4.0))
    record = record_of(work_of(4), Elastic(max_size=2), training=training)
    # Two are done every 10 s: batches of four at 20, 40 and 60 s.
    assert [step.rollouts_end_ns // SECOND for step in record.steps] == [20, 40, 60]
    assert causes_of(record, 1) == {"starved": 16, "train": 4}
    assert [step.staleness for step in record.steps] == [0, 2, 2]


def test_means_leave_the_warm_up_out() -> None:
    training = Training(steps=3, warm_up_steps=1, train=Constant(value_s=60.0))
    record = record_of(work_of(4), KeepWarm(warm=4, max_size=4), sandboxes=BOXES, training=training)
    assert [step.step_s for step in record.steps] == [90, 70, 70]
    assert record.mean_step_s == 70


def test_occupancy_is_what_was_there_at_the_points_of_a_grid() -> None:
    boxes = Sandboxes(boot=Constant(value_s=2.5))
    record = record_of(work_of(3, 3.0), Elastic(max_size=2), sandboxes=boxes, grid_s=1.0)
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
    rollouts = work_of(6, 3.0, group_size=2, fail_ratio=0.05)
    record = record_of(rollouts, policy, sandboxes=boxes, training=training)
    for step in range(3):
        causes_of(record, step)
        assert record.steps[step].num_done == 12


def test_a_tick_refill_is_as_slow_as_its_ticks() -> None:
    """Four at a time, awaited for 2 s, then a pause of 1 s."""
    boxes = Sandboxes(boot=Constant(value_s=2.0))
    record = record_of(work_of(12, 100.0), TickRefill(size=12), sandboxes=boxes)
    assert sorted(set(times_of(record, State.STARTING)[:12])) == [0, 3, 6]


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
        record_of(work_of(2, **rollouts), Elastic(max_size=2), sandboxes=Sandboxes(**boxes))  # type: ignore[arg-type]
    with pytest.raises(NotSimulatedError, match="policy = 'snapshot-resume'"):
        record_of(work_of(2), SnapshotResume(max_size=2))


def test_a_wait_behind_a_failed_start_is_charged_to_it() -> None:
    """Limits to limits, the start itself to start_failed: bound late or early."""
    boxes = Sandboxes(boot=Constant(value_s=3.0), start_fail_ratio=0.9)
    for policy in (Elastic(max_size=1), OnePerRollout(max_size=1)):
        limits = Limits(rate_per_s=0.2)
        record = record_of(work_of(1), policy, sandboxes=boxes, limits=limits, seed=3)
        failed = record.num_start_failed
        assert failed > 1
        causes = causes_of(record)
        # The limit lets one pass every 5 s, a start takes 3.
        assert causes == {"start_failed": 3 * failed, "rate": 2 * failed, "boot": 3, "work": 10}
        assert record.steps[0].all_causes_ns == record.steps[0].causes_ns


def test_a_wait_in_the_midst_of_resets_counts_their_part_only() -> None:
    """Rollout 3 comes 1 s into the reset after the first use, and waits for two more."""
    rollouts = Rollouts(prompts=4, work=Constant(value_s=10.0),
                        arrival_gap=Empirical(values_s=(3.0,)))  # fmt: skip
    boxes = Sandboxes(reset=Constant(value_s=4.0), prewarmed=1)
    record = record_of(rollouts, FixedPool(size=1), sandboxes=boxes)
    # Served at 3, 17, 31 and 45 s; the last came at 12 s, before the first reset, from 13 to 17 s.
    assert causes_of(record) == {"arrival": 12, "capacity": 1 + 10 + 10, "reset": 12, "work": 10}
    late = msgspec.structs.replace(rollouts, arrival_gap=Constant(value_s=3.75))
    found = causes_of(record_of(late, FixedPool(size=1), sandboxes=boxes))
    # Served at 3.75, 17.75, 31.75, 45.75; the last came at 15 s, in the reset from 13.75 on.
    assert found == {"arrival": 15, "capacity": 20, "reset": 2.75 + 8, "work": 10}


def test_no_class_waits_for_ever_behind_another() -> None:
    """Class 0 has work all the time; class 1 comes later, and drains half of the pool."""
    rollouts = Rollouts(prompts=12, group_size=4, work=Constant(value_s=10.0),
                        arrival_gap=Constant(value_s=0.25))  # fmt: skip
    for policy in (Elastic(max_size=4), KeepWarm(warm=2, max_size=4)):
        record = record_of(rollouts, policy, sandboxes=Sandboxes(classes=2))
        cls = {n: n // 4 % 2 for n in range(48)}
        served = [(row.time_ns, cls[row.number]) for row in record.trace
                  if (row.kind, row.state) == (1, 3)]  # fmt: skip
        early = [c for at, c in served if at <= 60 * SECOND]
        assert abs(early.count(0) - early.count(1)) <= 4
        assert record.steps[0].num_done == 48
