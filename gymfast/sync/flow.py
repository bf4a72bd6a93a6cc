"""How many bytes to have asked a store for at once: as much as the way to it holds, hardly more.

Each request goes over a connection of its own that begins with the window it had. A dozen answers
at once overrun the queue of a link, whole windows are lost, and the way is idle until senders have
noticed: far worse than asking a little later.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_BYTES = 4 << 20
"""Asked for at once after a pause, when nothing is known of the way."""
_GAIN = 1.5
_MEMORY = 10  # round trips
_Begun = tuple[float, int]


class Window:
    """The bytes that may be under way: 1.5 times the rate of delivery times the round trip.

    The way is full with one such product; the half more finds out whether it takes more, and fills
    a queue with half of one. Two requests come on top, so that large ones are not alone. Both
    are those of what is read here, the rate the highest of the last ten round trips: a connection
    that begins slowly says little of the way, nor do small answers of a store that takes its time
    for large ones. This is the rule of BBR (doi:10.1145/3009824) for requests instead of packets.
    Pure.
    """

    def __init__(self, first_bytes: int = FIRST_BYTES) -> None:
        self._first_bytes = self.limit = first_bytes
        self._delivered = 0
        self._rates: deque[tuple[float, float]] = deque()  # falling: the first is the highest
        self._round_trip_s = float("inf")
        self._active_s = 0.0
        self.under_way = 0

    def has_room(self, num_bytes: int) -> bool:
        """True if a request for so many bytes may begin; one at a time always may."""
        return self.under_way == 0 or self.under_way + num_bytes <= self.limit

    def begin(self, num_bytes: int, now_s: float) -> _Begun:
        """A request begins; what `end` needs of it. After a pause the rate is found anew."""
        if now_s - self._active_s > _MEMORY * self._round_trip_s and self.under_way == 0:
            self.limit, self._round_trip_s = self._first_bytes, float("inf")
            self._rates.clear()
        self.under_way += num_bytes
        return now_s, self._delivered

    def end(self, num_bytes: int, begun: _Begun, now_s: float, *, is_answered: bool = True) -> None:
        """It has ended; without an answer it says nothing of the way."""
        start_s, before = begun
        self._active_s = now_s
        self.under_way -= num_bytes
        if not is_answered:
            return
        self._delivered += num_bytes
        took_s = max(now_s - start_s, 1e-6)
        self._round_trip_s = min(self._round_trip_s, took_s)
        rate = (self._delivered - before) / took_s
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now_s, rate))
        while self._rates[0][0] < now_s - _MEMORY * self._round_trip_s:
            self._rates.popleft()
        product = self._rates[0][1] * self._round_trip_s
        self.limit = max(self._first_bytes, int(_GAIN * product) + 2 * num_bytes)


class Flow:
    """A window that threads share: their turns come in the order in which they ask.

    A forked process begins with one of its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin_anew()

    @contextmanager
    def turn(self, num_bytes: int) -> Iterator[None]:
        """Within, a request for so many bytes is under way; waits until it may be."""
        if self._pid != os.getpid():
            self._begin_anew()
        own, is_answered = object(), False
        with self._changed:
            self._waiting.append(own)
            self._changed.wait_for(
                lambda: self._waiting[0] is own and self._window.has_room(num_bytes)
            )
            self._waiting.popleft()
            begun = self._window.begin(num_bytes, self._clock())
            self._changed.notify_all()
        try:
            yield
            is_answered = True
        finally:
            with self._changed:
                self._window.end(num_bytes, begun, self._clock(), is_answered=is_answered)
                self._changed.notify_all()

    def _begin_anew(self) -> None:
        """Nothing is under way, as in a forked process, whose parent's threads are not there."""
        self._pid = os.getpid()
        self._window = Window()
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
