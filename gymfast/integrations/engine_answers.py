"""Answers to one call to many engines as they come, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gymfast.integrations.engines import EngineError, refusal


class Deadline:
    """A moment by which all of something has to be done."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._end_s - time.monotonic())


class Answers:
    """What engines answered so far; `ray` is the module or what has its `wait` and `get`."""

    def __init__(self, method: str, calls: Sequence[Any], ray: Any) -> None:
        self._method, self._calls, self._ray = method, list(calls), ray
        self._open = dict(enumerate(calls))
        self._failures: dict[int, tuple[bool, str]] = {}  # in order of arrival

    @property
    def are_complete(self) -> bool:
        """True if every engine has answered, well or not."""
        return not self._open

    @property
    def have_failed(self) -> bool:
        """True if an engine failed or refused."""
        return bool(self._failures)

    def take(self, wait_s: float) -> None:
        """Takes the answers that are there; waits for the first one if there is none."""
        if not self._open:
            return
        ready, _ = self._ray.wait(list(self._open.values()), num_returns=1, timeout=wait_s)
        while ready:
            for number in [n for n, call in self._open.items() if call in ready]:
                self._note(number, self._open.pop(number))
            if not self._open:
                return
            ready, _ = self._ray.wait(list(self._open.values()), num_returns=1, timeout=0)

    def take_all(self, deadline: Deadline) -> None:
        """Waits for every engine, or for the first one that fails."""
        while self._open and not self._failures and deadline.left_s:
            self.take(deadline.left_s)

    def suspects(self) -> list[int]:
        """Engines that failed so far: first those that gave no answer of their own."""
        return sorted(self._failures, key=lambda number: self._failures[number][0])

    def error(self, suspects: Sequence[int], otherwise: str) -> EngineError:
        """Names the suspects; else the engines that are silent; else all that failed.

        `otherwise` says what went wrong if none of them did.
        """
        silent = list(self._open)
        order = list(dict.fromkeys([*suspects, *silent, *self.suspects()]))
        if not order:
            return EngineError(f"{self._method} failed on the way to the engines: {otherwise}")
        first, total = order[0], len(self._calls)
        words = self._failures[first][1] if first in self._failures else otherwise
        others = f" (also engines {order[1:]})" if len(order) > 1 else ""
        return EngineError(f"engine {first} of {total} failed at {self._method}: {words}{others}")

    def _note(self, number: int, call: Any) -> None:
        try:
            words = refusal(self._ray.get(call))
        except Exception as error:  # noqa: BLE001 - becomes the error of all engines
            kind = type(error).__name__
            self._failures[number] = "HTTPError" in kind, f"{kind}: {error}"
        else:
            if words is not None:
                self._failures[number] = True, words
