"""What a delta version stores of a tensor, and the texts of its files around it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from gymfast.delta.files import Buffer
from gymfast.delta.hf_delta.digests import Hasher, new_hasher
from gymfast.delta.hf_delta.version import COMPRESSION
from gymfast.delta.hf_delta.zstd_frame import load_zstd
from gymfast.delta.memory import U8
from gymfast.delta.safetensors_header import build_header
from gymfast.errors import FormatError, MissingDependencyError

_MAX_POSITIONS = 2**32  # of the overwrite encoding
_PIECE_BYTES = 2**18


@dataclass(frozen=True)
class Stored:
    """The zstd frame that turns old bytes of a tensor into new ones; digest of the new ones."""

    frame: bytes
    digest: str
    changed_bytes: int


def store(
    name: str, old: U8, new: U8, encoding: str, algorithm: str, *, threads: int = 1
) -> Stored | None:
    """What turns old into new; None if they are equal.

    Raises FormatError for an overwrite of 4 GiB or more.
    """
    if encoding == "overwrite" and new.size > _MAX_POSITIONS:
        raise FormatError(
            f"tensor {name!r} has {new.size} bytes, positions of the overwrite encoding end at "
            f"{_MAX_POSITIONS}: publish with the encoding xor"
        )
    hasher = new_hasher(algorithm)
    make = _store_xor if encoding == "xor" else _store_overwrite
    frame, changed_bytes = make(old, new, hasher, threads)
    return Stored(frame, hasher.hexdigest(), changed_bytes) if changed_bytes else None


def restore(stored: Stored, data: U8, encoding: str) -> None:
    """Turns the old bytes into the new ones, for who made the frame: nothing is checked."""
    decoder = load_zstd().ZstdDecompressor()
    if encoding == "xor":
        _xor(decoder, stored.frame, data)
        return
    content = np.frombuffer(decoder.decompress(stored.frame), np.uint8)
    count = int(content[:4].view("<u4")[0])
    values = 4 + 4 * count
    data[content[4:values].view("<u4")] = content[values:]


def _count_different(old: U8, new: U8) -> int:
    starts = range(0, new.size, _PIECE_BYTES)
    pairs = ((old[at : at + _PIECE_BYTES], new[at : at + _PIECE_BYTES]) for at in starts)
    return sum(int(np.count_nonzero(one != other)) for one, other in pairs)


def _xor(decoder: Any, frame: bytes, data: U8) -> None:
    """Piece by piece: what was just decoded is still in the cache, and its memory is used again."""
    at = 0
    while at < data.size:
        piece = np.frombuffer(decoder.decompress(frame, max_length=_PIECE_BYTES), np.uint8)
        window = data[at : at + piece.size]
        np.bitwise_xor(window, piece, out=window)
        at, frame = at + piece.size, b""


def file_pieces(stored: dict[str, Stored]) -> list[Buffer]:
    """The content of a safetensors file of a version, in order."""
    specs = [(name, "U8", (len(one.frame),)) for name, one in stored.items()]
    start, _ = build_header(specs, {name: one.digest for name, one in stored.items()})
    return [start, *(one.frame for one in stored.values())]


def file_name(number: int, count: int) -> str:
    """The name of file `number` (from 0) of `count`."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def index_text(number: int, encoding: str, algorithm: str, weight_map: dict[str, str]) -> bytes:
    """The index of a version: what it is, and which tensor is in which file."""
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": COMPRESSION,
        "checksum_format": algorithm,
    }
    index = {"metadata": metadata, "weight_map": weight_map}
    return json.dumps(index, ensure_ascii=False).encode()


def _store_xor(old: U8, new: U8, hasher: Hasher, threads: int) -> tuple[bytes, int]:
    """Frame and changed bytes, part by part: the digest finds the new bytes in the cache."""
    core = _load_core()
    step, parts, changed_bytes = core.ZSTD_PART_BYTES * max(threads, 1), [], 0
    for start in range(0, max(new.size, 1), step):
        end = min(start + step, new.size)
        part, count = core.zstd_xor_part(old, new, start, end, threads)
        hasher.update(new[start:end].data)
        parts.append(part)
        changed_bytes += count
    return b"".join(parts), changed_bytes


def _store_overwrite(old: U8, new: U8, hasher: Hasher, threads: int) -> tuple[bytes, int]:
    changed_bytes = _count_different(old, new)
    if not changed_bytes:
        return b"", 0
    hasher.update(new.data)
    return _load_core().zstd_overwrite_frame(old, new, threads), changed_bytes


def _load_core() -> ModuleType:
    try:
        from gymfast import _core
    except ImportError as error:
        raise MissingDependencyError(
            f"publishing needs gymfast._core, which cannot be loaded ({error}): install gymfast "
            "again for this Python"
        ) from error
    return _core
