"""Asks the policy of a run once all else of an instant is done, and does what it says."""

from __future__ import annotations

from gymfast.sandbox.policy import (
    Abort,
    Action,
    Cancel,
    Create,
    Decision,
    Drain,
    LimiterView,
    Memory,
    Policy,
    Snapshot,
    Terminate,
    View,
)
from gymfast_sim.clock import Clock, Log, Rank, SimulationError
from gymfast_sim.pool import Pool
from gymfast_sim.steps import Steps

_ASKED = 3
"""Kind of a decision in the trace."""


class Asking:
    """The link between a policy and the pool."""

    def __init__(self, clock: Clock, policy: Policy, pool: Pool, steps: Steps, log: Log) -> None:
        self._clock, self._policy, self._pool, self._steps = clock, policy, pool, steps
        self._log, self._name = log, type(policy).__name__
        self._memory: Memory = ()
        self._due_ns = self._wake_ns = -1
        self._phase: tuple[int, bool, int | None] | None = None
        pool.changed = self.want_decision
        self.want_decision()

    def want_decision(self) -> None:
        """The policy is asked at the end of this instant, if its view changed."""
        if self._due_ns != self._clock.now_ns:
            self._due_ns = self._clock.now_ns
            self._clock.later(0, Rank.DECIDE, 0, self._ask)

    def _ask(self, _: object) -> None:
        now, steps, pool = self._clock.now_ns, self._steps, self._pool
        if now not in {self._due_ns, self._wake_ns}:
            return  # a wake that a later decision replaced
        self._due_ns = -1
        changed = pool.look()
        phase = (steps.step, steps.is_rolling, steps.next_ns)
        if self._phase is None:
            changed = list(range(len(pool.classes)))
        elif not changed and phase == self._phase and now != self._wake_ns:
            return
        self._phase, self._wake_ns = phase, -1
        self._log.add("num_decisions")
        decision, self._memory = self._policy.decide(self._view(changed), self._memory)
        self._log.note(now, _ASKED, len(decision.actions), 0)
        self._carry_out(decision, changed)

    def _carry_out(self, decision: Decision, changed: list[int]) -> None:
        now, pool, wake_ns = self._clock.now_ns, self._pool, decision.wake_ns
        for cls in changed:
            pool.classes[cls].seen_queued = pool.classes[cls].num_queued
        self._due_ns = now  # its own effects are no reason to ask it again
        for action in decision.actions:
            self._do(action)
        if decision.actions:
            pool.admission.grant()
            pool.look()
        self._due_ns = -1
        if wake_ns is not None:
            if wake_ns <= now:
                raise SimulationError(
                    f"the policy {self._name} wants to be asked again at {wake_ns} ns, which is "
                    f"not after {now}"
                )
            self._wake_ns = wake_ns
            self._clock.later(wake_ns - now, Rank.DECIDE, 0, self._ask)

    def _view(self, changed: list[int]) -> View:
        steps, pool, rate = self._steps, self._pool, self._pool.admission.rate
        alive, unfinished, queued, starting = pool.totals
        return View(
            now_ns=self._clock.now_ns,
            step=steps.step,
            is_rolling=steps.is_rolling,
            next_step_ns=steps.next_ns,
            classes=pool.views,
            changed=changed,
            alive=alive,
            unfinished=unfinished,
            queued=queued,
            starting=starting,
            limiter=None
            if rate is None
            else LimiterView(rate.interval_ns, rate.burst, rate.next_ns),
        )

    def _do(self, action: Action) -> None:
        cls, count, pool = action.sandbox_class, action.count, self._pool
        if not 0 <= cls < len(pool.classes) or count < (not isinstance(action, Drain)):
            raise SimulationError(
                f"the policy {self._name} asked for {action}: expected a class below "
                f"{len(pool.classes)} and a count of at least 1"
            )
        most, what = pool.classes[cls].most(action)
        if count > most:
            raise SimulationError(
                f"the policy {self._name} asked for {action}, but only {most} {what}"
            )
        if isinstance(action, Create):
            pool.create(cls, count, is_bound=action.is_bound)
        elif isinstance(action, Cancel):
            pool.cancel(cls, count)
        elif isinstance(action, Abort):
            pool.abort(cls, count)
        elif isinstance(action, Terminate):
            pool.terminate(cls, count, is_newest=action.order == "newest-idle")
        elif isinstance(action, Drain):
            pool.drain(cls, count)
        else:
            assert isinstance(action, Snapshot)
            raise SimulationError(f"the policy {self._name} asked for {action}: not simulated yet")
