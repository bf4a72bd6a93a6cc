"""Writes the sections of a frame one by one: section 3 of docs/wire-format.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from gymfast.delta.authentication import HMAC_SHA256, Tagger
from gymfast.delta.records import (
    MAGIC,
    SECTION_HEADER_BYTES,
    EndEntry,
    Kind,
    SectionType,
    TensorRecord,
)
from gymfast.delta.varint import encode_varint

Check64 = Callable[..., int]


class FrameWriter:
    """Bytes of the sections of one frame, in the order they are asked for; keeps frame_check.

    The caller asks in the order of the format: header, then tensor and its blocks, then end.
    Not thread-safe.
    """

    def __init__(self, check64: Check64, key: bytes | None = None) -> None:
        """A writer whose sections carry check64(parts), the fold64 digest of concatenated bytes.

        With a key (16 bytes or more) the frame is authenticated.
        """
        self._check64 = check64
        self._checks = bytearray()
        self._tagger = None if key is None else Tagger(key)
        if self._tagger is not None:
            self._tagger.update(MAGIC)

    def header(self, profile: int, num_tensors: int) -> bytes:
        """Magic and HEADER section; profile is an index of records.PROFILES."""
        body = bytes((profile, 0, 0, 0, 0, 0, 0, 0)) + num_tensors.to_bytes(8, "little")
        return MAGIC + self.section(SectionType.HEADER, body)

    def tensor(self, record: TensorRecord) -> bytes:
        """A TENSOR section."""
        return self.section(SectionType.TENSOR, _tensor_body(record))

    def blocks(self, tensor: int, first_block: int, num_blocks: int, body: bytes) -> bytes:
        """A BLOCKS section; body is block table and payloads, as encode_blocks returns them."""
        return self.section(SectionType.BLOCKS, _varints((tensor, first_block, num_blocks)), body)

    def end(self, base_root: bytes, new_root: bytes, entries: Sequence[EndEntry]) -> bytes:
        """The END section: roots, frame_check and what became of each tensor; AUTH before it."""
        rows = b"".join(map(_end_row, entries))
        auth = b""
        if self._tagger is not None:
            tag = self._tagger.tag(base_root, new_root, rows)
            self._tagger = None
            auth = self.section(SectionType.AUTH, bytes((HMAC_SHA256,)), tag)
        parts = (base_root, new_root, _u64(self._check64(bytes(self._checks))), rows)
        size_bytes = SECTION_HEADER_BYTES + sum(map(len, parts)) + 8
        return auth + self.section(SectionType.END, *parts, _u64(size_bytes))

    def section(self, section_type: int, *parts: bytes) -> bytes:
        """A section of any type (0x80..0xff: skippable by readers) whose body is the parts."""
        start = bytes((section_type, 0)) + sum(map(len, parts)).to_bytes(6, "little")
        check = _u64(self._check64(start, *parts))
        self._checks += check
        if self._tagger is not None:
            self._tagger.update(start, check, *parts)
        return b"".join((start, check, *parts))


@lru_cache(maxsize=2**16)
def _tensor_body(record: TensorRecord) -> bytes:
    """The same records come back with every version: their bytes are kept."""
    geometry = record.geometry
    return b"".join(
        (
            bytes((record.kind, geometry.unit_bytes, record.class_shift, record.class_base)),
            _text(record.name),
            _text(record.dtype),
            _varints((len(record.shape), *record.shape)),
            encode_varint(record.num_bytes),
            _varints((geometry.cols, geometry.tile_rows, geometry.tile_cols)),
            _text(record.target) if record.kind is Kind.ALIAS else b"",
        )
    )


def _end_row(entry: EndEntry) -> bytes:
    digests = (entry.base_digest, entry.new_digest)
    lanes = (_u64(d[0]) + _u64(d[1]) for d in digests if d is not None)
    return bytes((entry.status,)) + b"".join(lanes)


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _varints(values: Sequence[int]) -> bytes:
    return b"".join(map(encode_varint, values))


def _text(value: str) -> bytes:
    data = value.encode()
    return encode_varint(len(data)) + data
