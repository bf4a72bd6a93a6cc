"""What the parts of an engine ask of its clock, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from gymfast_sim.records import TraceRow


class SimulationError(RuntimeError):
    """A run that cannot go on; the text says why."""


class Rank(IntEnum):
    """The order of events at one instant; within a rank, by number of rollout or sandbox."""

    TRAIN = 0
    ACTION = 1
    GONE = 2
    API = 3
    READY = 4
    RESET = 5
    EXPIRE = 6
    THINK = 7
    RETRY = 8
    ARRIVE = 9
    GRANT = 10
    BIND = 11
    DECIDE = 12


class Clock(Protocol):
    """Keeps events in the order (time, rank, number)."""

    @property
    def now_ns(self) -> int:
        """The time of the event that is being handled."""

    def later(self, delay_ns: int, rank: Rank, number: int, call: Callable[[Any], None]) -> None:
        """Calls back, with something to ignore, after a delay of 0 or more."""


class Log:
    """Counts of a run, and its trace if somebody wants it."""

    __slots__ = ("counts", "rows")

    def __init__(self, *, keeps_trace: bool) -> None:
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.rows: list[TraceRow] | None = [] if keeps_trace else None

    def add(self, name: str, number: int = 1) -> None:
        """Adds to a count of RunRecord."""
        self.counts[name] += number

    def note(self, time_ns: int, kind: int, number: int, state: int) -> None:
        """A sandbox (kind 0) or a rollout (kind 1) came into a state."""
        if self.rows is not None:
            self.rows.append(TraceRow(time_ns, kind, number, int(state)))


_COUNTS = (
    *("num_asked", "num_cancelled", "num_started", "num_start_failed", "num_died", "num_expired"),
    *("num_terminated", "num_timeouts", "num_served", "num_waited", "wait_ns", "num_events"),
)
