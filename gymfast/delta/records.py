"""What a frame says, as frozen records: section 3 of docs/wire-format.md."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

from gymfast.delta.geometry import Geometry
from gymfast.delta.source import Body
from gymfast.delta.varint import encode_varint

MAGIC = b"GFDF\r\n\x1a\x01"
SECTION_HEADER_BYTES = 16
Digest = tuple[int, int]


class SectionType(IntEnum):
    """Type byte of a section."""

    HEADER = 1
    TENSOR = 2
    BLOCKS = 3
    END = 4
    AUTH = 0x80


class Kind(IntEnum):
    """What a TENSOR section is about."""

    DELTA = 0
    ADDED = 1
    REPLACED = 2
    REMOVED = 3
    ALIAS = 4


class Status(IntEnum):
    """What END says about a tensor."""

    UNCHANGED = 0
    CHANGED = 1
    ADDED = 2
    REPLACED = 3
    REMOVED = 4
    ALIAS = 5


class Mode(IntEnum):
    """How the payload of a block is coded."""

    UNCHANGED = 0
    FAST = 1
    BALANCED = 2
    SMALL = 3
    DENSE = 4
    RAW = 5


PROFILES = ("auto", "fast", "small")
FAST = PROFILES.index("fast")
KINDS_WITH_BLOCKS = frozenset({Kind.DELTA, Kind.ADDED, Kind.REPLACED})
STATUS_WITH_BASE = frozenset({Status.UNCHANGED, Status.CHANGED, Status.REPLACED, Status.REMOVED})
STATUS_WITH_NEW = frozenset({Status.CHANGED, Status.ADDED, Status.REPLACED})


@dataclass(frozen=True)
class HeaderInfo:
    """The HEADER section; profile is an index of PROFILES."""

    profile: int
    num_tensors: int


@dataclass(frozen=True)
class TensorRecord:
    """One TENSOR section; target is empty but for kind ALIAS."""

    kind: Kind
    name: str
    dtype: str
    shape: tuple[int, ...]
    geometry: Geometry
    class_shift: int = 0
    class_base: int = 0
    target: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return self.geometry.num_bytes


@dataclass(frozen=True)
class BlocksRecord:
    """One BLOCKS section; source is a slice of the frame, or what reads it from a file."""

    tensor: int
    first_block: int
    num_blocks: int
    source: Body = field(repr=False)
    modes: dict[Mode, int]
    payload_bytes: int

    @property
    def body(self) -> memoryview:
        """Block table and payloads; read anew each time if they are in a file."""
        return self.source if isinstance(self.source, memoryview) else self.source()


@dataclass(frozen=True)
class EndEntry:
    """What END says of one tensor; a digest that the status does not carry is None."""

    status: Status
    base_digest: Digest | None = None
    new_digest: Digest | None = None


@dataclass(frozen=True)
class EndRecord:
    """The END section; entries are in the order of the TENSOR sections."""

    base_root: bytes
    new_root: bytes
    entries: tuple[EndEntry, ...]


@dataclass(frozen=True)
class ParsedFrame:
    """A frame that breaks none of R1..R22, payloads excepted; blocks in the order of the frame."""

    header: HeaderInfo
    tensors: tuple[TensorRecord, ...]
    blocks: tuple[BlocksRecord, ...]
    end: EndRecord
    frame_bytes: int

    def blocks_of(self, tensor: int) -> tuple[BlocksRecord, ...]:
        """The BLOCKS sections of one tensor (by ordinal); for many tensors group `blocks` once."""
        return tuple(record for record in self.blocks if record.tensor == tensor)

    def new_entries(self) -> list[tuple[str, str, tuple[int, ...], Digest]]:
        """name, dtype, shape and digest of every tensor of the new state: what `root_of` takes."""
        digests: dict[str, Digest] = {}
        for tensor, entry in zip(self.tensors, self.end.entries, strict=True):
            digest = entry.base_digest if entry.status is Status.UNCHANGED else entry.new_digest
            if digest is not None:
                digests[tensor.name] = digest
        return [
            (t.name, t.dtype, t.shape, digests[t.target or t.name])
            for t in self.tensors
            if t.kind is not Kind.REMOVED
        ]


@dataclass(frozen=True)
class TensorInfo:
    """What `inspect` shows of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    kind: str
    status: str
    base_digest: Digest | None
    new_digest: Digest | None
    num_blocks: int
    modes: dict[str, int]
    payload_bytes: int
    target: str = ""


@dataclass(frozen=True)
class FrameInfo:
    """What `inspect` shows of a frame."""

    profile: str
    tensors: tuple[TensorInfo, ...]
    base_root: bytes
    new_root: bytes
    frame_bytes: int
    authentication: str = ""  # algorithm of the tag that the frame carries


def frame_info(frame: ParsedFrame) -> FrameInfo:
    """The summary of a parsed frame; modes count the blocks that were listed, by mode."""
    modes: list[dict[str, int]] = [{} for _ in frame.tensors]
    payload_bytes = [0] * len(frame.tensors)
    for record in frame.blocks:
        payload_bytes[record.tensor] += record.payload_bytes
        counts = modes[record.tensor]
        for mode, count in record.modes.items():
            name = mode.name.lower()
            counts[name] = counts.get(name, 0) + count
    tensors = (
        TensorInfo(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            num_bytes=tensor.num_bytes,
            kind=tensor.kind.name.lower(),
            status=entry.status.name.lower(),
            base_digest=entry.base_digest,
            new_digest=entry.new_digest,
            num_blocks=tensor.geometry.num_blocks,
            modes=modes[i],
            payload_bytes=payload_bytes[i],
            target=tensor.target,
        )
        for i, (tensor, entry) in enumerate(zip(frame.tensors, frame.end.entries, strict=True))
    )
    end = frame.end
    profile = PROFILES[frame.header.profile]
    return FrameInfo(profile, tuple(tensors), end.base_root, end.new_root, frame.frame_bytes)


def root_of(entries: Iterable[tuple[str, str, tuple[int, ...], Digest]]) -> bytes:
    """The 32-byte root of a state from name, dtype, shape and digest of its tensors, in any order.

    Source: docs/wire-format.md section 2.
    """
    sha = hashlib.sha256(b"gymfast-root-1\n")
    by_name = sorted(entries, key=lambda entry: entry[0].encode())
    for name, dtype, shape, (first, second) in by_name:
        sha.update(_root_head(name, dtype, shape))
        sha.update(first.to_bytes(8, "little") + second.to_bytes(8, "little"))
    return sha.digest()


@lru_cache(maxsize=2**16)
def _root_head(text: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """What stands before the digest of a tensor; the same names come back with every version."""
    name = text.encode()
    dims = b"".join(encode_varint(x) for x in (len(shape), *shape))
    return encode_varint(len(name)) + name + encode_varint(len(dtype)) + dtype.encode() + dims
