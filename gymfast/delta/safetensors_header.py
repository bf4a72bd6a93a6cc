"""Headers of safetensors files, read with strict limits and written: no tensor bytes here.

Stricter than the safetensors library: duplicate names are refused, and names a frame cannot carry.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gymfast.delta.geometry import DTYPE_BITS, num_bytes_of
from gymfast.delta.tensors import check_name
from gymfast.errors import FormatError

MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
MAX_DIMS = 32
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file; start is an offset in the file, header included."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself; tensors in the order of their bytes."""

    tensors: tuple[HeaderEntry, ...]
    metadata: dict[str, str] = field(default_factory=dict)


def header_bytes_of(prefix: bytes, file_bytes: int, where: str) -> int:
    """Length of the JSON text, from the first 8 bytes of a file.

    Raises FormatError if the file is too short for it, or it is above the limit.
    """
    if len(prefix) < 8:
        raise FormatError(
            f"{where}: {file_bytes} bytes, expected at least 8: truncated or no safetensors file"
        )
    num_bytes = int.from_bytes(prefix[:8], "little")
    if num_bytes > MAX_HEADER_BYTES:
        raise FormatError(
            f"{where}: header of {num_bytes} bytes, limit {MAX_HEADER_BYTES}: no safetensors file"
        )
    if 8 + num_bytes > file_bytes:
        raise FormatError(
            f"{where}: {file_bytes} bytes, expected at least {8 + num_bytes} for the header: "
            "truncated; copy it again"
        )
    return num_bytes


def parse_header(text: bytes, file_bytes: int, where: str) -> Header:
    """The tensors of a safetensors file of file_bytes, from the JSON text of its header.

    Raises FormatError for duplicate or bad names, impossible shapes, holes, overlaps, and a file
    whose size is not the one the header gives.
    """
    entries = _load(text, where)
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{where}: {_METADATA} is not a table of strings")
    data_start = 8 + len(text)
    tensors = [_entry(name, fields, data_start, where) for name, fields in entries.items()]
    tensors.sort(key=lambda t: (t.start, t.start + t.num_bytes))
    _check_layout(tensors, data_start, file_bytes, where)
    return Header(tuple(tensors), metadata)


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, Header]:
    """The first bytes of a file with these tensors (name, dtype, shape) in this order."""
    table: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    at = 0
    placed = []
    for name, dtype, shape in tensors:
        num_bytes = num_bytes_of(dtype, shape)
        offsets = [at, at + num_bytes]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        placed.append((name, dtype, shape, at, num_bytes))
        at += num_bytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = tuple(HeaderEntry(n, d, s, start + offset, size) for n, d, s, offset, size in placed)
    return len(text).to_bytes(8, "little") + text, Header(entries, metadata)


def load_json(text: bytes, where: str) -> Any:
    """A JSON value without duplicate keys; raises FormatError for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise FormatError(f"{where}: {twice!r} occurs twice: write the checkpoint again")
        return table

    def constant(text: str) -> None:
        raise FormatError(f"{where}: {text} is no JSON value")

    try:
        return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: no valid JSON ({error}): truncated or damaged") from error


def _load(text: bytes, where: str) -> dict[str, Any]:
    where = f"{where}: header"
    if not text.startswith(b"{"):
        raise FormatError(f"{where} starts with {text[:1]!r}, expected '{{': no safetensors file")
    entries = load_json(text, where)
    if not isinstance(entries, dict):
        raise FormatError(f"{where} is no table: no safetensors file")
    return entries


def _entry(name: str, fields: Any, data_start: int, where: str) -> HeaderEntry:
    try:
        where = f"{where}: tensor {check_name(name)!r}"
    except ValueError as error:
        raise FormatError(f"{where}: {error}", 40) from error
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise FormatError(f"{where} has other fields than {', '.join(sorted(_FIELDS))}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(f"{where}: dtype {dtype!r} is unknown: update gymfast")
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise FormatError(f"{where}: shape {shape!r}, expected up to {MAX_DIMS} counts")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise FormatError(f"{where}: data_offsets {offsets!r}, expected two counts")
    try:
        num_bytes = num_bytes_of(dtype, shape)
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from error
    start, end = offsets
    if end - start != num_bytes:
        raise FormatError(
            f"{where}: {dtype} {shape} has {num_bytes} bytes, its offsets give {end - start}"
        )
    return HeaderEntry(name, dtype, tuple(shape), data_start + start, num_bytes)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**62 for v in values)


def _check_layout(tensors: list[HeaderEntry], start: int, file_bytes: int, where: str) -> None:
    at = start
    for tensor in tensors:
        if tensor.start != at:
            what = "overlap before" if tensor.start < at else "hole before"
            raise FormatError(
                f"{where}: {what} tensor {tensor.name!r}: it starts at byte {tensor.start}, "
                f"expected {at}: write the checkpoint again"
            )
        at += tensor.num_bytes
    if at != file_bytes:
        what = "truncated; copy it again" if file_bytes < at else "bytes follow the last tensor"
        raise FormatError(f"{where}: {file_bytes} bytes, expected {at}: {what}")
