"""The sandboxes and rollouts of an engine, and how the time of a rollout is charged."""

from __future__ import annotations

import bisect
from collections import deque

from gymfast.sandbox.policy import (
    NOBODY,
    Abort,
    Action,
    Cancel,
    ClassView,
    Create,
    Drain,
    Snapshot,
    Terminate,
)
from gymfast_sim.records import Cause, State

_START_CAUSES = (
    *(Cause.CAPACITY, Cause.CLIENT, Cause.QUOTA, Cause.STARTING_CAP, Cause.RATE),
    *(Cause.API, Cause.QUEUE, Cause.BOOT, Cause.SETUP),
)
_FAILED_CAUSES = (*_START_CAUSES[:5], *[Cause.START_FAILED] * 4)
_ACTS_ON: dict[type, State] = {
    Cancel: State.PENDING,
    Abort: State.STARTING,
    Terminate: State.IDLE,
    Snapshot: State.IDLE,
}
MAX_CREATIONS = 2**31
FIRST_PHASE = 5
"""Stamps before it: asked for, and past each of the four limits; from it on: ends of phases."""


class Rollout:
    """One rollout; `charged_ns` by cause sums to the time since the step began."""

    __slots__ = (
        *("attempt", "attempt_think_ns", "attempt_work_ns", "box", "busy_since_ns", "charged_ns"),
        *("attempt_gpu_ns", "cls", "has_slot", "is_over", "number", "queued_ns", "thought"),
        *("ticket", "turn", "waits_since_ns"),
    )

    def __init__(self, number: int, cls: int) -> None:
        self.number, self.cls = number, cls
        self.attempt = self.turn = 0
        self.waits_since_ns = self.busy_since_ns = 0
        self.queued_ns = 0  # up to here its wait is charged
        self.ticket = 0
        self.attempt_work_ns = self.attempt_think_ns = 0
        self.attempt_gpu_ns = self.thought = 0
        self.has_slot = self.is_over = False
        self.charged_ns = [0] * len(Cause)
        self.box: Sandbox | None = None

    def charge_wait(self, box: Sandbox, now_ns: int) -> None:
        """Charges the time since it was queued to what its sandbox was doing meanwhile.

        Before that was asked for: to the failed starts that it replaces.
        """
        at, charged = self.queued_ns, self.charged_ns
        if at == now_ns:
            return
        before, one = [], box.replaces
        while one is not None and one.until_ns > at:
            before.append(one)
            one = one.replaces
        for failed in reversed(before):
            at = self._charge_start(failed, _FAILED_CAUSES, at, now_ns)
        at = self._charge_start(box, _START_CAUSES, at, now_ns)
        reset_ns = box.reset_after_ns(at)
        charged[Cause.RESET] += reset_ns
        charged[Cause.CAPACITY] += now_ns - at - reset_ns

    def charge_failed(self, box: Sandbox, now_ns: int) -> None:
        """Charges the time since it was queued to a sandbox that was meant for it and is lost."""
        at = self._charge_start(box, _FAILED_CAUSES, self.queued_ns, now_ns)
        assert at == now_ns
        self.queued_ns = now_ns

    def _charge_start(self, box: Sandbox, causes: tuple[Cause, ...], at: int, now_ns: int) -> int:
        for stamp_ns, cause in zip(box.stamps, causes, strict=True):
            until = min(max(stamp_ns, at), now_ns)
            self.charged_ns[cause] += until - at
            at = until
        return at

    def keep_attempt(self) -> None:
        """What this attempt did counts."""
        self.charged_ns[Cause.WORK] += self.attempt_work_ns
        self.charged_ns[Cause.THINK] += self.attempt_think_ns
        self.charged_ns[Cause.GPU] += self.attempt_gpu_ns
        self.attempt_work_ns = self.attempt_think_ns = self.attempt_gpu_ns = 0

    def lose_attempt(self) -> None:
        """What this attempt did is lost."""
        lost_ns = self.attempt_work_ns + self.attempt_think_ns + self.attempt_gpu_ns
        self.charged_ns[Cause.RETRY] += lost_ns
        self.attempt_work_ns = self.attempt_think_ns = self.attempt_gpu_ns = 0

    def lose_action(self, now_ns: int) -> None:
        """The action or thought that was under way is lost."""
        self.charged_ns[Cause.RETRY] += now_ns - self.busy_since_ns

    def back_off(self, after_ns: int) -> None:
        """It pauses before the next attempt."""
        self.charged_ns[Cause.BACKOFF] += after_ns


class Sandbox:
    """One sandbox, from the moment it is asked for."""

    __slots__ = (
        *(
            "cls",
            "epoch",
            "num_passed",
            "num_refused",
            "number",
            "owner",
            "replaces",
            "resets",
            "since_ns",
        ),
        *("stamps", "state", "uses"),
    )

    def __init__(self, number: int, cls: int, now_ns: int) -> None:
        self.number, self.cls = number, cls
        self.state = State.PENDING
        self.since_ns = now_ns
        self.stamps = [now_ns] * len(_START_CAUSES)
        self.uses = self.epoch = self.num_passed = self.num_refused = 0
        self.resets: list[tuple[int, int, int]] = []  # begin, end, time of the resets before it
        self.owner: Rollout | None = None
        self.replaces: Sandbox | None = None  # a failed start

    @property
    def until_ns(self) -> int:
        """The end of its start."""
        return self.stamps[-1]

    def cut_stamps(self, now_ns: int) -> None:
        """Its start ends now, wherever it is: at a limit, or in a phase."""
        first = self.num_passed + 1 if self.state is State.PENDING else FIRST_PHASE
        for i in range(first, len(self.stamps)):
            at_ns = now_ns if self.state is State.PENDING else min(self.stamps[i], now_ns)
            self.stamps[i] = at_ns
        self.stamps[-1] = now_ns

    def add_reset(self, begin_ns: int, end_ns: int) -> None:
        """A reset after a use."""
        total = 0
        if self.resets:
            begin, end, before = self.resets[-1]
            total = before + end - begin
        self.resets.append((begin_ns, end_ns, total))

    def reset_after_ns(self, at_ns: int) -> int:
        """The time of resets after a moment; the last one is over."""
        if not self.resets or self.resets[-1][1] <= at_ns:
            return 0
        begin, end, before = self.resets[-1]
        total = before + end - begin
        i = bisect.bisect_right(self.resets, (at_ns, NOBODY)) - 1
        if i < 0:
            return total
        begin, end, before = self.resets[i]
        return total - before - (min(end, at_ns) - begin)


class SandboxClass:
    """The pool of one class; counts are by state."""

    __slots__ = (
        *("counts", "drain", "failed", "failed_ns", "idle", "key", "next_step", "num_lost"),
        *("num_queued", "num_served", "pending", "queue", "seen_queued", "starting", "unfinished"),
        "view",
    )

    def __init__(self, next_step: int) -> None:
        self.counts = [0] * len(State)
        self.queue: deque[Rollout] = deque()
        self.idle: deque[Sandbox] = deque()
        self.pending: deque[Sandbox] = deque()
        self.starting: deque[Sandbox] = deque()
        self.unfinished = self.drain = 0
        self.num_queued = self.num_served = self.num_lost = 0
        self.seen_queued = 0  # num_queued when the policy was asked last
        self.next_step = next_step
        self.failed: deque[Sandbox] = deque()  # starts that failed at failed_ns, not yet replaced
        self.failed_ns = -1
        self.key: tuple[int, ...] = ()
        self.view = ClassView()

    @property
    def busy(self) -> int:
        """Sandboxes with a rollout, or being reset after one."""
        counts = self.counts
        return (
            counts[State.WORKING]
            + counts[State.HELD]
            + counts[State.RESETTING]
            + counts[State.LOST]
        )

    def look(self) -> bool:
        """Makes the view of a policy anew; says whether a count of it changed."""
        counts, queue = self.counts, self.queue
        key = (
            *(len(queue), self.unfinished, self.next_step, counts[State.PENDING]),
            *(counts[State.STARTING], counts[State.IDLE], self.busy, self.drain),
            counts[State.STOPPING],
        )
        self._drop_stale()
        self.view = ClassView(
            *key,
            queue[0].ticket if queue else NOBODY,
            queue[0].waits_since_ns if queue else NOBODY,
            self.idle[0].since_ns if self.idle else NOBODY,
            self.num_queued,
            self.num_served,
            self.num_lost,
            self.num_queued - self.seen_queued,
        )
        is_changed, self.key = key != self.key, key
        return is_changed

    def _drop_stale(self) -> None:
        """Drops sandboxes that moved on from the fronts of the lists."""
        for boxes, state in (
            (self.pending, State.PENDING),
            (self.starting, State.STARTING),
            (self.idle, State.IDLE),
        ):
            while boxes and boxes[0].state is not state:
                boxes.popleft()

    def most(self, action: Action) -> tuple[int, str]:
        """How large the count of an action may be, and what that is a number of."""
        if isinstance(action, Create):
            if not action.is_bound:
                return MAX_CREATIONS, "can be asked for at once"
            return len(self.queue), "rollouts of that class wait"
        if isinstance(action, Drain):
            return self.busy, "sandboxes are busy"
        state = _ACTS_ON[type(action)]
        return self.counts[state], f"sandboxes are {state.name.lower()}"

    def newest_pending(self) -> Sandbox:
        """The creation that was asked for last and still waits; it is taken out."""
        return _newest(self.pending, State.PENDING)

    def newest_idle(self) -> Sandbox:
        """The sandbox that became idle last; it is taken out."""
        return _newest(self.idle, State.IDLE)

    def longest_idle(self) -> Sandbox:
        """The sandbox that has been idle longest; it is taken out."""
        return _oldest(self.idle, State.IDLE)

    def longest_starting(self) -> Sandbox:
        """The sandbox whose start began first; it is taken out."""
        return _oldest(self.starting, State.STARTING)

    def note_failed(self, box: Sandbox, now_ns: int) -> None:
        """A start came to nothing; a creation of this instant replaces it."""
        if self.failed_ns != now_ns:
            self.failed.clear()
            self.failed_ns = now_ns
        self.failed.append(box)

    def replaced(self, now_ns: int) -> Sandbox | None:
        """The failed start that a creation of now replaces; it is taken out."""
        return self.failed.popleft() if self.failed and self.failed_ns == now_ns else None


def _oldest(boxes: deque[Sandbox], state: State) -> Sandbox:
    while True:
        box = boxes.popleft()
        if box.state is state:
            return box


def _newest(boxes: deque[Sandbox], state: State) -> Sandbox:
    while True:
        box = boxes.pop()
        if box.state is state:
            return box
