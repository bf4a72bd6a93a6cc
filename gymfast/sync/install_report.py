"""What a subscriber tells: of one install, and of how it is doing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gymfast.sync.machine import State


@dataclass(frozen=True)
class InstallSeconds:
    """Where the time of an install went; check is the pass over the destination."""

    fetch: float = 0.0
    verify: float = 0.0
    apply: float = 0.0
    check: float = 0.0


@dataclass(frozen=True)
class InstallReport:
    """One install: from which version to which, by an anchor, by deltas, or nothing to do.

    `from_version` is None if nothing usable was held. `num_deltas` were installed as one;
    a fold over many versions is one of them.
    """

    version: int
    from_version: int | None
    kind: Literal["nothing", "deltas", "anchor"]
    root: str
    num_deltas: int = 0
    num_bytes: int = 0
    num_changed: int = 0
    seconds: InstallSeconds = field(default_factory=InstallSeconds)
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True)
class SubscriberStatus:
    """How a subscriber is doing; `version` is None unless it is served."""

    run: str
    state: State
    version: int | None
    newest: int | None
    is_stale: bool
    unchanged_s: float
    last_error: str = ""

    @property
    def text(self) -> str:
        """One line for people."""
        newest = "none yet" if self.newest is None else str(self.newest)
        if self.state is State.INCONSISTENT:
            text = f"inconsistent, serves nothing until it has an anchor; newest version: {newest}"
        elif self.version is None:
            text = f"catching up, serves nothing yet; newest version: {newest}"
        else:
            num_behind = (self.newest or self.version) - self.version
            place = f"{num_behind} behind the newest" if num_behind else "the newest"
            text = f"serves version {self.version}, {place}"
        if self.is_stale:
            text += f"; stale: nothing new for {self.unchanged_s:.0f} s"
        return f"{text}; last error: {self.last_error}" if self.last_error else text
