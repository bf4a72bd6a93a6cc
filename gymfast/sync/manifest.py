"""Records of a run: types, canonical bytes, strict parser, limits (docs/sync-protocol.md, 3)."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

import msgspec

from gymfast.errors import FormatError
from gymfast.sync.signatures import MAC_PATTERN, Key, mac_of, problem_of

FORMAT: Final = 1
MAX_RECORD_BYTES = 64 << 20
MAX_SMALL_RECORD_BYTES = 1 << 20  # hints, leases and positions
MAX_STATUS_BYTES = 4096
MAX_OBJECT_BYTES = 512 << 20
MAX_OBJECTS = 262_144  # of one frame; their references stay well below MAX_RECORD_BYTES
MAX_TENSORS = 4_194_304
MAX_AHEAD_OBJECTS = 64

NUMBER_ENCODING, NUMBER_LIMIT, NUMBER_VALUE, NUMBER_MAC = 101, 102, 103, 104

COUNT_MAX = 2**53 - 1  # every JSON reader keeps such integers exact
RUN_PATTERN = r"\A[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z"
_Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
_Hex64 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Hex32 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Name = Annotated[str, msgspec.Meta(pattern=RUN_PATTERN)]
_Label = Annotated[str, msgspec.Meta(pattern=r"\A[ -~]{0,256}\Z")]
_Mac = Annotated[str, msgspec.Meta(pattern=MAC_PATTERN)]


class ObjectRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored object: the SHA-256 of its bytes, which is also its name, and its length."""

    digest: _Hex64
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_OBJECT_BYTES)]


class FrameRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frame: its length and the objects whose bytes, one after another, are its bytes."""

    num_bytes: _Positive
    objects: Annotated[tuple[ObjectRef, ...], msgspec.Meta(min_length=1, max_length=MAX_OBJECTS)]


class _LogRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """What every record of the log begins with; `previous` is the digest of record seq - 1."""

    format: Literal[1]
    run: _Name
    seq: _Positive
    epoch: _Positive
    nonce: _Hex32
    previous: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
    created_us: _Count


class EpochRecord(_LogRecord, frozen=True, tag="epoch"):
    """A publisher took over: every publisher of an older epoch is fenced from here on."""

    publisher: _Label
    mac: _Mac = ""


class VersionRecord(_LogRecord, frozen=True, tag="version"):
    """The commit of a version; an anchor has base_version -1 and the root of no tensors as base."""

    version: _Count
    kind: Literal["delta", "anchor"]
    base_version: Annotated[int, msgspec.Meta(ge=-1, le=COUNT_MAX)]
    base_root: _Hex64
    root: _Hex64
    schema: _Hex64
    num_tensors: Annotated[int, msgspec.Meta(ge=1, le=MAX_TENSORS)]
    raw_bytes: _Count
    num_changed: _Count
    frame: FrameRef
    mac: _Mac = ""


class AnchorRecord(_LogRecord, frozen=True, tag="anchor"):
    """A full state of a version that was committed before as a delta."""

    version: _Count
    root: _Hex64
    schema: _Hex64
    num_tensors: Annotated[int, msgspec.Meta(ge=1, le=MAX_TENSORS)]
    raw_bytes: _Count
    frame: FrameRef
    mac: _Mac = ""


class FoldRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="fold"
):
    """Advice: a frame from `base_version` (-1: from nothing) straight to a later version.

    `seq`, `record` and `epoch` are the place of the log where that version holds.
    """

    format: Literal[1]
    run: _Name
    created_us: _Count
    base_version: Annotated[int, msgspec.Meta(ge=-1, le=COUNT_MAX)]
    base_root: _Hex64
    seq: _Positive
    record: _Hex64
    epoch: _Positive
    version: _Count
    root: _Hex64
    schema: _Hex64
    num_tensors: Annotated[int, msgspec.Meta(ge=1, le=MAX_TENSORS)]
    raw_bytes: _Count
    num_changed: _Count
    frame: FrameRef
    mac: _Mac = ""


class HintRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="hint"
):
    """Advice where the log ended a moment ago; nobody relies on it."""

    format: Literal[1]
    run: _Name
    seq: _Positive
    version: Annotated[int, msgspec.Meta(ge=-1, le=COUNT_MAX)]
    record: _Hex64
    created_us: _Count


class AheadRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="ahead"
):
    """Advice: objects that record `seq`, which is being made, is going to name."""

    format: Literal[1]
    run: _Name
    epoch: _Positive
    seq: _Positive
    objects: Annotated[
        tuple[ObjectRef, ...], msgspec.Meta(min_length=1, max_length=MAX_AHEAD_OBJECTS)
    ]


class LeaseRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="lease"
):
    """A reader needs the records from `seq` on, until `expires_us` of the wall clock."""

    format: Literal[1]
    run: _Name
    reader: _Name
    seq: _Positive
    expires_us: _Count


class StatusRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="status"
):
    """What a reader serves, told for people; version and newest are -1 where there is none.

    `root` are the first 16 digits of that of the version. The reader writes this anew at each
    change, and every `period_us` while it lives.
    """

    format: Literal[1]
    run: _Name
    reader: _Name
    state: Literal["empty", "clean", "applying", "filling", "healing", "inconsistent"]
    version: Annotated[int, msgspec.Meta(ge=-1, le=COUNT_MAX)]
    root: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{16})?\Z")]
    newest: Annotated[int, msgspec.Meta(ge=-1, le=COUNT_MAX)]
    installed_us: _Count
    updated_us: _Count
    period_us: _Positive
    is_stale: bool
    error: _Label


class TipRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place in the log and the state that holds there."""

    seq: _Positive
    record: _Hex64
    epoch: _Positive
    version: _Count
    root: _Hex64


class PositionRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="position"
):
    """What a local checkpoint holds; `reached`: states that an unfinished apply may have left."""

    format: Literal[1]
    run: _Name
    state: Literal["clean", "applying", "inconsistent"]
    tip: TipRecord | None
    reached: Annotated[tuple[TipRecord, ...], msgspec.Meta(max_length=65_536)] = ()


LogRecord = EpochRecord | VersionRecord | AnchorRecord
StateRecord = VersionRecord | AnchorRecord
FrameRecord = StateRecord | FoldRecord


class Signed(Protocol):
    """A record that carries a signature of itself."""

    @property
    def mac(self) -> str:
        """The signature; "" if there is none."""


_R = TypeVar("_R", bound=msgspec.Struct)
_encoder = msgspec.json.Encoder(order=None)


def encode(record: msgspec.Struct) -> bytes:
    """The canonical bytes: JSON, fields in the order of the type, no whitespace, one newline."""
    return _encoder.encode(record) + b"\n"


def digest_of(blob: bytes) -> str:
    """SHA-256 of the bytes, in lower-case hex."""
    return hashlib.sha256(blob).hexdigest()


def parse_log_record(blob: bytes, where: str, key: Key | None = None) -> LogRecord:
    """The record of the log in `blob`.

    Raises FormatError naming `where` if it is too long, not canonical, holds an illegal value, or
    (with a key) is not signed with it.
    """
    record: LogRecord = _decode(blob, LogRecord, where, MAX_RECORD_BYTES)
    if not isinstance(record, EpochRecord):
        _check_frame(record, where)
    if isinstance(record, VersionRecord):
        _check_version(record, where)
    if key is not None:
        verify(record, where, key)
    return record


def parse_fold(blob: bytes, where: str, key: Key | None = None) -> FoldRecord:
    """The fold in `blob`; raises FormatError as `parse_log_record` does."""
    record: FoldRecord = _decode(blob, FoldRecord, where, MAX_RECORD_BYTES)
    _check_frame(record, where)
    if record.base_version >= record.version:
        raise FormatError(
            f"{where}: a fold from version {record.base_version} to {record.version} leads nowhere",
            NUMBER_VALUE,
        )
    _check_changes(record, where)
    if key is not None:
        verify(record, where, key)
    return record


def parse_hint(blob: bytes, where: str) -> HintRecord:
    """The hint in `blob`; FormatError if it is damaged."""
    record: HintRecord = _decode(blob, HintRecord, where, MAX_SMALL_RECORD_BYTES)
    return record


def parse_ahead(blob: bytes, where: str) -> AheadRecord:
    """The note in `blob`; FormatError if it is damaged."""
    record: AheadRecord = _decode(blob, AheadRecord, where, MAX_SMALL_RECORD_BYTES)
    return record


def parse_lease(blob: bytes, where: str) -> LeaseRecord:
    """The lease in `blob`; FormatError if it is damaged."""
    record: LeaseRecord = _decode(blob, LeaseRecord, where, MAX_SMALL_RECORD_BYTES)
    return record


def parse_status(blob: bytes, where: str) -> StatusRecord:
    """The status of a reader in `blob`; FormatError if it is damaged."""
    record: StatusRecord = _decode(blob, StatusRecord, where, MAX_STATUS_BYTES)
    return record


def parse_position(blob: bytes, where: str) -> PositionRecord:
    """The position in `blob`; FormatError if it is damaged."""
    record: PositionRecord = _decode(blob, PositionRecord, where, MAX_RECORD_BYTES)
    return record


def sign(record: _R, key: Key | None) -> _R:
    """The record with the signature of its unsigned bytes in `mac`; unchanged without a key.

    Raises ValueError for a key that is too short, or cannot sign.
    """
    if key is None:
        return record
    return msgspec.structs.replace(record, mac=mac_of(_unsigned(record), key))


def verify(record: Signed, where: str, key: Key | None) -> None:
    """Nothing if the record is signed with the key, or no key is given.

    Raises FormatError that names `where` and says what kind was found.
    """
    if key is None:
        return
    if problem := problem_of(_unsigned(record), record.mac, key):
        raise FormatError(f"{where}: {problem}", NUMBER_MAC)


def _unsigned(record: Any) -> bytes:
    return encode(msgspec.structs.replace(record, mac=""))


def _decode(blob: bytes, record_type: Any, where: str, max_bytes: int) -> Any:
    if len(blob) > max_bytes:
        raise FormatError(
            f"{where}: {len(blob)} bytes, a record has at most {max_bytes}", NUMBER_LIMIT
        )
    try:
        record = msgspec.json.decode(blob, type=record_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{where}: not a record of format {FORMAT}: {error}; "
            "the object is damaged or was not written by gymfast",
            NUMBER_ENCODING,
        ) from error
    if encode(record) != blob:
        raise FormatError(
            f"{where}: the record is not in its canonical form; only gymfast writes records",
            NUMBER_ENCODING,
        )
    return record


def _check_frame(record: FrameRecord, where: str) -> None:
    found = sum(ref.num_bytes for ref in record.frame.objects)
    if found != record.frame.num_bytes:
        raise FormatError(
            f"{where}: objects of {found} bytes make a frame of {record.frame.num_bytes}",
            NUMBER_VALUE,
        )


def _check_version(record: VersionRecord, where: str) -> None:
    is_anchor = record.kind == "anchor"
    expected = -1 if is_anchor else record.version - 1
    if record.base_version != expected or (not is_anchor and expected < 0):
        raise FormatError(
            f"{where}: {record.kind} version {record.version} on base {record.base_version}, "
            f"expected base {expected}",
            NUMBER_VALUE,
        )
    if not is_anchor:
        _check_changes(record, where)


def _check_changes(record: VersionRecord | FoldRecord, where: str) -> None:
    if record.root == record.base_root and record.num_changed:
        raise FormatError(
            f"{where}: {record.num_changed} changes, but the root is that of the base", NUMBER_VALUE
        )
