"""What a packed file says of its parts, and bytes carried so that all damage is found."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
import numpy as np

from gymfast.delta.apply import restore
from gymfast.delta.encode import encode
from gymfast.delta.state import State
from gymfast.errors import FormatError

MAGIC = b"GFPACK\x1a\x01"
PIECE, _TABLE = "piece", "table"
_TAIL_BYTES = 16

Read = Callable[[int, int], bytes]  # start, length: exactly so many bytes of a packed file
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a delta file: its digest, the content of its zstd frame, units if packed."""

    name: str
    digest: str
    num_bytes: _Count
    num_units: _Count


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What part_bytes of a packed file become: frames of tensors, or num_bytes of the file."""

    kind: Literal["xor", "overwrite", "zstd", "piece", "zlib"]
    part_bytes: _Count
    tensors: tuple[PackedTensor, ...] = ()
    num_bytes: _Count = 0  # kinds piece and zlib
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


def table_end(table: Table) -> Iterator[bytes]:
    """The last bytes of a packed file."""
    text = msgspec.json.encode(table)
    frame = carry(len(text).to_bytes(4, "little") + zlib.compress(text), _TABLE)
    yield from (frame, len(frame).to_bytes(8, "little"), MAGIC)
