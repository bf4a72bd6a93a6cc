"""Calls to all engines at once, with the answer of every one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from gymfast.errors import GymfastError

Calls = dict[int, Any]


class EngineError(GymfastError):
    """An engine that did not do what it was asked."""


class Engines:
    """Handles of engines as frameworks on Ray have them: `handle.method.remote(...)`."""

    def __init__(self, handles: Sequence[Any], get: Callable[..., Any], timeout_s: float) -> None:
        """`get(call, timeout=...)` waits for an answer, and raises what the call raised.

        `timeout_s` bounds each wait for all of them.
        """
        self.handles = list(handles)
        self._get, self._timeout_s = get, timeout_s

    def start(
        self, method: str, *arguments: Any, to: Collection[int] | None = None, **options: Any
    ) -> Calls:
        """The pending calls by the number of the engine: of all, or those in `to`."""
        return {
            number: getattr(handle, method).remote(*arguments, **options)
            for number, handle in enumerate(self.handles)
            if to is None or number in to
        }

    def wait(self, calls: Calls) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Answers and failures by the number of the engine; one that fails stops no other.

        An engine that is silent until the deadline has failed.
        """
        end_s = time.monotonic() + self._timeout_s
        answers: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        for number, call in calls.items():
            try:
                answers[number] = self._get(call, timeout=max(0.0, end_s - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - raised by `require`, after all engines
                is_late = isinstance(error, TimeoutError) and time.monotonic() >= end_s
                late = EngineError(f"no answer within {self._timeout_s:g} s")
                failures[number] = late if is_late else error
            else:
                words = refusal(answers[number])
                if words is not None:
                    failures[number] = EngineError(words)
        return answers, failures

    def require(self, what: str, failures: Mapping[int, Exception]) -> None:
        """Raises EngineError that names each engine that failed, with the words of the first."""
        if not failures:
            return
        first = min(failures)
        error = failures[first]
        text = str(error) if type(error) is EngineError else f"{type(error).__name__}: {error}"
        others = f" (also engines {sorted(failures)[1:]})" if len(failures) > 1 else ""
        raise EngineError(
            f"engine {first} of {len(self.handles)} failed at {what}: {text}{others}"
        ) from error

    def finish(self, method: str, calls: Calls) -> None:
        """Waits for every engine; raises EngineError if one failed."""
        self.require(method, self.wait(calls)[1])

    def call(
        self, method: str, *arguments: Any, to: Collection[int] | None = None, **options: Any
    ) -> None:
        """Both; raises EngineError."""
        self.finish(method, self.start(method, *arguments, to=to, **options))


def refusal(answer: Any) -> str | None:
    """What an engine says that answers without raising, but did not succeed."""
    if isinstance(answer, Mapping) and answer.get("success") is False:
        return str(answer.get("message", answer))
    return None
