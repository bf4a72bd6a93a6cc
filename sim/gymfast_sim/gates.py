"""Limits that creations pass one after another, first come first served; pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RateLimit:
    """At most `burst` creations at once, then one every `interval_ns`: the GCRA in whole numbers.

    In any window of w nanoseconds there are at most burst + w // interval_ns creations.
    Source: ITU-T I.371 annex A, the virtual scheduling algorithm.
    """

    __slots__ = ("_arrival_ns", "_tolerance_ns", "burst", "interval_ns")

    def __init__(self, interval_ns: int, burst: int) -> None:
        self.interval_ns, self.burst = interval_ns, burst
        self._tolerance_ns = (burst - 1) * interval_ns
        self._arrival_ns = 0  # the theoretical arrival time

    @property
    def next_ns(self) -> int:
        """The earliest time for the next creation."""
        return max(0, self._arrival_ns - self._tolerance_ns)

    def take(self, now_ns: int) -> None:
        """A creation at now_ns, which is not before next_ns."""
        assert now_ns >= self.next_ns
        self._arrival_ns = max(now_ns, self._arrival_ns) + self.interval_ns


class Gate(Generic[T]):
    """A queue before `capacity` permits; None lets all pass."""

    __slots__ = ("capacity", "queue", "used")

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.queue: deque[T] = deque()
        self.used = 0

    @property
    def is_open(self) -> bool:
        """Whether the first of the queue may pass."""
        return self.capacity is None or self.used < self.capacity
