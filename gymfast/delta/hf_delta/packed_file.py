"""A file of a version as a row of parts that are smaller, and the file again.

A file of a delta version has a part for each tensor: its changes as a gymfast frame, or its zstd
frame as it is where that is not larger. Any other file is cut into pieces, each a gymfast frame.
The format is described in docs/hf-delta.md, 5.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from gymfast.delta.apply import restore
from gymfast.delta.encode import encode
from gymfast.delta.files import open_regular, os_errors, read_into
from gymfast.delta.hf_delta.change_symbols import empty_content, encoding_of, num_units_of
from gymfast.delta.hf_delta.packed_tensor import pack
from gymfast.delta.hf_delta.room import Room
from gymfast.delta.hf_delta.version import is_delta_file
from gymfast.delta.hf_delta.zstd_frame import ZstdFrame
from gymfast.delta.safetensors_files import SUFFIX, Shard, is_plain, open_shard
from gymfast.delta.safetensors_header import HeaderEntry
from gymfast.delta.state import State, num_threads
from gymfast.delta.workers import OrderedWorkers
from gymfast.errors import ConflictError, FormatError

PIECE_BYTES = 2**24
WORK_BYTES = 2**31  # of all threads, or what one tensor needs if that is more
MAGIC = b"GFPACK\x1a\x01"
_TAIL_BYTES = 16
READ_BYTES = 2**20
CHECK_BYTES = 16
_SMALLEST = (
    2**10
)  # shorter frames are carried as they are: one of changes takes 340 bytes before any
_MOST_RATIO = 2**16  # more than any zstd frame makes of a byte: such a content size is damage
PIECE, _TABLE = "piece", "table"

Read = Callable[[int, int], bytes]  # start, length: exactly so many bytes of a packed file
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What part_bytes of a packed file become: num_bytes of content, or of the file itself."""

    kind: Literal["xor", "overwrite", "zstd", "piece", "zlib"]
    part_bytes: _Count
    num_bytes: _Count
    name: str = ""  # of the tensor, like the rest
    digest: str = ""
    num_units: _Count = 0  # kinds xor and overwrite
    check: str = ""  # kinds zstd and zlib: of the part; the others have checks of their own


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a packed file says of itself; check and num_bytes are those of the file it was."""

    name: str
    num_bytes: _Count
    check: str
    parts: tuple[Part, ...]

    @property
    def is_delta(self) -> bool:
        """Whether it is a file of a delta version."""
        return any(part.kind in ("xor", "overwrite", "zstd") for part in self.parts)


def check_of(path: Path) -> str:
    """The digest by which two files are the same. Raises OSError."""
    with path.open("rb") as file:
        hasher = blake2b(digest_size=CHECK_BYTES)
        while data := file.read(READ_BYTES):
            hasher.update(data)
    return hasher.hexdigest()


def pack_file(path: Path, *, threads: int | None = None) -> Iterator[bytes]:
    """The bytes of a packed file, part by part.

    Takes memory for two parts per thread and WORK_BYTES, of which a tensor needs 4 times its size.
    Raises FormatError for a damaged zstd frame, ConflictError if the file changes meanwhile.
    """
    with os_errors("pack", path):
        check, before = check_of(path), path.stat()
        shard = _delta_shard(path)
        fd = shard.fd if shard else open_regular(path)
        try:
            workers: OrderedWorkers[int, tuple[Part, bytes]]
            jobs = _pack_jobs(path, fd, shard)
            workers = OrderedWorkers(num_threads(threads), len(jobs))
            room, parts = Room(WORK_BYTES), []
            items = ((i, partial(job, room, workers.job_threads)) for i, job in enumerate(jobs))
            for _, result in workers.run(items):
                assert result is not None
                parts.append(result[0])
                yield result[1]
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ConflictError(f"{path}: changed while it was read: it is being written")
        yield from _end(Table(path.name, before.st_size, check, tuple(parts)))


def read_table(read: Read, size: int, where: str) -> Table:
    """The table of a packed file of this size; raises FormatError if it is damaged or none."""
    tail = read(size - _TAIL_BYTES, _TAIL_BYTES) if size >= _TAIL_BYTES else b""
    table_bytes = int.from_bytes(tail[:8], "little")
    start = size - _TAIL_BYTES - table_bytes
    if tail[8:] != MAGIC or start < 0:
        raise FormatError(
            f"{where}: no packed file of a version: damaged, cut off, or put by another version of "
            "gymfast; install the same one on both sides, remove it and put it again"
        )
    try:
        text = carried(read(start, table_bytes), _TABLE)
        num_bytes = int.from_bytes(text[:4], "little")
        table = msgspec.json.decode(unzip(text[4:], num_bytes), type=Table)
    except (FormatError, msgspec.MsgspecError) as error:
        raise FormatError(
            f"{where}: no table of a packed file ({error}); remove it and put it again"
        ) from error
    if sum(part.part_bytes for part in table.parts) != start:
        raise FormatError(
            f"{where}: its parts do not add up to {start} bytes; remove it and put it again"
        )
    return table


def carry(data: bytes | memoryview, name: str, threads: int = 1) -> bytes:
    """Bytes as a gymfast frame, which finds all damage; exponents of 16-bit floats are coded."""
    content = np.frombuffer(data, np.uint8)
    units = content if content.size % 2 else content.view(np.uint16)
    return encode(None, {name: units}, profile="fast", threads=threads)


def carried(frame: bytes, name: str) -> bytes:
    """The bytes that carry was given; raises FormatError for damage, or another name."""
    state = State.empty()
    restore(state, frame, allow_new_names=True)
    if list(state.tensors) != [name]:
        raise FormatError(
            f"a frame of {list(state.tensors)}, expected {name!r}: remove it and put it again"
        )
    data: bytes = state.tensors[name].data.tobytes()
    return data


def unzip(data: bytes, num_bytes: int) -> bytes:
    """Exactly num_bytes; raises FormatError if there are more or less."""
    decoder = zlib.decompressobj()
    try:
        text = decoder.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise FormatError(f"no zlib stream ({error}); remove it and put it again") from error
    if len(text) != num_bytes:
        raise FormatError(
            f"{len(text)} bytes or more, expected {num_bytes}; remove it and put it again"
        )
    return text


def part_check(part: bytes) -> str:
    """The check of a part that has none of its own."""
    return blake2b(part, digest_size=8).hexdigest()


_Job = Callable[[Room, int], tuple[Part, bytes]]


def _pack_jobs(path: Path, fd: int, shard: Shard | None) -> list[_Job]:
    if shard is not None:
        return [partial(_pack_tensor, shard, entry) for entry in shard.header.tensors]
    size = os.fstat(fd).st_size
    starts = range(0, size, PIECE_BYTES)
    return [partial(_pack_piece, path, fd, at, min(PIECE_BYTES, size - at)) for at in starts]


def _delta_shard(path: Path) -> Shard | None:
    """A file of a delta version, open; any other is carried as it is, whatever is in it."""
    if not is_plain(path.name, SUFFIX):
        return None
    try:
        shard = open_shard(path)
    except FormatError:
        return None
    if is_delta_file(shard) and all(entry.dtype == "U8" for entry in shard.header.tensors):
        return shard
    os.close(shard.fd)
    return None


def _pack_tensor(shard: Shard, entry: HeaderEntry, room: Room, threads: int) -> tuple[Part, bytes]:
    name, digest = entry.name, shard.header.metadata[entry.name]
    where = f"{shard.path}: tensor {name!r}"
    frame = ZstdFrame(shard.fd, entry.start, entry.num_bytes, shard.path, where)
    size = frame.content_bytes
    if size is not None and entry.num_bytes > _SMALLEST and size <= entry.num_bytes * _MOST_RATIO:
        with room.take(4 * size) as count_more:
            content = empty_content(size)
            for at in range(0, size, READ_BYTES):
                piece = frame.read(min(READ_BYTES, size - at))
                content[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            frame.finish()
            encoding = encoding_of(content, size)
            num_units = num_units_of(content, size, encoding)
            count_more(4 * num_units)
            packed = pack(content, size, encoding, threads)
        if len(packed) < entry.num_bytes:
            part = Part(encoding, len(packed), size, name, digest, num_units)
            return part, packed
    else:
        size = frame.drain()
    stored = bytearray(entry.num_bytes)
    read_into(shard.fd, memoryview(stored), entry.start, shard.path)
    data = bytes(stored)
    return Part("zstd", len(data), size, name, digest, check=part_check(data)), data


def _pack_piece(
    path: Path, fd: int, start: int, size: int, room: Room, threads: int
) -> tuple[Part, bytes]:
    with room.take(3 * size):
        data = memoryview(bytearray(size + size % 2))
        read_into(fd, data[:size], start, path)
        if path.suffix == SUFFIX:
            frame = carry(data, PIECE, threads)
            return Part("piece", len(frame), size), frame
        text = zlib.compress(data[:size])
    return Part("zlib", len(text), size, check=part_check(text)), text


def _end(table: Table) -> Iterator[bytes]:
    text = msgspec.json.encode(table)
    frame = carry(len(text).to_bytes(4, "little") + zlib.compress(text), _TABLE)
    yield from (frame, len(frame).to_bytes(8, "little"), MAGIC)
