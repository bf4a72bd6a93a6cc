"""How many sandboxes a pool has, and when it makes and ends them; pure.

A policy is a function of a view to a decision: without I/O, clock, random numbers or memory of its
own. The simulator and a real pool run the same object, so what was sized in one holds in the other.
The pool asks after every instant at which its view changed, and at the `wake_ns` that it was told.

What a policy does not decide: an idle sandbox goes to the rollout of its class that has waited
longest, the longest idle sandbox first (`binding` "late"), or a sandbox is made for one rollout
and serves no other ("early"); a sandbox ends after `max_uses` rollouts. See docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

Binding = Literal["late", "early"]
NOBODY = 2**62
"""oldest_ticket of a class without a queue."""


class ClassView(msgspec.Struct, frozen=True, gc=False):
    """Sandboxes of one class (image, resources, region) and the rollouts that need that class."""

    queued: int = 0  # rollouts that wait and have no sandbox of their own under way
    oldest_ticket: int = NOBODY  # of the rollout that waits longest; tickets ascend with time
    unfinished: int = 0  # rollouts of this step, neither done nor dropped
    next_step: int = 0  # rollouts that the next step will submit
    pending: int = 0  # creations that still wait at a limit
    starting: int = 0
    idle: int = 0
    busy: int = 0  # with a rollout, or being reset after one
    stopping: int = 0

    @property
    def planned(self) -> int:
        """Sandboxes that serve, or will."""
        return self.pending + self.starting + self.idle + self.busy


class LimiterView(msgspec.Struct, frozen=True, gc=False):
    """The rate limit of creations: `burst` at once, then one every `interval_ns`."""

    interval_ns: int
    burst: int
    next_ns: int  # the earliest time for the next creation


class View(msgspec.Struct, frozen=True):
    """What a policy may know. Times are nanoseconds since the start of the run."""

    now_ns: int
    step: int
    is_rolling: bool  # rollouts of a step are under way; otherwise the trainer works
    next_step_ns: int | None  # when the next step is expected, while the trainer works
    classes: tuple[ClassView, ...]
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


class Terminate(msgspec.Struct, frozen=True, tag="terminate"):
    """End idle sandboxes of a class, the longest idle first."""

    sandbox_class: int
    count: int


Action = Create | Cancel | Terminate


class Decision(msgspec.Struct, frozen=True):
    """What to do now, in this order, and when to be asked again at the latest."""

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

    def decide(self, view: View) -> Decision:
        """What to do now. The same view gives the same decision."""


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
                omit_defaults=True, tag_field="policy"):  # fmt: skip
    """Settings of a policy, as a scenario and a real pool read them."""

    def __post_init__(self) -> None:
        for name in ("size", "warm", "max_size", "max_uses"):
            number = getattr(self, name, None)
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}, expected 1 or more")


class OnePerRollout(_Settings, frozen=True, kw_only=True, tag="one-per-rollout"):
    """A fresh sandbox for every attempt of a rollout, at most `max_size` at a time."""

    max_size: int

    @property
    def binding(self) -> Binding:
        return "early"

    @property
    def max_uses(self) -> int | None:
        return 1

    def decide(self, view: View) -> Decision:
        room = self.max_size - sum(c.planned for c in view.classes)
        creations = []
        for i in _by_ticket(view.classes):
            count = min(view.classes[i].queued, room)
            if count > 0:
                creations.append(Create(i, count, is_bound=True))
                room -= count
        return Decision(tuple(creations)) if creations else NOTHING


class FixedPool(_Settings, frozen=True, kw_only=True, tag="fixed"):
    """Always `size` sandboxes, as many of each class as can be; lost ones are replaced at once."""

    size: int
    max_uses: int | None = None

    @property
    def binding(self) -> Binding:
        return "late"

    def decide(self, view: View) -> Decision:
        return _towards(view, _even(self.size, len(view.classes)), self.size)


class Elastic(_Settings, frozen=True, kw_only=True, tag="elastic"):
    """One sandbox for each unfinished rollout of its class, at most `max_size` in all."""

    max_size: int
    max_uses: int | None = None

    @property
    def binding(self) -> Binding:
        return "late"

    def decide(self, view: View) -> Decision:
        return _towards(view, [c.unfinished for c in view.classes], self.max_size)


class KeepWarm(_Settings, frozen=True, kw_only=True, tag="keep-warm"):
    """Elastic, but at least `warm` sandboxes, shared evenly by the classes, at all times."""

    warm: int
    max_size: int
    max_uses: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warm > self.max_size:
            raise ValueError(f"warm is {self.warm}, expected at most max_size, {self.max_size}")

    @property
    def binding(self) -> Binding:
        return "late"

    def decide(self, view: View) -> Decision:
        warm = _even(self.warm, len(view.classes))
        targets = [max(c.unfinished, w) for c, w in zip(view.classes, warm, strict=True)]
        return _towards(view, targets, self.max_size)


class Lead(_Settings, frozen=True, kw_only=True, tag="lead"):
    """Elastic, and from `lead_s` before the next step on as if it had begun."""

    max_size: int
    lead_s: float
    max_uses: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lead_s < 1e9:
            raise ValueError(f"lead_s is {self.lead_s}, expected 0 or more seconds")

    @property
    def binding(self) -> Binding:
        return "late"

    def decide(self, view: View) -> Decision:
        targets, wake_ns = [c.unfinished for c in view.classes], None
        if not view.is_rolling and view.next_step_ns is not None:
            begin_ns = view.next_step_ns - round(self.lead_s * 1e9)
            if view.now_ns >= begin_ns:
                targets = [c.next_step for c in view.classes]
            else:
                wake_ns = begin_ns
        decision = _towards(view, targets, self.max_size)
        return decision if wake_ns is None else Decision(decision.actions, wake_ns)


AnyPolicy = OnePerRollout | FixedPool | Elastic | KeepWarm | Lead
"""The closed set that settings can name and that a native engine may know."""


def _towards(view: View, targets: Sequence[int], max_size: int) -> Decision:
    """Creations and ends that bring each class to its target, within max_size in all.

    Where there is no room for all, classes come in the order in which their rollouts wait.
    """
    actions: list[Action] = []
    missing: dict[int, int] = {}
    total = 0
    for i, (one, target) in enumerate(zip(view.classes, targets, strict=True)):
        planned = one.planned
        total += planned
        if planned < target:
            missing[i] = target - planned
        elif planned > target:
            cancelled = min(planned - target, one.pending)
            ended = min(planned - target - cancelled, one.idle)
            total -= cancelled + ended
            if cancelled:
                actions.append(Cancel(i, cancelled))
            if ended:
                actions.append(Terminate(i, ended))
    if missing:
        for i in _by_ticket(view.classes) if len(view.classes) > 1 else (0,):
            count = min(missing.get(i, 0), max_size - total)
            if count > 0:
                actions.append(Create(i, count))
                total += count
    return Decision(tuple(actions)) if actions else NOTHING


def _by_ticket(classes: Sequence[ClassView]) -> list[int]:
    """Classes by how long their rollouts wait; those without a queue last, by number."""
    return sorted(range(len(classes)), key=lambda i: classes[i].oldest_ticket)


def _even(total: int, parts: int) -> list[int]:
    """The total in equal parts; the first ones get what is left."""
    each, rest = divmod(total, parts)
    return [each + (i < rest) for i in range(parts)]
