"""What a trainer and the loader inside SGLang tell each other.

To the engine: uint8 tensors, one of them a JSON record. Back: the bytes of a JSON record, a number
each, since the only thing that SGLang lets a loader answer with is "the weights" of a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pickle import dumps  # noqa: TID251  # writing only: SGLang takes nothing else
from typing import Any, TypeVar

import msgspec

from gymfast.errors import FormatError
from gymfast.integrations.update_request import InitRequest

LOADER = "gymfast.integrations.sglang.load"
PROTOCOL = 3
RECORD = "gymfast.record"
PIECE = "gymfast.piece"
STATUS = "gymfast.status"
_Kind = TypeVar("_Kind")


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="piece"):
    """Bytes of a frame, which come in a second tensor, and where they belong."""

    offset: int


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="part"):
    """A bucket of whole tensors: those that come in the same message.

    With `is_staged` they wait for the update that names the state of all parts; else they are
    loaded as they come, as SGLang does with weights.
    """

    key: str
    is_staged: bool = False


class PartFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="part-frame"):
    """A frame, which comes in a second tensor, for what the engine keeps of a part."""

    key: str


class Parts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version that all parts are together, and its digest (`root_of_parts`).

    With `are_loaded` the tensors were loaded as they came.
    """

    version: str
    root: str
    are_loaded: bool


class LocalVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version that the engine's host has pulled into a directory, a whole checkpoint.

    `source` holds the version directories. Numbers of one `run` tell what follows on what.
    """

    checkpoint: str
    source: str
    run: str
    number: int


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="update"):
    """Load a version of a run, the frame that came in pieces, what the host has pulled, or parts.

    With `is_full` all tensors are loaded, which heals a flagged engine. `is_restored` says that the
    server has unpacked its weights, so that all of them have to be loaded.
    """

    follow: InitRequest | None = None
    version: int | None = None
    frame_bytes: int | None = None
    local: LocalVersion | None = None
    parts: Parts | None = None
    is_full: bool = False
    is_restored: bool = False


class Confirm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="confirm"):
    """Nothing to do: the call carries the flush and the weight version of an update that worked."""


Action = Piece | Part | PartFrame | Update | Confirm


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message to the engine."""

    protocol: int
    update_id: str
    action: Action


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of the newest update: with an `error` the model is untouched, or flagged."""

    update_id: str
    error: str = ""
    is_flagged: bool = False
    root: str = ""
    version: str = ""  # of parts, if the engine keeps some
    num_tensors: int = 0
    num_changed: int = 0
    num_loaded: int = 0


def root_of_parts(roots: Mapping[str, str]) -> str:
    """The digest of a state in parts, from the root of each part."""
    lines = [f"{key}\t{root}\n" for key, root in sorted(roots.items())]
    return sha256("".join(lines).encode()).hexdigest()


def named_tensors(
    update_id: str, action: Action, piece: bytes | None = None
) -> list[tuple[str, Any]]:
    """The message as named CPU tensors of uint8."""
    record = msgspec.json.encode(Record(PROTOCOL, update_id, action))
    named = [(RECORD, _tensor(record))]
    if piece is not None:
        named.append((PIECE, _tensor(piece)))
    return named


def pack(update_id: str, action: Action, piece: bytes | None = None) -> bytes:
    """The message as SGLang's unpickler accepts it: a plain pickle of named CPU tensors."""
    return dumps(named_tensors(update_id, action, piece))


def is_message(named: Any) -> bool:
    """True for named tensors of which one is a record: for the loader, whoever gets them."""
    return isinstance(named, list) and any(name == RECORD for name, _ in named)


def unpack(named: Sequence[tuple[str, Any]]) -> tuple[Record, bytes]:
    """The record and the bytes that came with it; tensors of a part are left where they are.

    Raises FormatError for anything that is not a message of this protocol.
    """
    given = dict(named)
    if RECORD not in given:
        raise _no_message(given)
    data = _bytes_of(RECORD, given.pop(RECORD))
    protocol = _decode(data, _Protocol).protocol
    if protocol != PROTOCOL:
        raise FormatError(
            f"the trainer speaks protocol {protocol}, this engine {PROTOCOL}: install the same "
            "gymfast on both sides"
        )
    record = _decode(data, Record)
    if isinstance(record.action, Part):
        return record, b""
    if given.keys() - {PIECE}:
        raise _no_message(given)
    if isinstance(record.action, Piece | PartFrame) != (PIECE in given):
        raise FormatError(f"{type(record.action).__name__} and {PIECE!r}: one without the other")
    return record, _bytes_of(PIECE, given[PIECE]) if given else b""


def to_numbers(status: Status) -> list[float]:
    """The status as SGLang answers it: each byte of a JSON record is a weight."""
    return [float(byte) for byte in msgspec.json.encode(status)]


def from_numbers(numbers: Any) -> Status:
    """The status behind the list of numbers. Raises FormatError for anything else."""
    try:
        return _decode(bytes(int(number) for number in numbers), Status)
    except (TypeError, ValueError) as error:
        found = repr(numbers)[:100]
        raise FormatError(f"the answer {found} is no status of gymfast: {error}") from error


class _Protocol(msgspec.Struct, frozen=True):
    protocol: int


def _no_message(given: Mapping[str, Any]) -> FormatError:
    return FormatError(
        f"the loader got the tensors {sorted(given)[:5]}, expected {RECORD!r} and perhaps "
        f"{PIECE!r}: it takes messages of gymfast, no weights"
    )


def _decode(data: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise FormatError(f"{len(data)} bytes are no {kind.__name__}: {error}") from error


def _tensor(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(name: str, tensor: Any) -> bytes:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise FormatError(f"{name!r} is no flat uint8 tensor: the loader takes messages of gymfast")
    data: bytes = tensor.cpu().numpy().tobytes()
    return data
