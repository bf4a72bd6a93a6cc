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
    RETRY_CREATION = 10
    GRANT = 11
    BIND = 12
    DECIDE = 13


class Clock(Protocol):
    """Keeps events in the order (time, rank, number)."""

    @property
    def now_ns(self) -> int:
        """The time of the event that is being handled."""

    def later(self, delay_ns: int, rank: Rank, number: int, call: Callable[[Any], None]) -> None:
        """Calls back, with something to ignore, after a delay of 0 or more."""


class Log:
    """Counts of a run, and its trace if somebody wants it."""

    __slots__ = ("_max_changes", "counts", "rows")

    def __init__(self, max_changes: int, *, keeps_trace: bool) -> None:
        self._max_changes = max_changes
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.rows: list[TraceRow] | None = [] if keeps_trace else None

    def add(self, name: str, number: int = 1) -> None:
        """Adds to a count of RunRecord."""
        self.counts[name] += number

    def note(self, time_ns: int, kind: int, number: int, state: int, other: int = -1) -> None:
        """Something happened; see TraceRow. Raises SimulationError after max_changes."""
        self.counts["num_changes"] += 1
        if self.counts["num_changes"] > self._max_changes:
            raise SimulationError(
                f"{self._max_changes} changes by {time_ns / 1e9:g} s and no end: either the policy "
                "does not settle, or the run is longer than max_changes of the scenario allows"
            )
        if self.rows is not None:
            self.rows.append(TraceRow(time_ns, kind, number, int(state), other))


_COUNTS = (
    *("num_asked", "num_refused", "num_cancelled", "num_started", "num_start_failed", "num_died"),
    *("num_hung", "num_lost_completions", "num_expired", "num_preempted"),
    *("num_aborted", "num_terminated", "num_timeouts", "num_served", "num_waited", "wait_ns"),
    *("num_changes", "num_decisions", "num_events"),
)
