"""A strict parser of frames in Python: rules R1..R22 of docs/wire-format.md, payloads excepted.

Whatever the bytes, it raises nothing but FormatError, and what it allocates is in proportion to
their size.
"""

from __future__ import annotations

from gymfast.delta.backends.reference_digest import check64
from gymfast.delta.frame_fields import Fields, read_block_table, read_tensor
from gymfast.delta.records import (
    KINDS_WITH_BLOCKS,
    MAGIC,
    PROFILES,
    SECTION_HEADER_BYTES,
    STATUS_WITH_BASE,
    STATUS_WITH_NEW,
    BlocksRecord,
    EndEntry,
    EndRecord,
    HeaderInfo,
    Kind,
    Mode,
    ParsedFrame,
    SectionType,
    Status,
    TensorRecord,
)
from gymfast.delta.source import Check64, MemorySource, Source
from gymfast.delta.varint import Buffer
from gymfast.errors import ChecksumError, FormatError

MAX_TENSORS = 4_194_304
MAX_BODY_BYTES = 2**40
_FIRST_SKIPPABLE = 0x80
_STATUS_OF_KIND = {
    Kind.DELTA: (Status.UNCHANGED, Status.CHANGED),
    Kind.ADDED: (Status.ADDED,),
    Kind.REPLACED: (Status.REPLACED,),
    Kind.REMOVED: (Status.REMOVED,),
    Kind.ALIAS: (Status.ALIAS,),
}


def parse_frame(buffer: Buffer) -> ParsedFrame:
    """The sections of a frame; block bodies are slices of buffer, which has to stay unchanged.

    Raises FormatError whose number is that of the broken rule; ChecksumError for R7 and R9.
    """
    return parse_source(MemorySource(memoryview(buffer).cast("B")), check64)


def parse_source(source: Source, check64: Check64) -> ParsedFrame:
    """The sections of a frame, which are read one after the other, each once.

    check64(parts) is that of a back end. Raises like parse_frame, and what the source raises.
    """
    return _Parser(source, check64).parse()


def check_magic(data: memoryview) -> None:
    """Raises FormatError 10, 11 or 20 if this is no frame of this format version."""
    start = bytes(data[: len(MAGIC)])
    if start[:7] != MAGIC[: min(7, len(start))]:
        raise FormatError(f"starts with {start.hex(' ')}: this is no gymfast frame", 10)
    if len(start) < len(MAGIC):
        raise FormatError(f"the frame ends after {len(start)} bytes, inside the magic", 20)
    if start != MAGIC:
        raise FormatError(
            f"format version {start[7]}, this reader knows {MAGIC[7]}: update gymfast", 11
        )


class _Parser:
    """State of one pass over a frame."""

    def __init__(self, source: Source, check64: Check64) -> None:
        self._source = source
        self._check64 = check64
        self._checks = bytearray()
        self._header: HeaderInfo | None = None
        self._tensors: list[TensorRecord] = []
        self._blocks: list[BlocksRecord] = []
        self._names: set[str] = set()
        self._changed: set[int] = set()
        self._next_block = 0

    def parse(self) -> ParsedFrame:
        """The whole frame: every section up to END, and nothing behind it."""
        num_bytes = self._source.num_bytes
        check_magic(self._source.read(0, min(len(MAGIC), num_bytes)))
        at = len(MAGIC)
        while True:
            section_type, body, end_at, section = self._section(at)
            if section_type == SectionType.END:
                break
            self._take(section_type, body, at, section)
            self._checks += section[8:]
            at = end_at
        header = self._require_header(at)
        if len(self._tensors) != header.num_tensors:
            raise FormatError(
                f"HEADER says {header.num_tensors} tensors, the frame has {len(self._tensors)}", 45
            )
        self._check_aliases()
        end = self._end(Fields(body, f"END at byte {at}"))
        if end_at != num_bytes:
            raise FormatError(f"{num_bytes - end_at} bytes follow END at byte {end_at}", 21)
        return ParsedFrame(header, tuple(self._tensors), tuple(self._blocks), end, end_at)

    def _section(self, at: int) -> tuple[int, memoryview, int, bytes]:
        """Type and body of the section at a byte offset, the offset behind it, and its header."""
        num_bytes = self._source.num_bytes
        if at + SECTION_HEADER_BYTES > num_bytes:
            where = f"the frame ends at byte {num_bytes}"
            raise FormatError(f"{where}, inside a section or before END: fetch it again", 20)
        header = bytes(self._source.read(at, at + SECTION_HEADER_BYTES))
        start, check = header[:8], header[8:]
        section_type = start[0]
        if section_type < _FIRST_SKIPPABLE and section_type not in list(SectionType):
            raise FormatError(f"section type {section_type:#04x} at byte {at}: update gymfast", 12)
        if start[1]:
            raise FormatError(f"section flags {start[1]:#04x} at byte {at}, expected 0", 13)
        body_bytes = int.from_bytes(start[2:], "little")
        if body_bytes > MAX_BODY_BYTES:
            raise FormatError(f"section at byte {at}: {body_bytes} bytes, limit 2^40", 30)
        body_at = at + SECTION_HEADER_BYTES
        end_at = body_at + body_bytes
        if end_at > num_bytes:
            raise FormatError(
                f"section at byte {at} ends at {end_at}, the frame at {num_bytes}", 20
            )
        body = self._source.read(body_at, end_at)
        found, stated = self._check64(start, body), int.from_bytes(check, "little")
        if found != stated:
            raise ChecksumError(
                f"section at byte {at}: digest {found:016x}, stated {stated:016x}: damaged", 22
            )
        return section_type, body, end_at, header

    def _take(self, section_type: int, body: memoryview, at: int, section: bytes) -> None:
        """Adds one section other than END to the state."""
        if section_type == SectionType.HEADER:
            if self._header is not None:
                raise FormatError(f"a second HEADER at byte {at}", 23)
            self._header = self._read_header(Fields(body, f"HEADER at byte {at}"))
            return
        header = self._require_header(at)
        if section_type == SectionType.TENSOR:
            if len(self._tensors) == header.num_tensors:
                raise FormatError(f"TENSOR at byte {at} is one more than HEADER says", 45)
            record = read_tensor(Fields(body, f"TENSOR at byte {at}"))
            if record.name in self._names:
                raise FormatError(f"tensor {record.name!r} occurs twice, at byte {at}", 41)
            self._names.add(record.name)
            self._tensors.append(record)
            self._next_block = 0
        elif section_type == SectionType.BLOCKS:
            fields = Fields(body, f"BLOCKS at byte {at}")
            self._blocks.append(self._read_blocks(fields, at, section))

    def _require_header(self, at: int) -> HeaderInfo:
        if self._header is None:
            raise FormatError(f"section at byte {at} stands before HEADER", 23)
        return self._header

    def _read_header(self, fields: Fields) -> HeaderInfo:
        profile = fields.u8()
        if profile >= len(PROFILES):
            raise fields.error(f"profile {profile}, expected 0..2", 25)
        if any(fields.take(7)):
            raise fields.error("reserved bytes are not 0", 13)
        num_tensors = int.from_bytes(fields.take(8), "little")
        if num_tensors > MAX_TENSORS:
            raise fields.error(f"{num_tensors} tensors, limit {MAX_TENSORS}", 30)
        fields.finish()
        return HeaderInfo(profile, num_tensors)

    def _read_blocks(self, fields: Fields, at: int, section: bytes) -> BlocksRecord:
        tensor = fields.varint("tensor")
        if tensor != len(self._tensors) - 1:
            last = len(self._tensors) - 1
            raise fields.error(f"belongs to tensor {tensor}, the last TENSOR is {last}", 23)
        record = self._tensors[tensor]
        if record.kind not in KINDS_WITH_BLOCKS:
            raise fields.error(f"tensor {record.name!r} is {record.kind.name}: has no blocks", 23)
        first_block, num_blocks = fields.varint("first_block"), fields.varint("num_blocks")
        end = first_block + num_blocks
        if num_blocks == 0 or first_block < self._next_block or end > record.geometry.num_blocks:
            raise fields.error(
                f"{num_blocks} blocks from {first_block} of {record.name!r}, expected from "
                f"{self._next_block} on and below {record.geometry.num_blocks}",
                50,
            )
        self._next_block = end
        body = fields.rest()
        table = read_block_table(body, num_blocks, record.geometry.unit_bytes, where=fields.where)
        modes = {mode: table.modes.count(mode) for mode in sorted(set(table.modes))}
        if modes.keys() != {Mode.UNCHANGED}:
            self._changed.add(tensor)
        payload_bytes = sum(table.payload_bytes)
        end_at = at + SECTION_HEADER_BYTES + fields.size_bytes
        source = self._source.body(section, at, end_at - len(body), end_at)
        return BlocksRecord(tensor, first_block, num_blocks, source, modes, payload_bytes)

    def _check_aliases(self) -> None:
        by_name = {record.name: record for record in self._tensors}
        for record in self._tensors:
            if record.kind is not Kind.ALIAS:
                continue
            target = by_name.get(record.target)
            if target is None or target.kind not in KINDS_WITH_BLOCKS:
                found = "missing" if target is None else target.kind.name
                raise FormatError(
                    f"alias {record.name!r}: its target {record.target!r} is {found}", 44
                )
            if (target.dtype, target.shape) != (record.dtype, record.shape):
                raise FormatError(
                    f"alias {record.name!r} is {record.dtype} {record.shape}, its target "
                    f"{target.name!r} {target.dtype} {target.shape}",
                    44,
                )

    def _end(self, fields: Fields) -> EndRecord:
        base_root, new_root = fields.take(32), fields.take(32)
        stated, found = int.from_bytes(fields.take(8), "little"), self._check64(self._checks)
        if stated != found:
            raise ChecksumError(
                f"{fields.where}: digest of the sections {found:016x}, stated {stated:016x}", 24
            )
        entries = tuple(self._end_entry(fields, i) for i in range(len(self._tensors)))
        end_bytes = int.from_bytes(fields.take(8), "little")
        if end_bytes != SECTION_HEADER_BYTES + fields.size_bytes:
            raise fields.error(f"end_bytes {end_bytes}, the section has another size", 24)
        fields.finish()
        return EndRecord(base_root, new_root, entries)

    def _end_entry(self, fields: Fields, tensor: int) -> EndEntry:
        record = self._tensors[tensor]
        status = fields.u8()
        if status not in _STATUS_OF_KIND[record.kind]:
            raise fields.error(f"status {status} of {record.name!r}, kind {record.kind.name}", 46)
        has_changes = tensor in self._changed
        if (status == Status.UNCHANGED and has_changes) or (
            status == Status.CHANGED and not has_changes
        ):
            raise fields.error(
                f"status {status} of {record.name!r}, changed blocks: {has_changes}", 46
            )
        base = fields.digest() if status in STATUS_WITH_BASE else None
        new = fields.digest() if status in STATUS_WITH_NEW else None
        return EndEntry(Status(status), base, new)
