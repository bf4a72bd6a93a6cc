"""Memory for the work of several threads: a job waits until what it needs is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition


class Room:
    """So many bytes; one job at a time may have more than all of them."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._taken = 0
        self._changed = Condition()

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[Callable[[int], None]]:
        """Waits for the bytes and holds them; what it gives counts more of them, without waiting.

        A job takes once: two that wait for each other would wait for ever.
        """
        taken = 0

        def count(more: int) -> None:
            nonlocal taken
            with self._changed:
                taken += more
                self._taken += more
                self._changed.notify_all()

        with self._changed:
            self._changed.wait_for(
                lambda: not self._taken or self._taken + num_bytes <= self._num_bytes
            )
            count(num_bytes)
        try:
            yield count
        finally:
            count(-taken)
