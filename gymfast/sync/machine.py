"""States of a subscriber's target: a pure table (docs/sync-protocol.md section 7)."""

from __future__ import annotations

from enum import Enum

from gymfast.errors import ChainError


class State(Enum):
    """What may be said about the bytes of the target."""

    EMPTY = "empty"  # holds no version of this run
    CLEAN = "clean"  # holds exactly the served version
    APPLYING = "applying"  # was clean, is being written
    FILLING = "filling"  # was empty, an anchor is being written
    HEALING = "healing"  # was inconsistent, an anchor is being written
    INCONSISTENT = "inconsistent"  # may hold anything; must not be served


class Event(Enum):
    """What happened to the target."""

    ADOPT = "adopt"  # a full pass found exactly the state of a version
    BEGIN = "begin"  # deltas on the served version are about to be written
    BEGIN_ANCHOR = "begin_anchor"  # an anchor, which needs no base, is about to be written
    VERIFIED = "verified"  # the destination was verified to hold the new version
    UNTOUCHED = "untouched"  # it failed, and the old bytes were verified to be intact
    BROKEN = "broken"  # it failed after a write, or damage was found


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.EMPTY, Event.ADOPT): State.CLEAN,
    (State.EMPTY, Event.BEGIN_ANCHOR): State.FILLING,
    (State.EMPTY, Event.BROKEN): State.INCONSISTENT,
    (State.CLEAN, Event.BEGIN): State.APPLYING,
    (State.CLEAN, Event.BEGIN_ANCHOR): State.APPLYING,
    (State.CLEAN, Event.BROKEN): State.INCONSISTENT,
    (State.APPLYING, Event.VERIFIED): State.CLEAN,
    (State.APPLYING, Event.UNTOUCHED): State.CLEAN,
    (State.APPLYING, Event.BROKEN): State.INCONSISTENT,
    (State.FILLING, Event.VERIFIED): State.CLEAN,
    (State.FILLING, Event.UNTOUCHED): State.EMPTY,
    (State.FILLING, Event.BROKEN): State.INCONSISTENT,
    (State.HEALING, Event.VERIFIED): State.CLEAN,
    (State.HEALING, Event.UNTOUCHED): State.INCONSISTENT,
    (State.HEALING, Event.BROKEN): State.INCONSISTENT,
    (State.INCONSISTENT, Event.ADOPT): State.CLEAN,
    (State.INCONSISTENT, Event.BEGIN_ANCHOR): State.HEALING,
    (State.INCONSISTENT, Event.BROKEN): State.INCONSISTENT,
}


def after(state: State, event: Event) -> State:
    """The next state.

    Raises ChainError for an event that the state does not allow, such as deltas on a broken base.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        allowed = ", ".join(e.value for s, e in TRANSITIONS if s is state)
        raise ChainError(
            f"a target that is {state.value} does not allow '{event.value}' (allowed: {allowed}); "
            "an inconsistent or empty target heals from an anchor only"
        ) from None


def is_serving(state: State) -> bool:
    """True if the target may be used: it holds exactly the served version."""
    return state is State.CLEAN
