"""A file of a version as a row of parts that are smaller, and the file again.

A file of a delta version has parts for its tensors: the changes of some as a gymfast frame, or a
zstd frame as it is where that is not larger. Any other file is cut into pieces.
The format is described in docs/hf-delta.md, 5.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

from msgspec.structs import replace

from gymfast.delta.files import open_regular, os_errors, read_into
from gymfast.delta.hf_delta.change_symbols import Content
from gymfast.delta.hf_delta.packed_changes import pack
from gymfast.delta.hf_delta.packed_table import (
    PIECE,
    PackedTensor,
    Part,
    Table,
    carry,
    part_check,
    table_end,
)
from gymfast.delta.hf_delta.room import Room
from gymfast.delta.hf_delta.version import is_delta_file
from gymfast.delta.hf_delta.zstd_frame import ZstdFrame
from gymfast.delta.safetensors_files import SUFFIX, Shard, is_plain, open_shard
from gymfast.delta.safetensors_header import HeaderEntry
from gymfast.delta.state import num_threads
from gymfast.delta.workers import OrderedWorkers
from gymfast.errors import ConflictError, FormatError

PIECE_BYTES = 2**24
WORK_BYTES = 2**31  # of all threads, or what one tensor needs if that is more
READ_BYTES = 2**20
CHECK_BYTES = 16
_GROUP_BYTES = 2**18  # of zstd frames that are packed together
_GROUP_UNITS = 2**25
_MOST_RATIO = 2**16  # more than any zstd frame makes of a byte: such a content size is damage


def check_of(path: Path) -> str:
    """The digest by which two files are the same. Raises OSError."""
    with path.open("rb") as file:
        hasher = blake2b(digest_size=CHECK_BYTES)
        while data := file.read(READ_BYTES):
            hasher.update(data)
    return hasher.hexdigest()


def pack_file(
    path: Path, *, threads: int | None = None, as_changes: bool = True
) -> Iterator[bytes]:
    """The bytes of a packed file, part by part; without as_changes zstd frames stay as they are.

    Takes memory for two parts per thread and WORK_BYTES, of which a tensor needs 4 times its size.
    Raises FormatError for a damaged zstd frame, ConflictError if the file changes meanwhile.
    """
    with os_errors("pack", path):
        check, before = check_of(path), path.stat()
        shard = _delta_shard(path) if as_changes else None
        fd = shard.fd if shard else open_regular(path)
        try:
            workers: OrderedWorkers[int, list[_Packed]]
            jobs = _pack_jobs(path, fd, shard)
            workers = OrderedWorkers(num_threads(threads), len(jobs))
            room, parts = Room(WORK_BYTES), []
            items = ((i, partial(job, room, workers.job_threads)) for i, job in enumerate(jobs))
            for _, results in workers.run(items):
                for part, data in results or ():
                    parts.append(part)
                    yield data
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ConflictError(f"{path}: changed while it was read: it is being written")
        yield from table_end(Table(path.name, before.st_size, check, tuple(parts)))


_Packed = tuple[Part, bytes]
_Job = Callable[[Room, int], list[_Packed]]


def _pack_jobs(path: Path, fd: int, shard: Shard | None) -> list[_Job]:
    if shard is not None:
        return [partial(_pack_tensors, shard, group) for group in _groups(shard.header.tensors)]
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


def _groups(entries: Sequence[HeaderEntry]) -> Iterator[list[HeaderEntry]]:
    """Small tensors go together: what a frame says of itself and of its symbols is said once."""
    group: list[HeaderEntry] = []
    num_bytes = 0
    for entry in entries:
        if group and num_bytes + entry.num_bytes > _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(entry)
        num_bytes += entry.num_bytes
    if group:
        yield group


def _pack_tensors(
    shard: Shard, entries: list[HeaderEntry], room: Room, threads: int
) -> list[_Packed]:
    frames = [_open_frame(shard, entry) for entry in entries]
    packed: list[_Packed] = []
    with room.take(4 * sum(frame.content_bytes or 0 for frame in frames)) as count_more:
        contents = [_content(*pair) for pair in zip(entries, frames, strict=True)]
        count_more(4 * sum(content.num_units for content in contents if content))
        for run in _runs(list(zip(entries, contents, strict=True))):
            packed += _pack_run(shard, run, threads)
    return packed


def _content(entry: HeaderEntry, frame: ZstdFrame) -> Content | None:
    """What a frame holds; None if it does not say how much, or more than can be."""
    size = frame.content_bytes
    if size is None or size > entry.num_bytes * _MOST_RATIO:
        frame.drain()
        return None
    content = Content.read(frame.read, size)
    frame.finish()
    return content


_Run = list[tuple[HeaderEntry, Content | None]]


def _runs(pairs: _Run) -> Iterator[_Run]:
    """Neighbours of one encoding, up to so many units."""
    run: _Run = []
    num_units = 0
    encoding: str | None = None
    for entry, content in pairs:
        more = content.num_units if content else 0
        new = content.encoding if content else None
        if run and (new is None or new != encoding or num_units + more > _GROUP_UNITS):
            yield run
            run, num_units = [], 0
        run.append((entry, content))
        num_units, encoding = num_units + more, new
    yield run


def _pack_run(shard: Shard, run: _Run, threads: int) -> list[_Packed]:
    contents = [content for _, content in run if content]
    if contents:
        frame = pack(contents, threads)
        if len(frame) < sum(entry.num_bytes for entry, _ in run):
            tensors = tuple(_tensor(shard, *pair) for pair in run)
            return [(Part(contents[0].encoding, len(frame), tensors), frame)]
    stored: list[_Packed] = []
    for entry, content in run:
        buffer = bytearray(entry.num_bytes)
        read_into(shard.fd, memoryview(buffer), entry.start, shard.path)
        data = bytes(buffer)
        tensor = replace(_tensor(shard, entry, content), num_units=0)
        stored.append((Part("zstd", len(data), (tensor,), check=part_check(data)), data))
    return stored


def _tensor(shard: Shard, entry: HeaderEntry, content: Content | None) -> PackedTensor:
    sizes = (content.num_bytes, content.num_units) if content else (0, 0)
    return PackedTensor(entry.name, shard.header.metadata[entry.name], *sizes)


def _open_frame(shard: Shard, entry: HeaderEntry) -> ZstdFrame:
    where = f"{shard.path}: tensor {entry.name!r}"
    return ZstdFrame(shard.fd, entry.start, entry.num_bytes, shard.path, where)


def _pack_piece(
    path: Path, fd: int, start: int, size: int, room: Room, threads: int
) -> list[_Packed]:
    with room.take(3 * size):
        data = memoryview(bytearray(size + size % 2))
        read_into(fd, data[:size], start, path)
        if path.suffix == SUFFIX:
            frame = carry(data, PIECE, threads)
            return [(Part("piece", len(frame), num_bytes=size), frame)]
        text = zlib.compress(data[:size])
    return [(Part("zlib", len(text), num_bytes=size, check=part_check(text)), text)]
