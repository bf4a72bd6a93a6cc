"""The sandboxes and rollouts of an engine, and how the time of a rollout is charged."""

from __future__ import annotations

from collections import deque

from gymfast.sandbox.policy import NOBODY, ClassView
from gymfast_sim.records import Cause, State

_START_CAUSES = (
    *(Cause.CAPACITY, Cause.CLIENT, Cause.QUOTA, Cause.STARTING_CAP, Cause.RATE),
    *(Cause.API, Cause.QUEUE, Cause.BOOT, Cause.SETUP),
)
FIRST_PHASE = 5
"""Stamps before it: asked for, and past each of the four limits; from it on: ends of phases."""


class Rollout:
    """One rollout; `charged_ns` by cause sums to the time since the step began."""

    __slots__ = (
        *("attempt", "attempt_think_ns", "attempt_work_ns", "box", "busy_since_ns", "charged_ns"),
        *("cls", "number", "queued_ns", "ticket", "turn"),
    )

    def __init__(self, number: int, cls: int) -> None:
        self.number, self.cls = number, cls
        self.attempt = self.turn = 0
        self.queued_ns = self.busy_since_ns = 0
        self.ticket = 0
        self.attempt_work_ns = self.attempt_think_ns = 0
        self.charged_ns = [0] * len(Cause)
        self.box: Sandbox | None = None

    def charge_wait(self, box: Sandbox, now_ns: int) -> None:
        """Charges the time since it was queued to what its sandbox was doing meanwhile."""
        at, charged = self.queued_ns, self.charged_ns
        if at == now_ns:
            return
        if box.uses == 0:
            for stamp_ns, cause in zip(box.stamps, _START_CAUSES, strict=True):
                until = min(max(stamp_ns, at), now_ns)
                charged[cause] += until - at
                at = until
        else:
            until = min(max(box.freed_ns, at), now_ns)
            charged[Cause.CAPACITY] += until - at
            at, until = until, min(max(box.reset_ns, until), now_ns)
            charged[Cause.RESET] += until - at
            at = until
        charged[Cause.CAPACITY] += now_ns - at

    def keep_attempt(self) -> None:
        """What this attempt did counts."""
        self.charged_ns[Cause.WORK] += self.attempt_work_ns
        self.charged_ns[Cause.THINK] += self.attempt_think_ns
        self.attempt_work_ns = self.attempt_think_ns = 0

    def lose_attempt(self) -> None:
        """What this attempt did is lost."""
        self.charged_ns[Cause.RETRY] += self.attempt_work_ns + self.attempt_think_ns
        self.attempt_work_ns = self.attempt_think_ns = 0


class Sandbox:
    """One sandbox, from the moment it is asked for."""

    __slots__ = (
        *("cls", "epoch", "freed_ns", "num_passed", "number", "owner", "reset_ns", "since_ns"),
        *("stamps", "state", "uses"),
    )

    def __init__(self, number: int, cls: int, now_ns: int) -> None:
        self.number, self.cls = number, cls
        self.state = State.PENDING
        self.since_ns = now_ns
        self.stamps = [now_ns] * len(_START_CAUSES)
        self.uses = self.epoch = self.num_passed = 0
        self.freed_ns = self.reset_ns = 0  # ends of its last use, and of the reset after it
        self.owner: Rollout | None = None


class SandboxClass:
    """The pool of one class; counts are by state."""

    __slots__ = ("counts", "idle", "next_step", "pending", "queue", "unfinished", "view")

    def __init__(self, next_step: int) -> None:
        self.counts = [0] * len(State)
        self.queue: deque[Rollout] = deque()
        self.idle: deque[Sandbox] = deque()
        self.pending: deque[Sandbox] = deque()
        self.unfinished = 0
        self.next_step = next_step
        self.view: ClassView | None = None

    def look(self) -> ClassView:
        """What a policy may know of it."""
        if self.view is None:
            counts = self.counts
            self.view = ClassView(
                queued=len(self.queue),
                oldest_ticket=self.queue[0].ticket if self.queue else NOBODY,
                unfinished=self.unfinished,
                next_step=self.next_step,
                pending=counts[State.PENDING],
                starting=counts[State.STARTING],
                idle=counts[State.IDLE],
                busy=counts[State.WORKING]
                + counts[State.HELD]
                + counts[State.RESETTING]
                + counts[State.LOST],
                stopping=counts[State.STOPPING],
            )
        return self.view

    def newest_pending(self) -> Sandbox:
        """The creation that was asked for last and still waits; it is taken out."""
        while True:
            box = self.pending.pop()
            if box.state is State.PENDING:
                return box

    def forget_started(self) -> None:
        """Drops creations that no longer wait from the front of the list."""
        while self.pending and self.pending[0].state is not State.PENDING:
            self.pending.popleft()

    def longest_idle(self) -> Sandbox:
        """The sandbox that has been idle longest; it is taken out."""
        while True:
            box = self.idle.popleft()
            if box.state is State.IDLE:
                return box
