"""Which requests an engine may take, by the version of the weights it serves: pure.

See docs/serving.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

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
_MARK = f'"{FIELD}"'.encode()


@dataclass(frozen=True)
class Served:
    """What an engine serves: nothing unless it is CLEAN and has a version.

    `is_paused`: what is asked now is answered after an update, with weights not known yet.
    `age_s` are the seconds since the version came, None if that is unknown.
    """

    state: State = State.EMPTY
    version: int | None = None
    is_paused: bool = False
    is_stale: bool = False
    age_s: float | None = None
    error: str = ""

    @classmethod
    def by(cls, status: SubscriberStatus) -> Served:
        """What a subscriber serves."""
        return cls(status.state, status.version, is_stale=status.is_stale, error=status.last_error)

    @property
    def exact(self) -> int | None:
        """The version that the weights are exactly; None if they may be anything."""
        return self.version if self.state is State.CLEAN else None

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
    if served.state is State.INCONSISTENT or (constraint and _is_moving(served)):
        unavailable = HTTPStatus.SERVICE_UNAVAILABLE
        return Refusal(unavailable, served.problem, served.version, True, UPDATE_RETRY_S)
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


def mixed(constraint: Constraint, start: int | None, end: int | None) -> Refusal | None:
    """Why an answer may not be given: its tokens are of other weights than the exact ones asked."""
    if constraint.exact_version is None or start == end:
        return None
    text = (
        f"the request asks for {constraint}, but an update came while it ran: begun with "
        f"version {start}, ended with {'unknown weights' if end is None else f'version {end}'}"
    )
    return Refusal(HTTPStatus.CONFLICT, text, end, False)


def constraint_of(headers: Mapping[str, str]) -> Constraint:
    """What the headers ask, by their lower-case names. Raises ValueError for no version."""
    found: dict[str, int] = {}
    for name, header in (("min_version", MIN_HEADER), ("exact_version", EXACT_HEADER)):
        text = headers.get(header)
        if text is not None:
            if not _COUNT.fullmatch(text.strip()):
                raise ValueError(f"header {header} is {text[:40]!r}, expected a version")
            found[name] = int(text)
    return Constraint(**found)


def take_constraint(body: bytes) -> tuple[Constraint, bytes]:
    """What the field of a JSON body asks, and the body without the field.

    A body without such an object is as it was; what is no JSON is for the engine to refuse.
    Raises ValueError for a field that asks for no version.
    """
    if _MARK not in body:
        return Constraint(), body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        asked = msgspec.json.decode(fields[FIELD]) if FIELD in fields else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Constraint(), body
    if not isinstance(asked, dict):  # such as the name of a version, in a call of an engine
        return Constraint(), body
    unknown = sorted(set(asked) - {"min_version", "exact_version"})
    if unknown or not all(_is_count(value) for value in asked.values()):
        shown = str(asked)[:80]
        raise ValueError(f"{FIELD} is {shown}, expected min_version or exact_version, a number")
    del fields[FIELD]
    return Constraint(**asked), msgspec.json.encode(fields)


def _is_moving(served: Served) -> bool:
    return served.is_paused or served.state not in (State.CLEAN, State.EMPTY)


def _because(error: str) -> str:
    return f": {error}" if error else ""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53
