"""Parses frames with the native parser where it is built, else with the one in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gymfast.delta.authentication import check_authentication, check_source
from gymfast.delta.backends import reference_digest
from gymfast.delta.frame import (
    BlocksRecord,
    EndEntry,
    EndRecord,
    HeaderInfo,
    Kind,
    ParsedFrame,
    Status,
    TensorRecord,
    parse_frame,
)
from gymfast.delta.frame_fields import read_block_table
from gymfast.delta.frame_parser import parse_source
from gymfast.delta.geometry import Geometry
from gymfast.delta.source import Check64, FileSource
from gymfast.errors import FormatError

Frame = bytes | bytearray | memoryview


def parse(frame: Frame, backend: str = "auto", key: bytes | None = None) -> ParsedFrame:
    """The sections of a frame, all structural rules checked; block bodies are slices of it.

    The native parser leaves the modes of blocks out: `with_modes` adds them.
    With a key the tag of the frame is checked before anything else is read.
    Raises FormatError with the number of the broken rule; TypeError if frame is no bytes.
    """
    if not isinstance(frame, bytes | bytearray | memoryview):
        raise TypeError(f"the frame is a {type(frame).__name__}, expected bytes or a memoryview")
    view = memoryview(frame).cast("B")
    if key is not None:
        check_authentication(view, key)
    if backend == "reference":
        return parse_frame(view)
    try:
        from gymfast import _core
    except ImportError:
        if backend == "cpu":
            raise
        return parse_frame(view)
    try:
        return _parsed(_core.parse_frame(view), view)
    except FormatError as error:
        native = error
    parse_frame(view)  # says more about what is wrong
    raise native


@contextmanager
def open_frame(
    frame: Path | str | Frame, backend: str = "auto", key: bytes | None = None
) -> Iterator[ParsedFrame]:
    """The sections of a frame in memory, or in a file that is open as long as the block.

    Of a file only the section at hand is in memory, and a piece of 1 MiB: once when the frame is
    parsed, and again when its blocks are needed.
    Raises FormatError with the number of the broken rule, GymfastError for what the system says.
    """
    if not isinstance(frame, Path | str):
        yield parse(frame, backend, key)
        return
    with open_source(frame, backend, key) as (source, check64):
        yield parse_source(source, check64)


@contextmanager
def open_source(
    path: Path | str, backend: str = "auto", key: bytes | None = None
) -> Iterator[tuple[FileSource, Check64]]:
    """The bytes of a frame in a file, its tag checked if there is a key, and a check64 for them."""
    check64 = _check64_of(backend)
    with FileSource(Path(path), check64, pins=key is not None) as source:
        if key is not None:
            check_source(source, key)
        yield source, check64


def _check64_of(backend: str) -> Check64:
    if backend != "reference":
        try:
            from gymfast import _core
        except ImportError:
            if backend == "cpu":
                raise
        else:
            return _core.check64
    return reference_digest.check64


def with_modes(frame: ParsedFrame) -> ParsedFrame:
    """The frame with the modes of its blocks counted."""
    blocks = []
    for record in frame.blocks:
        unit_bytes = frame.tensors[record.tensor].geometry.unit_bytes
        table = read_block_table(record.body, record.num_blocks, unit_bytes, where="blocks")
        modes = {mode: table.modes.count(mode) for mode in sorted(set(table.modes))}
        blocks.append(replace(record, modes=modes, payload_bytes=sum(table.payload_bytes)))
    return replace(frame, blocks=tuple(blocks))


def _parsed(
    fields: tuple[int, bytes, bytes, tuple[tuple[Any, ...], ...]], view: memoryview
) -> ParsedFrame:
    profile, base_root, new_root, tensors = fields
    records, blocks, ends = [], [], []
    for ordinal, tensor in enumerate(tensors):
        kind, unit_bytes, shift, base, name, dtype, dims, num_bytes, *rest = tensor
        cols, tile_rows, tile_cols, target, sections, status, base_digest, new_digest = rest
        geometry = Geometry(num_bytes // unit_bytes, unit_bytes, cols, tile_rows, tile_cols)
        records.append(TensorRecord(Kind(kind), name, dtype, dims, geometry, shift, base, target))
        ends.append(EndEntry(Status(status), base_digest, new_digest))
        for first, count, at, size in sections:
            blocks.append(BlocksRecord(ordinal, first, count, view[at : at + size], {}, 0))
    header = HeaderInfo(profile, len(records))
    end = EndRecord(base_root, new_root, tuple(ends))
    return ParsedFrame(header, tuple(records), tuple(blocks), end, len(view))
