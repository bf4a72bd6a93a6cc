"""A frame field by field: what `gymfast delta inspect --bytes` prints.

It follows docs/wire-format.md from front to back and checks nothing but lengths, so that a damaged
frame is shown up to where it stops making sense. Every byte of a good frame is in one field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from gymfast.cli.delta.fields import Field, FieldReader
from gymfast.cli.delta.payload_bytes import read_payload
from gymfast.delta.authentication import ALGORITHMS, AUTH_BODY_BYTES
from gymfast.delta.geometry import Geometry
from gymfast.delta.records import (
    PROFILES,
    STATUS_WITH_BASE,
    STATUS_WITH_NEW,
    Kind,
    Mode,
    SectionType,
    Status,
)
from gymfast.delta.source import Source
from gymfast.errors import FormatError

_BAD_BLOCK_INDEX = 50
_SECTION = "SECTION"
_BYTES_PER_LINE = 8
_MAX_LINES = 4


@dataclass
class _Seen:
    """What later sections need to know of earlier ones."""

    names: list[str] = field(default_factory=list)
    geometries: list[Geometry] = field(default_factory=list)


def walk(source: Source) -> Iterator[Field]:
    """Yield all fields of a frame in order; a section is in memory at a time.

    Raises FormatError, after the last readable field, where the frame ends or makes no sense.
    """
    reader, seen = FieldReader(source), _Seen()
    try:
        reader.take(7, "magic", repr)
        reader.number(1, "format version")
        while reader.position < source.num_bytes:
            _read_section(reader, seen)
            yield from reader.drain()
    except FormatError:
        yield from reader.drain()
        raise
    yield from reader.drain()


def format_field(row: Field) -> Iterator[str]:
    """Lines of a field: offset, bytes (the first 32 of many), name and value."""
    shown = row.data[: _BYTES_PER_LINE * _MAX_LINES]
    text = f"{row.name}: {row.value}"
    if row.name == _SECTION:
        yield ""
    for start in range(0, len(shown), _BYTES_PER_LINE):
        part = shown[start : start + _BYTES_PER_LINE].hex(" ")
        yield f"{row.offset + start:08x}  {part:<23}  {text}".rstrip()
        text = ""
    if len(shown) < len(row.data):
        yield f"{'':8}  ... {len(row.data) - len(shown)} more bytes"


def _read_section(reader: FieldReader, seen: _Seen) -> None:
    start = reader.position
    kind = reader.number(1, _SECTION, lambda kind: _name_of(SectionType, kind).upper())
    reader.number(1, "flags")
    size = reader.number(6, "body_bytes")
    reader.number(8, "check", _hexadecimal)
    end = reader.position + size
    if kind == SectionType.HEADER:
        reader.number(1, "profile", _profile)
        reader.take(7, "reserved")
        reader.number(8, "num_tensors")
    elif kind == SectionType.TENSOR:
        _read_tensor(reader, seen)
    elif kind == SectionType.BLOCKS:
        _read_blocks(reader, seen)
    elif kind == SectionType.AUTH and size == AUTH_BODY_BYTES:
        reader.number(1, "algorithm", lambda number: f"{number} {ALGORITHMS.get(number, '?')}")
        reader.take(32, "tag", _short)
    elif kind == SectionType.END:
        _read_end(reader, seen, start)
    reader.counted(end - reader.position, "bytes without a meaning")


def _read_tensor(reader: FieldReader, seen: _Seen) -> None:
    kind = reader.number(1, "kind", lambda kind: _name_of(Kind, kind))
    unit_bytes = reader.number(1, "unit_bytes")
    reader.number(1, "class_shift")
    reader.number(1, "class_base")
    seen.names.append(reader.text("name"))
    reader.text("dtype")
    for i in range(reader.varint("ndim")):
        reader.varint(f"dim {i}")
    num_bytes = reader.varint("num_bytes")
    cols, tile_rows, tile_cols = (reader.varint(n) for n in ("cols", "tile_rows", "tile_cols"))
    num_units = num_bytes // max(1, unit_bytes)
    seen.geometries.append(Geometry(num_units, unit_bytes, cols, tile_rows, tile_cols))
    if kind == Kind.ALIAS:
        reader.text("target")


def _read_blocks(reader: FieldReader, seen: _Seen) -> None:
    tensor = reader.varint("tensor", lambda i: f"{i} {_name_at(seen, i)}")
    first = reader.varint("first_block")
    blocks = []
    for block in range(first, first + reader.varint("num_blocks")):
        mode = reader.number(1, f"block {block} mode", lambda mode: _name_of(Mode, mode))
        if mode:
            size = reader.varint("payload_bytes")
            reader.number(4, "check", _hexadecimal)
            blocks.append((block, mode, size))
    for block, mode, size in blocks:
        num_units, unit_bytes = _units_of(seen, tensor, block)
        read_payload(reader, mode, size, num_units=num_units, unit_bytes=unit_bytes)


def _read_end(reader: FieldReader, seen: _Seen, start: int) -> None:
    reader.take(32, "base_root", _short)
    reader.take(32, "new_root", _short)
    reader.number(8, "frame_check", _hexadecimal)
    for name in seen.names:
        status = reader.number(1, f"status of {name!r}", lambda status: _name_of(Status, status))
        if status in STATUS_WITH_BASE:
            reader.take(16, "base_digest", _lanes)
        if status in STATUS_WITH_NEW:
            reader.take(16, "new_digest", _lanes)
    reader.number(8, "end_bytes", lambda size: f"{size}, END starts at {start:#x}")


def _units_of(seen: _Seen, tensor: int, block: int) -> tuple[int, int]:
    try:
        geometry = seen.geometries[tensor]
        row, end_row, col, end_col = geometry.block_span(block)
    except (IndexError, ValueError, ZeroDivisionError) as error:
        what = f"tensor {tensor} has no block {block}: {error}"
        raise FormatError(what, _BAD_BLOCK_INDEX) from error
    return (end_row - row) * (end_col - col), geometry.unit_bytes


def _name_at(seen: _Seen, tensor: int) -> str:
    return repr(seen.names[tensor]) if tensor < len(seen.names) else "(no such tensor)"


def _name_of(names: type[IntEnum], value: int) -> str:
    try:
        return f"{value} {names(value).name.lower()}"
    except ValueError:
        return f"{value} (unassigned)"


def _profile(profile: int) -> str:
    return f"{profile} {PROFILES[profile] if profile < len(PROFILES) else '(unassigned)'}"


def _hexadecimal(value: int) -> str:
    return f"{value:#x}"


def _short(root: bytes) -> str:
    return f"{root[:8].hex()}..."


def _lanes(digest: bytes) -> str:
    return f"{digest[:8][::-1].hex()} {digest[8:][::-1].hex()}"
