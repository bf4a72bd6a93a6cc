"""Waiting for objects that a store shows to other hosts later than to the one that put them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from gymfast.errors import NotFoundError
from gymfast.sync.clock import Clock, SystemClock

_POLL_S = 0.2
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Patience:
    """How long an object that is not there is waited for."""

    wait_s: float = 0.0
    clock: Clock = field(default_factory=SystemClock)

    def wait(self, get: Callable[[], _Result]) -> _Result:
        """What get returns, once it finds its object; raises its NotFoundError in the end."""
        end_s = self.clock.monotonic_s() + self.wait_s
        while True:
            try:
                return get()
            except NotFoundError:
                if self.clock.monotonic_s() >= end_s:
                    raise
            self.clock.sleep(_POLL_S)
