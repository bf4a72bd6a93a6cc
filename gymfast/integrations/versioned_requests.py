"""Requests for a version of the weights: engines that are not there yet are asked again.

The other side is `gymfast.integrations.admission`. See docs/serving.md.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from gymfast.errors import ChainError, ChannelError, DeadlineError
from gymfast.integrations.admission_rules import (
    END_HEADER,
    EXACT_HEADER,
    MIN_HEADER,
    START_HEADER,
    Constraint,
)
from gymfast.integrations.engine_http import Answer, EngineHttp

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_COUNT = re.compile(r"[0-9]{1,16}")
_AGAIN = (HTTPStatus.CONFLICT, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)


@dataclass(frozen=True)
class VersionedAnswer:
    """The JSON of an engine, and what it served when the request began and ended.

    None: the engine does not say.
    """

    body: Any
    url: str
    start_version: int | None
    end_version: int | None


def may_retry(code: int, body: Any) -> bool:
    """True if an engine that answered so may be asked again."""
    is_final = isinstance(body, dict) and body.get("retryable") is False
    return code in _AGAIN and not is_final


def pause_s(attempt: int, headers: Mapping[str, str], chance: float) -> float:
    """Seconds to wait before the next attempt, the first of which is 0.

    Between half and all of a time that doubles to 5 s, never less than the header `retry-after`
    says, so that requests that were refused together do not come back together. `chance` is from
    0 to 1.
    """
    grown_s = min(_FIRST_PAUSE_S * 2.0 ** min(attempt, 16), _LONGEST_PAUSE_S)
    text = headers.get("retry-after", "")
    told_s = min(float(text), _LONGEST_PAUSE_S) if text.isdecimal() else 0.0
    return told_s + grown_s * (0.5 + chance / 2)


class VersionedRequests:
    """Requests to engines that serve versions of one run, in turn. Safe to call from many threads.

    Not for streams: an answer is read whole.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`timeout_s` bounds each attempt, the time to answer included.

        Raises ValueError for no engine, or a bad address.
        """
        if not urls:
            raise ValueError("no engine is named, expected at least one URL")
        self._engines = [EngineHttp(url, api_key=api_key, timeout_s=timeout_s) for url in urls]
        self._sleep = sleep
        self._turn = random.Random()  # noqa: S311 - spreads load, guards nothing

    def post(
        self,
        path: str,
        fields: Mapping[str, object],
        *,
        min_version: int | None = None,
        exact_version: int | None = None,
        patience_s: float = 60.0,
    ) -> VersionedAnswer:
        """The answer of an engine that serves what is asked for.

        After `patience_s` no further engine is asked, but each once if that is 0: one that took the
        request in time may answer later. Raises DeadlineError if none took it, ChainError if none
        ever will (all have passed that version), ChannelError for any other answer that is no
        success, or is not of the version that was asked for.
        """
        asked = Constraint(min_version, exact_version)
        headers = {MIN_HEADER: min_version, EXACT_HEADER: exact_version}
        sent = {name: str(value) for name, value in headers.items() if value is not None}
        left = self._turn.sample(self._engines, len(self._engines))
        end_s, num_rounds, why = time.monotonic() + patience_s, 0, ""
        while left:
            wait_s = 0.0
            for engine in tuple(left):
                answer = self._ask(engine, path, fields, sent)
                if answer.code == HTTPStatus.OK:
                    return _checked(answer, engine.url, asked)
                why = f"{engine.url} answered {answer.code}: {answer.text}"
                is_silent = not answer.headers and patience_s > 0
                if is_silent and time.monotonic() >= end_s:  # the next would take as long
                    raise DeadlineError(_too_late(patience_s, why))
                if may_retry(answer.code, answer.body):
                    wait_s = pause_s(num_rounds, answer.headers, self._turn.random())
                elif answer.code == HTTPStatus.CONFLICT:
                    left.remove(engine)
                else:
                    raise ChannelError(why)
            num_rounds += 1
            if left and time.monotonic() + wait_s >= end_s:
                raise DeadlineError(_too_late(patience_s, why))
            self._sleep(wait_s)
        raise ChainError(f"no engine serves {asked} any more: {why}")

    def _ask(
        self, engine: EngineHttp, path: str, fields: Mapping[str, object], sent: Mapping[str, str]
    ) -> Answer:
        try:
            return engine.call(path, fields, sent)
        except ChannelError as error:
            if len(self._engines) == 1:
                raise
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, None, str(error))


def _checked(answer: Answer, url: str, asked: Constraint) -> VersionedAnswer:
    start, end = (_version(answer.headers.get(name)) for name in (START_HEADER, END_HEADER))
    if asked and start is None:
        raise ChannelError(
            f"{url} does not say which version it serves: start it with gymfast's admission "
            "(docs/serving.md)"
        )
    if start is not None and not _holds(asked, start, end):
        raise ChannelError(
            f"{url} was asked for {asked} and answered with version {start} at the start and "
            f"{'an unknown one' if end is None else end} at the end: is there an admission of "
            "gymfast, or does something between change the headers?"
        )
    return VersionedAnswer(answer.body, url, start, end)


def _holds(asked: Constraint, start: int, end: int | None) -> bool:
    exact = asked.exact_version
    if exact is not None:
        return start == exact and end in (None, exact)
    return start >= (asked.min_version or 0)


def _too_late(patience_s: float, why: str) -> str:
    return f"no engine took the request within {patience_s:g} s: {why}"


def _version(text: str | None) -> int | None:
    return int(text) if text and _COUNT.fullmatch(text) else None
