"""A packed file turned into a file of a version again: docs/hf-delta.md, 5."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from itertools import accumulate, chain
from pathlib import Path

from gymfast.delta.files import os_errors
from gymfast.delta.hf_delta.packed_changes import unpack
from gymfast.delta.hf_delta.packed_file import CHECK_BYTES, READ_BYTES, WORK_BYTES
from gymfast.delta.hf_delta.packed_table import (
    PIECE,
    Part,
    Read,
    Table,
    carried,
    part_check,
    unzip,
)
from gymfast.delta.hf_delta.publish import write_new
from gymfast.delta.hf_delta.room import Room
from gymfast.delta.safetensors_header import build_header
from gymfast.delta.state import num_threads
from gymfast.delta.workers import OrderedWorkers
from gymfast.errors import ChecksumError, FormatError


def unpack_file(
    read: Read, table: Table, out: Path, where: str, *, threads: int | None = None
) -> None:
    """Writes the file that a packed file carries, durably; `where` names the packed one in errors.

    A file of a delta version that gymfast wrote comes back with the same bytes. One that slime
    wrote has other zstd frames with the same content, and other bytes in its header. Any other
    file is as it was. Takes memory as pack_file does, and disk for a delta file twice.
    Raises FormatError (also as ChecksumError) for damage; out may be there in part then.
    """
    starts = accumulate((part.part_bytes for part in table.parts), initial=0)
    room, workers = (
        Room(WORK_BYTES),
        OrderedWorkers[Part, list[bytes]](num_threads(threads), len(table.parts)),
    )
    jobs = (
        (part, partial(_unpack, read, start, part, where, room, workers.job_threads))
        for start, part in zip(starts, table.parts, strict=False)
    )
    pieces = ((part, data or []) for part, data in workers.run(jobs))
    with os_errors("write", out):
        if table.is_delta:
            _write_delta(pieces, out)
            return
        check = blake2b(digest_size=CHECK_BYTES)
        write_new(out, _noted(pieces, check))
    if check.hexdigest() != table.check:
        raise ChecksumError(
            f"{where}: its {table.num_bytes} bytes have digest {check.hexdigest()}, expected "
            f"{table.check}: remove it and put the version again"
        )


def _unpack(
    read: Read, start: int, part: Part, where: str, room: Room, threads: int
) -> list[bytes]:
    try:
        num_units = sum(tensor.num_units for tensor in part.tensors)
        with room.take(max(2 * part.num_bytes, 6 * num_units)):
            data = read(start, part.part_bytes)
            if part.kind == "piece":
                return [carried(data, PIECE)[: part.num_bytes]]
            if part.kind in ("xor", "overwrite"):
                sizes = [(tensor.num_bytes, tensor.num_units) for tensor in part.tensors]
                return unpack(data, part.kind, sizes, threads)
            if part_check(data) != part.check:
                raise ChecksumError(
                    f"digest {part_check(data)}, expected {part.check}: the store returned damaged "
                    "bytes; remove it and put the version again"
                )
            return [unzip(data, part.num_bytes) if part.kind == "zlib" else data]
    except FormatError as error:
        name = f" of {part.tensors[0].name!r}" if part.tensors else ""
        raise type(error)(f"{where}: {part.kind}{name} at byte {start}: {error}") from error


def _noted(pieces: Iterator[tuple[Part, list[bytes]]], check: blake2b) -> Iterator[bytes]:
    for _, whole in pieces:
        for data in whole:
            check.update(data)
            yield data


def _write_delta(parts: Iterator[tuple[Part, list[bytes]]], out: Path) -> None:
    """The header comes first and is known last: frames wait in a file beside it."""
    body = out.with_name(f".{out.name}.frames")
    specs: list[tuple[str, str, tuple[int, ...]]] = []
    digests: dict[str, str] = {}

    def noted() -> Iterator[bytes]:
        for part, frames in parts:
            for tensor, frame in zip(part.tensors, frames, strict=True):
                specs.append((tensor.name, "U8", (len(frame),)))
                digests[tensor.name] = tensor.digest
                yield frame

    write_new(body, noted())
    start, _ = build_header(specs, digests)
    write_new(out, chain([start], _blocks(body)))
    body.unlink()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            yield data
