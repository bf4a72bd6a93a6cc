"""Asks the policy of a run once all else of an instant is done, and does what it says."""

from __future__ import annotations

from gymfast.sandbox.policy import Action, Cancel, Create, LimiterView, Policy, View
from gymfast_sim.clock import Clock, Rank, SimulationError
from gymfast_sim.pool import Pool
from gymfast_sim.records import State
from gymfast_sim.steps import Steps

_MAX_DECISIONS = 1000  # at one instant


class Asking:
    """The link between a policy and the pool."""

    def __init__(self, clock: Clock, policy: Policy, pool: Pool, steps: Steps) -> None:
        self._clock, self._policy, self._pool, self._steps = clock, policy, pool, steps
        self._name = type(policy).__name__
        self._is_due = False
        self._wake_ns = -1
        self._asked_ns, self._num_asked = -1, 0
        pool.changed = self.want_decision

    def want_decision(self) -> None:
        """The policy is asked at the end of this instant."""
        if not self._is_due:
            self._is_due = True
            self._clock.later(0, Rank.DECIDE, 0, self._ask)

    def _ask(self, _: object) -> None:
        self._is_due = False
        now = self._clock.now_ns
        self._num_asked = self._num_asked + 1 if self._asked_ns == now else 1
        self._asked_ns = now
        if self._num_asked > _MAX_DECISIONS:
            raise SimulationError(
                f"the policy {self._name} does not settle: at {now / 1e9:g} s it was asked "
                f"{_MAX_DECISIONS} times and wants something else each time"
            )
        decision = self._policy.decide(self._view())
        for action in decision.actions:
            self._do(action)
        wake_ns = decision.wake_ns
        if wake_ns is not None and wake_ns > now and not now < self._wake_ns <= wake_ns:
            self._wake_ns = wake_ns
            self._clock.later(wake_ns - now, Rank.DECIDE, 0, self._ask)

    def _view(self) -> View:
        steps, rate = self._steps, self._pool.admission.rate
        return View(
            now_ns=self._clock.now_ns,
            step=steps.step,
            is_rolling=steps.is_rolling,
            next_step_ns=steps.next_ns,
            classes=tuple([pool.view or pool.look() for pool in self._pool.classes]),
            limiter=None
            if rate is None
            else LimiterView(rate.interval_ns, rate.burst, rate.next_ns),
        )

    def _do(self, action: Action) -> None:
        cls, count = action.sandbox_class, action.count
        if not 0 <= cls < len(self._pool.classes) or count < 1:
            raise SimulationError(
                f"the policy {self._name} asked for {action}: expected a class below "
                f"{len(self._pool.classes)} and a count of at least 1"
            )
        pool = self._pool.classes[cls]
        if isinstance(action, Create):
            if action.is_bound and count > len(pool.queue):
                raise SimulationError(
                    f"the policy {self._name} asked for {action}, but only {len(pool.queue)} "
                    "rollouts of that class wait"
                )
            self._pool.create(cls, count, is_bound=action.is_bound)
            return
        state = State.PENDING if isinstance(action, Cancel) else State.IDLE
        if count > pool.counts[state]:
            raise SimulationError(
                f"the policy {self._name} asked for {action}, but only {pool.counts[state]} "
                f"sandboxes are {state.name.lower()}"
            )
        if isinstance(action, Cancel):
            self._pool.cancel(cls, count)
        else:
            self._pool.terminate(cls, count)
