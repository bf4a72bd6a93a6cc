"""The digest of section 2 of docs/wire-format.md, in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.geometry import Geometry

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
_ROW_WORDS = 1024
_CHUNK_BYTES = 2**20
_MASK64 = 2**64 - 1


def splitmix64(x: U64) -> U64:
    """The finaliser of splitmix64, elementwise modulo 2^64."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@cache
def column_keys(lane: int) -> U64:
    """k[lane][0..1023]: odd, 32 bits each."""
    j = np.arange(_ROW_WORDS, dtype=np.uint64)
    keys = (splitmix64(np.uint64(1024 * lane) + j) >> np.uint64(32)) | np.uint64(1)
    keys.flags.writeable = False
    return keys


def row_keys(lane: int, rows: U64) -> U64:
    """K[lane](r) of each row number: odd, 64 bits each."""
    return splitmix64(np.uint64(2**63 + lane) + np.uint64(2) * rows) | np.uint64(1)


def digest_bytes(data: U8) -> tuple[int, int]:
    """H[0] and H[1] of a byte string that starts at offset 0, zero-padded to whole words."""
    return _digest_chunks(
        data[start : start + _CHUNK_BYTES] for start in range(0, data.size, _CHUNK_BYTES)
    )


def _digest_chunks(chunks: Iterator[U8]) -> tuple[int, int]:
    """H[0] and H[1] of the concatenation; all chunks but the last are of _CHUNK_BYTES."""
    lanes = [0, 0]
    for i, chunk in enumerate(chunks):
        padded = np.zeros(-(-chunk.size // (4 * _ROW_WORDS)) * 4 * _ROW_WORDS, np.uint8)
        padded[: chunk.size] = chunk
        words = padded.view("<u4").astype(np.uint64).reshape(-1, _ROW_WORDS)
        first_row = i * _CHUNK_BYTES // (4 * _ROW_WORDS)
        rows = np.arange(words.shape[0], dtype=np.uint64) + np.uint64(first_row)
        for lane in (0, 1):
            per_row = (words * column_keys(lane)).sum(axis=1, dtype=np.uint64)
            part = (per_row * row_keys(lane, rows)).sum(dtype=np.uint64)
            lanes[lane] = (lanes[lane] + int(part)) & _MASK64
    return lanes[0], lanes[1]


def digest_units(units: NDArray[np.int64], values: U64, unit_bytes: int) -> U64:
    """[H[0], H[1]] that values at unit offsets in the tensor contribute.

    Linear modulo 2^64: values may be differences new - old.
    """
    offset = units.astype(np.uint64) * np.uint64(unit_bytes)
    shifted = values << (np.uint64(8) * (offset & np.uint64(3)))
    column = (offset >> np.uint64(2)) & np.uint64(_ROW_WORDS - 1)
    row = offset >> np.uint64(12)
    first = row.min() if row.size else np.uint64(0)
    num_rows = int(row.max() - first) + 1 if row.size else 0
    rows = np.arange(num_rows, dtype=np.uint64) + first
    lanes = [
        (row_keys(lane, rows)[row - first] * column_keys(lane)[column] * shifted).sum(
            dtype=np.uint64
        )
        for lane in (0, 1)
    ]
    return np.array(lanes, np.uint64)


def block_units(geometry: Geometry, block: int) -> NDArray[np.int64]:
    """Offsets in units, in the whole tensor, of the units of a block in block order."""
    row, row_end, col, col_end = geometry.block_span(block)
    rows = np.arange(row, row_end, dtype=np.int64)[:, None] * geometry.cols
    return (rows + np.arange(col, col_end, dtype=np.int64)).ravel()


def unit_view(data: U8, unit_bytes: int) -> NDArray[np.unsignedinteger]:
    """The bytes as little-endian units: a view that writes through, aligned or not."""
    return data.view(f"<u{unit_bytes}") if unit_bytes > 1 else data


def digest_blocks(data: U8, geometry: Geometry, blocks: range) -> U64:
    """Partial digests of these blocks, [len(blocks), 2]."""
    units = unit_view(data, geometry.unit_bytes)
    out = np.zeros((len(blocks), 2), np.uint64)
    for i, block in enumerate(blocks):
        at = block_units(geometry, block)
        out[i] = digest_units(at, units[at].astype(np.uint64), geometry.unit_bytes)
    return out


def fold64(high: int, low: int) -> int:
    """The 64-bit form of a digest (H[0], H[1])."""
    return high ^ ((low << 32 | low >> 32) & _MASK64)


def fold32(high: int, low: int) -> int:
    """The 32-bit form of a digest (H[0], H[1])."""
    folded = fold64(high, low)
    return (folded ^ folded >> 32) & (2**32 - 1)


def check64(*parts: bytes | bytearray | memoryview) -> int:
    """fold64 of the digest of the concatenation of parts."""
    return fold64(*_digest_chunks(_chunks(parts)))


def _chunks(parts: tuple[bytes | bytearray | memoryview, ...]) -> Iterator[U8]:
    """The concatenation of parts in chunks of _CHUNK_BYTES; the last one may be shorter."""
    chunk = bytearray()
    for part in parts:
        data = memoryview(part).cast("B")
        at = 0
        while at < len(data):
            step = _CHUNK_BYTES - len(chunk)
            chunk += data[at : at + step]
            at += step
            if len(chunk) == _CHUNK_BYTES:
                yield np.frombuffer(chunk, np.uint8)
                chunk = bytearray()
    yield np.frombuffer(chunk, np.uint8)
