"""What a run was: its steps, where their time went, sandboxes and money."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import msgspec

from gymfast_sim.scenario import Prices


class State(IntEnum):
    """What a sandbox is doing; the numbers are part of the trace."""

    PENDING = 0  # asked for, waits at a limit
    STARTING = 1
    IDLE = 2
    WORKING = 3
    HELD = 4  # kept by a rollout that thinks
    RESETTING = 5
    LOST = 6  # dead, and nobody has noticed
    STOPPING = 7
    GONE = 8


class Cause(IntEnum):
    """What a rollout spent its time on; see docs/simulator.md section 8."""

    ARRIVAL = 0  # it came later than the step began
    CAPACITY = 1  # no sandbox was asked for, or it served others
    CLIENT = 2  # client_concurrency
    QUOTA = 3  # max_live
    STARTING_CAP = 4  # max_starting
    RATE = 5  # rate_per_s
    API = 6
    QUEUE = 7
    BOOT = 8
    SETUP = 9
    START_FAILED = 10  # starts that came to nothing
    RESET = 11
    THINK = 12
    WORK = 13
    RETRY = 14  # work and thought that were lost, until that was noticed
    BACKOFF = 15
    TRAIN = 16
    SYNC = 17
    GPU = 18  # thoughts that waited for gpu_slots
    STARVED = 19  # asynchronous: the trainer waited for a batch


_USEFUL = frozenset({Cause.THINK, Cause.TRAIN, Cause.SYNC})
_BILLED = (State.IDLE, State.WORKING, State.HELD, State.RESETTING, State.STOPPING)


class TraceRow(NamedTuple):
    """Something that happened; `other` is a sandbox, or -1.

    Kind 0: a sandbox came into a State. Kind 1: a rollout was done (state 0), dropped (1), waits
    (2), was served (3) by a sandbox, or lost its attempt (4) with one. Kind 2: a creation passed a
    limit, 0 to 3. Kind 3: the policy was asked; number is that of its actions.
    """

    time_ns: int
    kind: int
    number: int
    state: int
    other: int = -1


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step.

    `causes_ns` belong to the rollout that finished last, and sum to the step; `all_causes_ns` are
    summed over all its rollouts, each from the begin of the step to its own end.
    """

    start_ns: int
    rollouts_end_ns: int
    end_ns: int
    causes_ns: dict[str, int]
    all_causes_ns: dict[str, int]
    num_done: int
    num_dropped: int
    num_aborted: int  # given up when enough were done, or with their group
    num_spoilt_groups: int  # of which a rollout was dropped
    staleness: int  # versions since submission, summed over a batch; asynchronous only

    @property
    def step_s(self) -> float:
        """From one step to the next."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def rollouts_s(self) -> float:
        """Until the last rollout is done or dropped."""
        return (self.rollouts_end_ns - self.start_ns) / 1e9

    @property
    def blocked_s(self) -> float:
        """The part in which GPUs neither train nor sync, nor generate for the last rollout."""
        useful = {cause.name.lower() for cause in _USEFUL}
        return sum(ns for name, ns in self.causes_ns.items() if name not in useful) / 1e9


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run; counts are of all steps."""

    name: str
    seed: int
    replication: int
    steps: tuple[StepRecord, ...]
    warm_up_steps: int
    sandbox_ns: dict[str, int]  # by state, of all sandboxes
    num_asked: int  # creations asked for, those that were taken back included
    num_refused: int  # times that a creation was over the rate and had to try again
    num_cancelled: int
    num_started: int  # starts that began, and prewarmed ones
    num_start_failed: int
    num_died: int  # under an action
    num_hung: int  # under an action, until its time-out
    num_lost_completions: int  # of actions; noticed by the watchdog
    num_expired: int  # ended by their lifetime
    num_preempted: int
    num_aborted: int  # starts that were given up
    num_terminated: int  # aborted ones included
    num_left: int  # not gone when the run ended
    num_timeouts: int  # of actions
    num_served: int  # times that a rollout (or an action) got a sandbox
    num_waited: int  # those that it did not get at once
    wait_ns: int
    wait_counts: tuple[int, ...]  # of num_served, by the number of bits of the nanoseconds waited
    num_changes: int  # rows of a trace
    num_decisions: int  # times that the policy was asked
    num_events: int  # of this engine; another one has others
    occupancy: tuple[tuple[int, ...], ...] = ()  # sandboxes by state at 0, grid_s, 2 grid_s, ...
    digest: str = ""  # of the trace
    trace: tuple[TraceRow, ...] = ()

    @property
    def end_ns(self) -> int:
        """The length of the run."""
        return self.steps[-1].end_ns

    @property
    def mean_step_s(self) -> float:
        """The mean of its steps, without those of the warm-up."""
        steps = self.steps[self.warm_up_steps :]
        return sum(step.step_s for step in steps) / len(steps)


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars of a run."""

    gpu: float
    gpu_blocked: float  # part of gpu
    sandbox: float
    sandbox_idle: float  # part of sandbox

    @property
    def total(self) -> float:
        """GPUs and sandboxes."""
        return self.gpu + self.sandbox


def cost(record: RunRecord, prices: Prices) -> Cost:
    """What a run costs: sandboxes from their slot (or from ready) until they are gone.

    A sandbox that waits at a limit, or is dead, costs nothing.
    """
    billed = [*_BILLED, *([State.STARTING] if prices.starting_is_billed else [])]
    by_state = {state: record.sandbox_ns[state.name.lower()] / 1e9 for state in billed}
    gpu_per_s = prices.gpus * prices.gpu_per_s
    return Cost(
        gpu=gpu_per_s * record.end_ns / 1e9,
        gpu_blocked=gpu_per_s * sum(step.blocked_s for step in record.steps),
        sandbox=prices.sandbox_per_s * sum(by_state.values()),
        sandbox_idle=prices.sandbox_per_s * by_state[State.IDLE],
    )
