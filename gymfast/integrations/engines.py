"""Calls to all engines at once, with the answer of every one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymfast.errors import GymfastError


class EngineError(GymfastError):
    """An engine that did not do what it was asked."""


class Engines:
    """Handles of engines as frameworks on Ray have them: `handle.method.remote(...)`."""

    def __init__(self, handles: Sequence[Any], get: Callable[[Any], Any]) -> None:
        """`get` waits for the answer to a call, and raises what the call raised."""
        self.handles = list(handles)
        self._get = get

    def start(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """The pending calls, one per engine."""
        return [getattr(h, method).remote(*arguments, **options) for h in self.handles]

    def finish(self, method: str, calls: Sequence[Any]) -> None:
        """Waits for every engine, also behind one that failed.

        Raises EngineError that names each engine that failed, with its own words.
        """
        failures: dict[int, str] = {}
        cause: Exception | None = None
        for number, call in enumerate(calls):
            try:
                answer = self._get(call)
            except Exception as error:  # noqa: BLE001 - raised below, after the other engines
                failures[number] = f"{type(error).__name__}: {error}"
                cause = cause or error
            else:
                words = refusal(answer)
                if words is not None:
                    failures[number] = words
        if failures:
            first = min(failures)
            others = f" (also engines {sorted(failures)[1:]})" if len(failures) > 1 else ""
            raise EngineError(
                f"engine {first} of {len(calls)} failed at {method}: {failures[first]}{others}"
            ) from cause

    def call(self, method: str, *arguments: Any, **options: Any) -> None:
        """Both; raises EngineError."""
        self.finish(method, self.start(method, *arguments, **options))


def refusal(answer: Any) -> str | None:
    """What an engine says that answers without raising, but did not succeed."""
    if isinstance(answer, Mapping) and answer.get("success") is False:
        return str(answer.get("message", answer))
    return None
