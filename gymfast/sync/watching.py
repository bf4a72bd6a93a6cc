"""Waits for one object of a store that is far away: looks at it overlap, so none is waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import TypeVar

from gymfast.errors import GymfastError, NotFoundError
from gymfast.sync.clock import Clock, Deadline
from gymfast.sync.requests import Pending, Requests

MAX_LOOKS = 8
"""Looks under way at once, however often one is wanted."""
_T = TypeVar("_T")


def watch(
    look: Callable[[], _T],
    requests: Requests,
    clock: Clock,
    *,
    interval_s: float,
    timeout_s: float,
    beside: Callable[[], None] | None = None,
) -> Pending[_T] | None:
    """The first look that finds something, an error included; None if none does in time.

    A look begins every `interval_s`, whether those before it have ended or not: what becomes
    visible is known one way, at most the interval, and the way back later. `beside` is called as
    often.
    """
    found: Future[_T] = Future()

    def look_once() -> None:
        with suppress(NotFoundError, InvalidStateError):  # the latter: a look before found it
            try:
                result = look()
            except NotFoundError:
                raise
            except GymfastError as error:
                found.set_exception(error)
            else:
                found.set_result(result)

    deadline, looks = Deadline(clock, timeout_s), list[Pending[None]]()
    while not deadline.has_passed and not found.done():
        looks = [each for each in looks if not each.is_here]
        if len(looks) < MAX_LOOKS:
            looks.append(requests.start(look_once))
        if beside is not None:
            beside()
        wait((found,), min(interval_s, deadline.left_s))
    return Pending(look, found) if found.done() else None
