"""What a pool of sandboxes asks its policy, and what a policy may answer; pure.

A policy is a function `decide(view, memory) -> (decision, memory)`: without I/O, clock or random
numbers; what it wants to remember are whole numbers that it gets back at the next call. The
simulator and a real pool run the same object, so what was sized in one holds in the other.

A pool asks once when it begins, and then when the view has changed or a wake is due. A view has
changed if a count of a class is not what it was when the decision before had been carried out, or
the step is another one; ages and counters alone are no change. See docs/simulator.md section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

Binding = Literal["late", "early"]
"""An idle sandbox goes to the rollout of its class that waits longest, or serves only one."""
Memory = tuple[int, ...]
"""What a policy remembers; at first ()."""
NOBODY = 2**62
"""oldest_ticket, and times, of what there is not."""


class ClassView(msgspec.Struct, frozen=True, gc=False):
    """Sandboxes of one class (image, resources, region) and the rollouts that need that class."""

    queued: int = 0  # rollouts that wait and have no sandbox of their own under way
    unfinished: int = 0  # rollouts that were submitted, neither done nor dropped
    next_step: int = 0  # rollouts that the next step will submit
    pending: int = 0  # creations that still wait at a limit
    starting: int = 0
    idle: int = 0
    busy: int = 0  # with a rollout, or being reset after one
    draining: int = 0  # of the busy ones, those that end instead of becoming idle
    stopping: int = 0
    # No change of these alone makes a pool ask.
    oldest_ticket: int = NOBODY  # of the rollout that waits longest; tickets ascend with time
    queued_since_ns: int = NOBODY  # when that rollout began to wait
    idle_since_ns: int = NOBODY  # of the sandbox that has been idle longest
    num_queued: int = 0  # times that a rollout began to wait, since the run began
    num_served: int = 0  # times that one got a sandbox
    num_lost: int = 0  # sandboxes that died, expired or failed to start
    new_queued: int = 0  # of num_queued, those since the policy was asked last

    @property
    def alive(self) -> int:
        """Sandboxes that are there, or will be."""
        return self.pending + self.starting + self.idle + self.busy


class LimiterView(msgspec.Struct, frozen=True, gc=False):
    """The rate limit of creations: `burst` at once, then one every `interval_ns`."""

    interval_ns: int
    burst: int
    next_ns: int  # the earliest time for the next creation


class View(msgspec.Struct, frozen=True):
    """What a policy may know, until it has answered. Times are nanoseconds since the run began."""

    now_ns: int
    step: int
    is_rolling: bool  # rollouts of a step are under way; otherwise the trainer works
    next_step_ns: int | None  # when the next step is expected, while the trainer works
    classes: Sequence[ClassView]
    changed: Sequence[int]  # classes that changed, ascending; at first all of them
    alive: int  # of all classes, as are those that follow
    unfinished: int
    queued: int
    starting: int  # or pending
    limiter: LimiterView | None = None


class Create(msgspec.Struct, frozen=True, tag="create"):
    """Make sandboxes of a class; with `is_bound`, each for the next rollout of the queue."""

    sandbox_class: int
    count: int
    is_bound: bool = False


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Take back creations that still wait at a limit, the newest first."""

    sandbox_class: int
    count: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Give up starts that are under way, those that began first before others."""

    sandbox_class: int
    count: int


class Terminate(msgspec.Struct, frozen=True, tag="terminate"):
    """End idle sandboxes of a class: the longest idle, or the one that became idle last, first."""

    sandbox_class: int
    count: int
    order: Literal["longest-idle", "newest-idle"] = "longest-idle"


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """So many sandboxes of a class end when rollouts release them; replaces an earlier number."""

    sandbox_class: int
    count: int


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Save idle sandboxes of a class, the longest idle first, and end them; starts resume them."""

    sandbox_class: int
    count: int


Action = Create | Cancel | Abort | Terminate | Drain | Snapshot


class Decision(msgspec.Struct, frozen=True):
    """What to do now, in this order, and when to be asked again at the latest.

    A `wake_ns` replaces that of the decision before; None means at a change only.
    """

    actions: tuple[Action, ...] = ()
    wake_ns: int | None = None


NOTHING = Decision()


@runtime_checkable
class Policy(Protocol):
    """What a pool asks."""

    @property
    def binding(self) -> Binding:
        """Whether a sandbox serves whoever waits longest, or the rollout it was made for."""

    @property
    def max_uses(self) -> int | None:
        """Rollouts that a sandbox serves before it is ended; None for no limit."""

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """What to do now, and what to remember. The same arguments give the same answer."""
