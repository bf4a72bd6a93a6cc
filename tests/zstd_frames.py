"""A parser of zstd frames for the tests: headers only, from RFC 8878; it decodes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAGIC = 0xFD2FB528
BlockType = Literal["raw", "rle", "compressed"]
LiteralsType = Literal["raw", "rle", "compressed", "treeless"]
TableMode = Literal["predefined", "rle", "compressed", "repeat"]

_BLOCKS: tuple[BlockType, ...] = ("raw", "rle", "compressed")
_LITERALS: tuple[LiteralsType, ...] = ("raw", "rle", "compressed", "treeless")
_MODES: tuple[TableMode, ...] = ("predefined", "rle", "compressed", "repeat")


@dataclass(frozen=True)
class Block:
    """What the headers of a block say; a raw or RLE block has neither literals nor sequences."""

    kind: BlockType
    num_bytes: int  # of its body
    literals: LiteralsType | None = None
    num_literals: int = 0
    num_streams: int = 0
    num_sequences: int = 0
    literal_lengths: TableMode | None = None
    offsets: TableMode | None = None
    match_lengths: TableMode | None = None


@dataclass(frozen=True)
class Frame:
    """A whole frame: nothing follows its last block."""

    content_size: int
    window_bytes: int
    is_single_segment: bool
    blocks: tuple[Block, ...]


def parse(data: bytes) -> Frame:
    """The headers of a frame with content size, without dictionary and checksum."""
    assert int.from_bytes(data[:4], "little") == MAGIC
    descriptor, at = data[4], 5
    assert descriptor & 0b11111 == 0  # no dictionary, no checksum, nothing reserved
    is_single = bool(descriptor >> 5 & 1)
    window = 0
    if not is_single:
        base = 1 << (10 + (data[at] >> 3))
        window = base + base // 8 * (data[at] & 7)
        at += 1
    size_bytes = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    assert size_bytes  # a reader that allocates first needs the content size
    content = int.from_bytes(data[at : at + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    blocks, at, is_last = [], at + size_bytes, False
    while not is_last:
        header = int.from_bytes(data[at : at + 3], "little")
        is_last, kind, size = bool(header & 1), _BLOCKS[header >> 1 & 3], header >> 3
        body = data[at + 3 : at + 3 + (1 if kind == "rle" else size)]
        at += 3 + len(body)
        blocks.append(_compressed(body) if kind == "compressed" else Block(kind, size))
    assert at == len(data)
    return Frame(content, window or content, is_single, tuple(blocks))


def _compressed(body: bytes) -> Block:
    literals, size_format = _LITERALS[body[0] & 3], body[0] >> 2 & 3
    field = int.from_bytes(body[:5], "little")
    if literals in ("raw", "rle"):
        header_bytes = (1, 2, 1, 3)[size_format]
        count = field % (1 << 8 * header_bytes) >> (3 if header_bytes == 1 else 4)
        num_streams, size = 0, count if literals == "raw" else 1
    else:
        bits = (10, 10, 14, 18)[size_format]
        header_bytes, num_streams = (4 + 2 * bits + 7) // 8, 1 if size_format == 0 else 4
        count, size = field >> 4 & ((1 << bits) - 1), field >> (4 + bits) & ((1 << bits) - 1)
    rest = body[header_bytes + size :]
    num_sequences, modes = rest[0], rest[1:]
    if num_sequences == 255:
        num_sequences, modes = 0x7F00 + int.from_bytes(rest[1:3], "little"), rest[3:]
    elif num_sequences >= 128:
        num_sequences, modes = (num_sequences - 128 << 8) + rest[1], rest[2:]
    if num_sequences == 0:
        assert len(rest) == 1
        return Block("compressed", len(body), literals, count, num_streams)
    assert modes[0] & 3 == 0
    kinds = [_MODES[modes[0] >> shift & 3] for shift in (6, 4, 2)]
    return Block("compressed", len(body), literals, count, num_streams, num_sequences, *kinds)
