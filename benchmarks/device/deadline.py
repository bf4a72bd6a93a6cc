"""The time that is left: of the run, and of one phase of it."""

from __future__ import annotations

import time


class Deadline:
    """A moment, as seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    def phase(self, seconds: float) -> Deadline:
        """The deadline of a phase that may take so long, within this one."""
        return Deadline(min(seconds, self.left_s))
