"""Time, injected: wall clock for what others read, monotonic clock for waits; every wait ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from gymfast.errors import DeadlineError


class Clock(Protocol):
    """What sync needs of time; tests inject one that they move by hand."""

    def wall_us(self) -> int:
        """Microseconds since 1970; may jump either way."""

    def monotonic_s(self) -> float:
        """Seconds that only ever grow."""

    def sleep(self, seconds: float) -> None:
        """Returns after that time."""


class SystemClock:
    """The clock of the machine."""

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Deadline:
    """The end of a wait, and the pauses in it."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        """A deadline in `timeout_s` from now."""
        self._clock = clock
        self.timeout_s = timeout_s
        self._end_s = clock.monotonic_s() + timeout_s

    def restart(self) -> None:
        """Something arrived: all of the time is left again."""
        self._end_s = self._clock.monotonic_s() + self.timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, self._end_s - self._clock.monotonic_s())

    @property
    def has_passed(self) -> bool:
        """True once no time is left."""
        return self.left_s == 0.0

    def require(self, what: str) -> None:
        """Raises DeadlineError that names the wait if the deadline has passed."""
        if self.has_passed:
            raise DeadlineError(f"{what}: no success within {self.timeout_s:g} s")

    def pauses(self, first_s: float, longest_s: float) -> Iterator[float]:
        """Sleeps before each value but the first, each time longer, until the deadline passes.

        The values are the seconds left.
        """
        pause_s = first_s
        while True:
            yield self.left_s
            if self.has_passed:
                return
            self._clock.sleep(min(pause_s, self.left_s))
            pause_s = min(2 * pause_s, longest_s)
