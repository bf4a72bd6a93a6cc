"""What the processes of the demo tell each other: one JSON object a line, with a monotonic time."""

from __future__ import annotations

import sys
import time
from typing import TypeAlias

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event", kw_only=True):
    """Something that happened; `at_s` is the clock that all processes of a machine share."""

    at_s: float = msgspec.field(default_factory=time.monotonic)


class TrainerReady(Event, frozen=True, tag="trainer_ready"):
    """The model exists; warm-up begins."""

    num_parameters: int
    num_tensors: int
    state_bytes: int
    text_bytes: int
    uses_bf16: bool
    torch_version: str


class WarmupStep(Event, frozen=True, tag="warmup_step"):
    """One step of the warm-up; loss in nats per byte."""

    step: int
    num_steps: int
    loss: float


class Published(Event, frozen=True, tag="published"):
    """A version stands in the store; `fingerprint` was taken from the trainer's memory before."""

    version: int
    kind: str
    root: str
    fingerprint: str
    num_changed: int
    raw_bytes: int
    frame_bytes: int
    reward: float
    step_s: float
    publish_s: float


class Damaged(Event, frozen=True, tag="damaged"):
    """One byte of a stored object was flipped, before any receiver could know its version."""

    version: int
    key: str
    offset: int


class TrainerFinished(Event, frozen=True, tag="trainer_finished"):
    """No further version follows."""

    last_version: int


class Attached(Event, frozen=True, tag="attached"):
    """A receiver is up; `version` is what it found on its disk, None for nothing."""

    version: int | None
    is_restart: bool


class Holding(Event, frozen=True, tag="holding"):
    """The receiver stands in the middle of an apply and waits to be killed."""

    version: int
    at_file: str


class Served(Event, frozen=True, tag="served"):
    """A receiver holds this version and would serve it; fingerprint of the bytes it really has.

    `num_versions` were installed in one pass; 0 for what a restarted receiver found.
    """

    version: int
    root: str
    fingerprint: str
    num_versions: int
    apply_s: float
    kept_pointers: bool | None


class Refused(Event, frozen=True, tag="refused"):
    """A receiver did not take what the store gave; it goes on serving `version`.

    `warning` is what gymfast logged last before the error.
    """

    version: int | None
    error: str
    message: str
    warning: str


class Failed(Event, frozen=True, tag="failed"):
    """A process gave up."""

    error: str
    message: str


AnyEvent: TypeAlias = (
    TrainerReady
    | WarmupStep
    | Published
    | Damaged
    | TrainerFinished
    | Attached
    | Holding
    | Served
    | Refused
    | Failed
)

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def tell(event: AnyEvent) -> None:
    """Write an event to stdout, for the process that started this one."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def parse(line: bytes) -> AnyEvent:
    """The event of a line; msgspec.DecodeError for anything else."""
    return _decoder.decode(line)
