"""Parses frames with the native parser where it is built, else with the one in Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gymfast.delta.authentication import check_authentication
from gymfast.delta.files import read_whole
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
from gymfast.delta.geometry import Geometry
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


def parse_file(
    frame: Path | str | Frame, backend: str = "auto", key: bytes | None = None
) -> ParsedFrame:
    """The sections of a frame in a file, which is read into memory, or in memory already.

    Raises FormatError with the number of the broken rule, GymfastError for what the system says.
    """
    data = read_whole(Path(frame)) if isinstance(frame, Path | str) else frame
    return parse(data, backend, key)


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
