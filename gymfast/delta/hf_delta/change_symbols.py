"""What the content of a zstd frame changes, as symbols of 16-bit units, and the content again.

`xor`: the symbol of a unit is its two bytes. `overwrite`: its new bytes, and above them bit 16 if
the first one is given, bit 17 if the second one is. No symbol is 0: that is no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.files import Buffer
from gymfast.delta.memory import U8

Encoding = Literal["xor", "overwrite"]
U16 = NDArray[np.uint16]
Symbols = NDArray[np.uint16] | NDArray[np.uint32]
CHUNK_UNITS = 2**20
_READ_BYTES = 2**20
NUM_SYMBOLS = {"xor": 2**16, "overwrite": 2**18}
_COUNT_BYTES, _CHANGE_BYTES = 4, 5  # of the overwrite encoding: u32 count, then u32 and u8 each


class Chunk(NamedTuple):
    """Changed units from `start` on, ascending: how far behind it they lie, and their symbols."""

    start: int
    at: NDArray[np.uint32]
    symbols: Symbols


@dataclass(frozen=True, eq=False)
class Content:
    """What a zstd frame holds, and how many units there are up to the last that may change."""

    data: U8  # with zeros behind num_bytes that make whole words of 8 bytes
    num_bytes: int
    encoding: Encoding
    num_units: int

    @classmethod
    def read(cls, read: Callable[[int], Buffer], num_bytes: int) -> Content:
        """A content that comes piece by piece.

        It is `overwrite` if it reads as such, with ascending positions; `xor` is any other.
        """
        data = np.zeros(whole_words(num_bytes, 8), np.uint8)
        for at in range(0, num_bytes, _READ_BYTES):
            piece = np.frombuffer(read(min(_READ_BYTES, num_bytes - at)), np.uint8)
            data[at : at + piece.size] = piece
        if not _is_overwrite(data, num_bytes):
            return cls(data, num_bytes, "xor", -(-num_bytes // 2))
        last = int(_overwritten(data, num_bytes)[0][-1])
        return cls(data, num_bytes, "overwrite", last // 2 + 1)

    def split(self) -> Iterator[Chunk]:
        """Its changes, in order."""
        if self.encoding == "overwrite":
            return _split_overwrite(*_overwritten(self.data, self.num_bytes))
        return _split_xor(self.data.view(np.uint16))


def whole_words(count: int, per_word: int) -> int:
    """The next multiple of per_word."""
    return -(-count // per_word) * per_word


def changed_units(units: U16, unchanged: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Where units are not `unchanged`, chunk by chunk: its start, and how far behind it they lie.

    Looks at four at a time: most are unchanged. The units have to be whole words.
    """
    word = np.uint64(unchanged * 0x0001_0001_0001_0001)
    for start in range(0, units.size, CHUNK_UNITS):
        chunk = units[start : start + CHUNK_UNITS]
        words = np.flatnonzero(chunk.view(np.uint64) != word)
        rows, columns = np.nonzero(chunk.reshape(-1, 4)[words] != unchanged)
        yield start, words[rows] * 4 + columns


def join_xor(chunks: Iterator[Chunk], num_bytes: int) -> U8:
    """The content of which these are the changes."""
    content = np.zeros(whole_words(num_bytes, 2), np.uint8)
    units = content.view(np.uint16)
    for chunk in chunks:
        units[chunk.start :][chunk.at] = chunk.symbols
    return content[:num_bytes]


def join_overwrite(chunks: Iterator[Chunk], num_units: int) -> tuple[U8, U8, int]:
    """Old and new bytes that differ exactly where the changes are, the new ones; their number."""
    new = np.zeros(2 * num_units, np.uint8)
    old, num_changed = np.zeros_like(new), 0
    for chunk in chunks:
        for half in range(2):
            given = (chunk.symbols >> (16 + half)) & 1 == 1
            at = 2 * (chunk.start + chunk.at[given].astype(np.int64)) + half
            new[at] = (chunk.symbols[given] >> (8 * half)).astype(np.uint8)
            old[at] = ~new[at]
            num_changed += at.size
    return old, new, num_changed


def overwrite_bytes(num_changed: int) -> int:
    """Bytes of a content of the overwrite encoding."""
    return _COUNT_BYTES + _CHANGE_BYTES * num_changed


def _is_overwrite(data: U8, num_bytes: int) -> bool:
    count = int(data[:_COUNT_BYTES].view("<u4")[0]) if num_bytes >= _COUNT_BYTES else 0
    if not count or num_bytes != overwrite_bytes(count):
        return False
    positions, _ = _overwritten(data, num_bytes)
    starts = range(0, count, CHUNK_UNITS)
    pieces = (positions[start : start + CHUNK_UNITS + 1] for start in starts)
    return all(bool(np.all(piece[1:] > piece[:-1])) for piece in pieces)


def _overwritten(data: U8, num_bytes: int) -> tuple[NDArray[np.uint32], U8]:
    """Positions and new bytes of the overwrite encoding."""
    values = _COUNT_BYTES + 4 * ((num_bytes - _COUNT_BYTES) // _CHANGE_BYTES)
    return data[_COUNT_BYTES:values].view("<u4"), data[values:num_bytes]


def _split_xor(units: U16) -> Iterator[Chunk]:
    for start, at in changed_units(units, 0):
        yield Chunk(start, at.astype(np.uint32), units[start:][at])


def _split_overwrite(positions: NDArray[np.uint32], values: U8) -> Iterator[Chunk]:
    start = 0
    while start < positions.size:
        end = min(start + CHUNK_UNITS, positions.size)
        if end < positions.size and positions[end] // 2 == positions[end - 1] // 2:
            end += 1  # both bytes of a unit
        units, halves = np.divmod(positions[start:end], 2)
        is_first = np.concatenate([[True], units[1:] != units[:-1]])
        index = np.cumsum(is_first) - 1
        symbols = np.zeros(int(index[-1]) + 1, np.uint32)
        given = values[start:end].astype(np.uint32)
        for half in (0, 1):
            of_half = halves == half
            symbols[index[of_half]] |= (1 << (16 + half)) | (given[of_half] << (8 * half))
        first = int(units[0])
        yield Chunk(first, units[is_first] - np.uint32(first), symbols)
        start = end
