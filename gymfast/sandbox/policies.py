"""The closed set of policies that settings can name and a native engine knows; see policy.py."""

from __future__ import annotations

import math

import msgspec

from gymfast.sandbox.policy import (
    NOTHING,
    Action,
    Binding,
    ClassView,
    Create,
    Decision,
    Memory,
    Snapshot,
    Terminate,
    View,
)
from gymfast.sandbox.sharing import by_ticket, even, towards

_AWAITS: Memory = (-1,)
"""A tick-refill waits for the creations of its last tick."""


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
                omit_defaults=True, tag_field="policy"):  # fmt: skip
    """Settings of a policy, as a scenario and a real pool read them; late binding."""

    def __post_init__(self) -> None:
        for name in ("size", "warm", "max_size", "max_uses", "batch"):
            number = getattr(self, name, None)
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}, expected 1 or more")
        for name, least in (("lead_s", 0.0), ("tick_s", 1e-3), ("top_up_s", 1e-3)):
            seconds = getattr(self, name, least)
            if not least <= seconds < 1e9:
                raise ValueError(f"{name} is {seconds}, expected {least:g} to below 1e9 seconds")

    @property
    def binding(self) -> Binding:
        return "late"


class OnePerRollout(_Settings, frozen=True, kw_only=True, tag="one-per-rollout"):
    """A fresh sandbox for every attempt of a rollout, at most `max_size` at a time."""

    max_size: int

    @property
    def binding(self) -> Binding:
        return "early"

    @property
    def max_uses(self) -> int | None:
        return 1

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        room = self.max_size - view.alive
        if not view.queued or room <= 0:
            return NOTHING, memory
        creations = []
        for i in by_ticket(view.classes) if len(view.classes) > 1 else (0,):
            count = min(view.classes[i].queued, room)
            if count <= 0:
                break
            creations.append(Create(i, count, is_bound=True))
            room -= count
        return Decision(tuple(creations)), memory


class FixedPool(_Settings, frozen=True, kw_only=True, tag="fixed"):
    """Always `size` sandboxes, as many of each class as can be; lost ones are replaced at once."""

    size: int
    max_uses: int | None = None

    @property
    def max_size(self) -> int:
        return self.size

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        parts = len(view.classes)
        return towards(view, memory, lambda i, _: even(self.size, parts, i),
                       most=self.size, max_size=self.size)  # fmt: skip


class Elastic(_Settings, frozen=True, kw_only=True, tag="elastic"):
    """One sandbox for each unfinished rollout of its class, at most `max_size` in all."""

    max_size: int
    max_uses: int | None = None

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        return towards(view, memory, lambda _, one: one.unfinished,
                       most=view.unfinished, max_size=self.max_size)  # fmt: skip


class KeepWarm(_Settings, frozen=True, kw_only=True, tag="keep-warm"):
    """Elastic, but at least `warm` sandboxes, shared evenly by the classes, at all times."""

    warm: int
    max_size: int
    max_uses: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warm > self.max_size:
            raise ValueError(f"warm is {self.warm}, expected at most max_size, {self.max_size}")

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        parts = len(view.classes)
        return towards(
            view,
            memory,
            lambda i, one: max(one.unfinished, even(self.warm, parts, i)),
            most=view.unfinished + self.warm,
            max_size=self.max_size,
            floors=lambda i: even(self.warm, parts, i),
        )


class Lead(_Settings, frozen=True, kw_only=True, tag="lead"):
    """Elastic, and from `lead_s` before the next step on as if it had begun."""

    max_size: int
    lead_s: float
    max_uses: int | None = None

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """Remembers the step for which it leads, and whether a class is short."""
        if view.is_rolling or view.next_step_ns is None:
            return towards(view, memory, lambda _, one: one.unfinished,
                           most=view.unfinished, max_size=self.max_size)  # fmt: skip
        begin_ns = view.next_step_ns - round(self.lead_s * 1e9)
        if view.now_ns < begin_ns:
            found, kept = towards(view, memory, lambda _, one: one.unfinished,
                                  most=view.unfinished, max_size=self.max_size)  # fmt: skip
            return Decision(found.actions, begin_ns), kept
        every = sum(one.next_step for one in view.classes)
        found, _ = towards(view, (1,), lambda _, one: max(one.next_step, one.unfinished),
                           most=every + view.unfinished, max_size=self.max_size)  # fmt: skip
        return found, (1,)  # the step that comes is looked at as a whole too


class Hedged(_Settings, frozen=True, kw_only=True, tag="hedged"):
    """Elastic, and while rollouts of a class wait, `extra_ratio` more of it, rounded down.

    Whoever is ready first serves; what is left over is taken back, ended or given up.
    """

    max_size: int
    extra_ratio: float
    max_uses: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.extra_ratio <= 10:
            raise ValueError(f"extra_ratio is {self.extra_ratio}, expected 0 to 10")

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        def wanted(_: int, one: ClassView) -> int:
            extra = math.floor(one.unfinished * self.extra_ratio) if one.queued else 0
            return one.unfinished + extra

        most = view.unfinished + math.floor(view.unfinished * self.extra_ratio)
        return towards(view, memory, wanted, most=most, max_size=self.max_size, aborts=True)


class ClaimBackfill(_Settings, frozen=True, kw_only=True, tag="claim-backfill"):
    """Each rollout that begins to wait makes one be created; every `top_up_s` up to `size`.

    The pool grows beyond its size in a burst, and never shrinks but by use and lifetimes: that is
    what a queue of references with a backfill on each claim does. At most `max_size` in all.
    Source: the sandbox pool example of Modal.
    """

    size: int
    max_size: int
    top_up_s: float = 120.0
    max_uses: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size > self.max_size:
            raise ValueError(f"size is {self.size}, expected at most max_size, {self.max_size}")

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """Remembers when it tops up next."""
        next_ns = memory[0] if memory else view.now_ns
        missing = {i: view.classes[i].new_queued for i in view.changed}
        if view.now_ns >= next_ns:
            next_ns = view.now_ns + round(self.top_up_s * 1e9)
            for i, one in enumerate(view.classes):
                ready = one.pending + one.starting + one.idle
                deficit = even(self.size, len(view.classes), i) - ready
                missing[i] = max(missing.get(i, 0), deficit)
        return Decision(_within(view, missing, self.max_size), next_ns), (next_ns,)


class TickRefill(_Settings, frozen=True, kw_only=True, tag="tick-refill"):
    """At most `batch` creations at once up to `size`; all are awaited, then a pause of `tick_s`.

    Source: the Modal pool of tinker-cookbook.
    """

    size: int
    batch: int = 4
    tick_s: float = 1.0
    max_uses: int | None = 1

    @property
    def max_size(self) -> int:
        return self.size

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """Remembers the next tick, or that it awaits creations."""
        if view.starting:
            return NOTHING, _AWAITS
        if memory == _AWAITS:
            next_ns = view.now_ns + round(self.tick_s * 1e9)
            return Decision(wake_ns=next_ns), (next_ns,)
        next_ns = memory[0] if memory else view.now_ns
        if view.now_ns < next_ns:
            return Decision(wake_ns=next_ns), memory
        parts = len(view.classes)
        missing = {i: even(self.size, parts, i) - one.alive for i, one in enumerate(view.classes)}
        actions = _within(view, missing, min(self.size, view.alive + self.batch))
        if actions:
            return Decision(actions), _AWAITS
        next_ns = view.now_ns + round(self.tick_s * 1e9)
        return Decision(wake_ns=next_ns), (next_ns,)


class Reactive(_Settings, frozen=True, kw_only=True, tag="reactive"):
    """As many as rollouts were there on average: Knative's autoscaler on rollouts in flight.

    Every `tick_s` it samples the rollouts that wait or are served. The pool is the mean of the last
    `stable_ticks` samples, or, from the moment on at which the mean of the last `panic_ticks` is
    twice the pool and until that has not been so for `stable_ticks`, the most that was wanted.
    """

    max_size: int
    tick_s: float = 2.0
    stable_ticks: int = 30
    panic_ticks: int = 3
    max_uses: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.panic_ticks <= self.stable_ticks <= 1000:
            raise ValueError(
                f"panic_ticks is {self.panic_ticks} and stable_ticks {self.stable_ticks}, "
                "expected 1 <= panic_ticks <= stable_ticks <= 1000"
            )

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """Remembers the next tick, the end of a panic, the target and the samples, newest last."""
        next_ns, panic_ns, target, *samples = memory or (view.now_ns, 0, 0)
        if view.now_ns >= next_ns:
            tick_ns = round(self.tick_s * 1e9)
            next_ns = view.now_ns + tick_ns
            samples = [*samples, view.unfinished][-self.stable_ticks :]
            stable, panic = _mean_up(samples), _mean_up(samples[-self.panic_ticks :])
            if panic >= 2 * max(view.alive, 1):
                panic_ns = view.now_ns + self.stable_ticks * tick_ns
            target = max(target, panic) if view.now_ns < panic_ns else stable
        size = min(target, self.max_size)
        decision, _ = towards(view, (1,), lambda _, one: one.unfinished,
                              most=max(view.unfinished, size), max_size=size)  # fmt: skip
        return Decision(decision.actions, next_ns), (next_ns, panic_ns, target, *samples)


class SnapshotResume(_Settings, frozen=True, kw_only=True, tag="snapshot-resume"):
    """Elastic, but what is idle is saved and ended; creations resume what was saved."""

    max_size: int
    max_uses: int | None = None

    def decide(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        decision, memory = towards(view, memory, lambda _, one: one.unfinished,
                                   most=view.unfinished, max_size=self.max_size)  # fmt: skip
        actions = tuple(
            Snapshot(a.sandbox_class, a.count) if isinstance(a, Terminate) else a
            for a in decision.actions
        )
        return Decision(actions), memory


AnyPolicy = (
    OnePerRollout
    | FixedPool
    | Elastic
    | KeepWarm
    | Lead
    | Hedged
    | ClaimBackfill
    | TickRefill
    | Reactive
    | SnapshotResume
)


def _within(view: View, missing: dict[int, int], max_size: int) -> tuple[Action, ...]:
    """Creations, by how long the rollouts of a class wait, while there is room."""
    room, actions = max_size - view.alive, []
    for i in sorted(missing, key=lambda i: (view.classes[i].oldest_ticket, i)):
        count = min(missing[i], room)
        if count > 0:
            actions.append(Create(i, count))
            room -= count
    return tuple(actions)


def _mean_up(numbers: list[int]) -> int:
    """The mean, rounded up."""
    return -(-sum(numbers) // len(numbers))
