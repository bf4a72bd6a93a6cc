"""What a publisher is told and what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gymfast.sync.chain import MAX_CHAIN
from gymfast.sync.cleaner import CleanReport
from gymfast.sync.objects import DEFAULT_OBJECT_BYTES, check_object_bytes

DEFAULT_ANCHOR_EVERY = 50
DEFAULT_KEEP = 50
Kind = Literal["delta", "anchor"]


@dataclass(frozen=True)
class PublishSettings:
    """Choices of a publisher; see `Publisher`. ValueError for numbers out of range."""

    anchor_every: int = DEFAULT_ANCHOR_EVERY
    anchor_ratio: float = 0.5
    keep: int = DEFAULT_KEEP
    memory_budget_bytes: int | None = None
    object_bytes: int = DEFAULT_OBJECT_BYTES
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        check_object_bytes(self.object_bytes)
        if not 1 <= self.anchor_every <= MAX_CHAIN:
            raise ValueError(f"anchor_every is {self.anchor_every}, expected 1 to {MAX_CHAIN}")
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}, at least 1 version has to stay")


@dataclass
class PhaseSeconds:
    """Where the time of a publish went.

    diff: the copy of a first version (later ones are compared in the pass that encodes them);
    put: with hashing (over a long way: what encoding waited for it); commit: confirming the objects
    and creating the record; anchor: an extra anchor; clean: retention.
    """

    diff: float = 0.0
    encode: float = 0.0
    put: float = 0.0
    commit: float = 0.0
    anchor: float = 0.0
    clean: float = 0.0


@dataclass(frozen=True)
class PublishReport:
    """A committed version.

    `anchor_bytes` is the size of the anchor that was added after it, 0 for none; `free_bytes` what
    the store has left, None where it cannot know; `cleaned` what retention did, None if nothing.
    """

    version: int
    kind: Kind
    raw_bytes: int
    frame_bytes: int
    num_changed: int
    num_units: int
    num_tensors: int
    root: str
    seq: int
    epoch: int
    seconds: PhaseSeconds
    anchor_bytes: int = 0
    free_bytes: int | None = None
    cleaned: CleanReport | None = None
