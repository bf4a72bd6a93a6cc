"""The reference engine: the event semantics of docs/simulator.md on SimPy.

Servers are first-come-first-served queues of our own, and events carry a callback instead of a
process: SimPy keeps the clock and the order. Needs `gymfast[sim]`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

from gymfast.errors import MissingDependencyError
from gymfast.sandbox.policy import Policy
from gymfast_sim.asking import Asking
from gymfast_sim.clock import Log, Rank, SimulationError
from gymfast_sim.draws import Draws
from gymfast_sim.laws import to_ns
from gymfast_sim.off_policy import Asynchronous, OneStepOff
from gymfast_sim.pool import Pool
from gymfast_sim.records import RunRecord, State
from gymfast_sim.scenario import Scenario, refuse_unknown
from gymfast_sim.steps import Steps

try:
    import simpy
except ImportError as error:
    raise MissingDependencyError(
        "the reference engine of gymfast_sim needs simpy: pip install 'gymfast[sim]'"
    ) from error


_STEPS = {"sync": Steps, "one-step-off": OneStepOff, "async": Asynchronous}


def simulate(
    scenario: Scenario,
    *,
    replication: int = 0,
    policy: Policy | None = None,
    draw: Draws | None = None,
    keep_trace: bool = False,
) -> RunRecord:
    """One run; `policy` replaces that of the scenario, `draw` its random numbers.

    The same scenario and replication give the same record everywhere. Raises SimulationError for a
    run that cannot end, with the reason, and for settings that are not simulated yet.
    """
    refuse_unknown(scenario)
    clock, draw = _SimpyClock(), draw or Draws(scenario.seed, replication)
    log = Log(scenario.most_changes, keeps_trace=keep_trace)
    policy = policy or scenario.policy
    pool = Pool(clock, scenario, policy, draw, log)
    steps = _STEPS[scenario.training.mode](clock, scenario, pool, draw, log)
    Asking(clock, policy, pool, steps, log)
    pool.prewarm()
    steps.begin()
    horizon_ns = to_ns(scenario.horizon_s)
    grid_ns = None if scenario.grid_s is None else to_ns(scenario.grid_s)
    occupancy: list[tuple[int, ...]] = []
    while not steps.is_over:
        while grid_ns is not None and len(occupancy) * grid_ns < clock.next_ns <= horizon_ns:
            occupancy.append(pool.counts)
        if clock.next_ns > horizon_ns:
            if clock.is_empty:
                raise SimulationError(_why_stuck(pool, steps, policy))
            raise SimulationError(
                f"step {steps.step} is not over after horizon_s, {scenario.horizon_s:g} s, with "
                f"{steps.num_finished} of {scenario.rollouts.num_rollouts} rollouts finished"
            )
        clock.advance()
        log.add("num_events")
    pool.close()
    rows = tuple(log.rows or ())
    text = "".join("{} {} {} {} {}\n".format(*row) for row in rows)
    return RunRecord(
        name=scenario.name,
        seed=scenario.seed,
        replication=replication,
        steps=tuple(steps.records),
        sandbox_ns={state.name.lower(): pool.state_ns[state] for state in State},
        warm_up_steps=scenario.training.warm_up_steps,
        occupancy=tuple(occupancy),
        num_left=len(pool.live),
        wait_counts=tuple(steps.wait_counts),
        digest=hashlib.sha256(text.encode()).hexdigest() if keep_trace else "",
        trace=rows,
        **log.counts,
    )


class _SimpyClock:
    """A clock of whole nanoseconds. SimPy orders events by (time, priority, sequence)."""

    def __init__(self) -> None:
        self._env = simpy.Environment(initial_time=0)

    @property
    def now_ns(self) -> int:
        return int(self._env.now)

    def later(self, delay_ns: int, rank: Rank, number: int, call: Callable[[Any], None]) -> None:
        _Call(self._env, delay_ns, rank << 64 | number, call)

    @property
    def next_ns(self) -> float:
        """The time of the next event, a whole number; inf if there is none."""
        at: float = self._env.peek()
        return at

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return self.next_ns == math.inf

    def advance(self) -> None:
        """Handles the next event."""
        self._env.step()


class _Call(simpy.Event):  # type: ignore[misc]
    """What simpy.Timeout is, with a place of its own among the events of one instant."""

    def __init__(
        self, env: simpy.Environment, delay_ns: int, order: int, call: Callable[[Any], None]
    ) -> None:
        self.env = env
        self.callbacks = [call]
        self._value = None
        self._ok = True
        self._defused = False
        env.schedule(self, order, delay_ns)


def _why_stuck(pool: Pool, steps: Steps, policy: Policy) -> str:
    waiting = [f"{len(c.queue)} of class {i}" for i, c in enumerate(pool.classes) if c.queue]
    return (
        f"step {steps.step} cannot end: {steps.num_finished} rollouts are finished, "
        f"{', '.join(waiting) or 'none'} wait, nothing is under way, and the policy "
        f"{type(policy).__name__} asks for no sandbox"
    )
