"""Which requests an engine may take, by the version of the weights it serves: pure.

See docs/serving.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from gymfast.sync import State, SubscriberStatus

MIN_HEADER, EXACT_HEADER = "x-gymfast-min-version", "x-gymfast-exact-version"
START_HEADER, END_HEADER = "x-gymfast-version-start", "x-gymfast-version-end"
FIELD = "weight_version"
UPDATE_RETRY_S = 1
"""Seconds after which a request that met an update may come again."""
BEHIND_RETRY_S = 1
"""Seconds after which a request for a version that is not here yet may come again."""
_COUNT = re.compile(r"[0-9]{1,16}")
_HEADERS = {MIN_HEADER: "min_version", EXACT_HEADER: "exact_version"}
_MARKS = (f'"{FIELD}"'.encode(), b"\\u00", b"\0")
"""A body may have the field only if it has one of these: its name, or a name in other letters."""


@dataclass(frozen=True)
class Served:
    """What an engine serves: nothing unless it is CLEAN and has a version.

    `is_paused`: what is asked now is answered after an update, with weights not known yet.
    `age_s` are the seconds since the version came, None if that is unknown. `num_changes` grows
    with each version and each failure: the same version may have come back.
    """

    state: State = State.EMPTY
    version: int | None = None
    is_paused: bool = False
    is_stale: bool = False
    age_s: float | None = None
    error: str = ""
    num_changes: int = 0

    @classmethod
    def by(cls, status: SubscriberStatus) -> Served:
        """What a subscriber serves."""
        return cls(status.state, status.version, is_stale=status.is_stale, error=status.last_error)

    @property
    def exact(self) -> int | None:
        """The version that the weights are exactly; None if they may be anything."""
        return self.version if self.state is State.CLEAN else None

    @property
    def may_be_anything(self) -> bool:
        """True if no request may be answered with these weights, whatever it asks."""
        return self.state in (State.INCONSISTENT, State.HEALING)

    def exact_since(self, start: Served) -> int | None:
        """The version, None if another, or a failure, came between `start` and now."""
        same = self.exact != start.exact or self.num_changes == start.num_changes
        return self.exact if same else None

    @property
    def problem(self) -> str:
        """Why this engine is not ready; empty if it is."""
        if self.state is State.INCONSISTENT:
            return f"the weights may be anything: {self.error or 'an update failed'}"
        if self.state is not State.CLEAN and self.state is not State.EMPTY:
            return "an update is under way"
        if self.is_paused:
            return "the engine is paused for an update"
        if self.exact is None:
            return f"no version is served yet{_because(self.error)}"
        if self.is_stale:
            return f"version {self.version} is older than the freshness limit"
        return ""


@dataclass(frozen=True)
class Constraint:
    """What a request asks of the version; at most one of the two."""

    min_version: int | None = None
    exact_version: int | None = None

    def __post_init__(self) -> None:
        if self.min_version is not None and self.exact_version is not None:
            raise ValueError("min_version and exact_version are both given, expected one of them")

    def __bool__(self) -> bool:
        return self.min_version is not None or self.exact_version is not None

    def __str__(self) -> str:
        if self.exact_version is not None:
            return f"exactly version {self.exact_version}"
        return f"version {self.min_version} or newer"


@dataclass(frozen=True)
class Refusal:
    """An answer instead of the engine's; `is_retryable` on this engine, after `retry_s`."""

    status: HTTPStatus
    text: str
    served_version: int | None
    is_retryable: bool
    retry_s: int = 0

    @property
    def body(self) -> bytes:
        """The answer as JSON, its error in the form of OpenAI."""
        error = {"message": self.text, "type": FIELD, "code": int(self.status)}
        fields = {
            "error": error,
            "served_version": self.served_version,
            "retryable": self.is_retryable,
        }
        return msgspec.json.encode(fields)


def decide(constraint: Constraint, served: Served) -> Refusal | None:
    """Why a request is not taken; None if the engine may have it.

    Without a constraint only weights that may be anything are a reason. An engine never goes back,
    so an exact version that it has passed is never here again.
    """
    if served.may_be_anything or (constraint and _is_moving(served)):
        unavailable = HTTPStatus.SERVICE_UNAVAILABLE
        return Refusal(unavailable, served.problem, served.exact, True, UPDATE_RETRY_S)
    if not constraint:
        return None
    version = served.exact
    has = "no version yet" if version is None else f"version {version}"
    because = _because(served.error) if version is None else ""
    text = f"the request asks for {constraint}, this engine serves {has}{because}"
    wanted = constraint.exact_version
    if wanted is None:
        if version is not None and version >= (constraint.min_version or 0):
            return None
    elif version == wanted:
        return None
    elif version is not None and version > wanted:
        return Refusal(HTTPStatus.CONFLICT, text, version, False)
    return Refusal(HTTPStatus.CONFLICT, text, version, True, BEHIND_RETRY_S)


def mixed(constraint: Constraint, start: Served, end: Served) -> Refusal | None:
    """Why an answer may not be given: its tokens are of other weights than the exact ones asked.

    The engine may be asked again where the version is back, or may come back: a refused update
    leaves it.
    """
    wanted, now = constraint.exact_version, end.exact
    if wanted is None or start.exact == end.exact_since(start):
        return None
    came = "unknown weights" if now is None else f"version {now}"
    if now == start.exact:
        came = f"{came} again, after others"
    text = (
        f"the request asks for {constraint}, but an update came while it ran: begun with "
        f"version {start.exact}, ended with {came}"
    )
    may_come = now is None or now <= wanted
    return Refusal(HTTPStatus.CONFLICT, text, now, may_come, UPDATE_RETRY_S if may_come else 0)


def constraint_of(headers: Iterable[tuple[str, str]]) -> Constraint:
    """What the headers ask, by their lower-case names. Raises ValueError for no version."""
    found: dict[str, int] = {}
    for header, text in headers:
        if header not in _HEADERS:
            continue
        if _HEADERS[header] in found:
            raise ValueError(f"header {header} is given twice, expected it once")
        if not _COUNT.fullmatch(text.strip()):
            raise ValueError(f"header {header} is {text[:40]!r}, expected a version")
        found[_HEADERS[header]] = int(text)
    return Constraint(**found)


def take_constraint(body: bytes) -> tuple[Constraint, bytes]:
    """What the field of a JSON body asks, and the body without the field.

    A body without the field is as it was; what is no JSON is for the engine to refuse, unless it
    may ask for a version. Raises ValueError for that, and for a field that asks for no version.
    """
    if not any(mark in body for mark in _MARKS):
        return Constraint(), body
    fields, is_plain = _fields_of(body)
    asked = fields.get(FIELD)
    if isinstance(asked, msgspec.Raw):
        asked = _value_of(asked)
    if asked is None:
        return Constraint(), body
    if not isinstance(asked, dict) or not asked or not _is_constraint(asked):
        shown = str(asked)[:80]
        raise ValueError(f"{FIELD} is {shown}, expected min_version or exact_version, a number")
    constraint = Constraint(**asked)
    del fields[FIELD]
    return constraint, msgspec.json.encode(fields) if is_plain else json.dumps(fields).encode()


def _value_of(raw: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{FIELD} cannot be read: {error}") from None


def _fields_of(body: bytes) -> tuple[dict[str, Any], bool]:
    """The fields of a JSON object, none of other JSON; True if the values are as they were sent.

    What msgspec refuses, engines may read all the same: NaN, half of a pair of surrogates, UTF-16.
    """
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw]), True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        if _MARKS[0] in body:
            raise ValueError(
                f"the body has {FIELD} in it and cannot be read as JSON, so what it asks for is "
                "not known"
            ) from None
        return {}, True
    return (value if isinstance(value, dict) else {}), False


def _is_moving(served: Served) -> bool:
    return served.is_paused or served.state not in (State.CLEAN, State.EMPTY)


def _because(error: str) -> str:
    return f": {error}" if error else ""


def _is_constraint(asked: dict[str, object]) -> bool:
    return set(asked) <= set(_HEADERS.values()) and all(map(_is_count, asked.values()))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53
