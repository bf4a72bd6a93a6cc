"""Frames built by hand, field by field, so that each rule of the format can be broken alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from gymfast.delta.backends.reference_digest import check64, digest_bytes, fold32
from gymfast.delta.frame import MAGIC, Kind, root_of

HEADER, TENSOR, BLOCKS, END = 1, 2, 3, 4
EMPTY_ROOT = hashlib.sha256(b"gymfast-root-1\n").digest()


def u16(value: int) -> bytes:
    return value.to_bytes(2, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def varint(value: int, extra_bytes: int = 0) -> bytes:
    """LEB128, with extra_bytes more bytes than needed."""
    out = []
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    for _ in range(extra_bytes):
        out[-1] |= 128
        out.append(0)
    return bytes(out)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(len(data)) + data


def section(
    section_type: int,
    body: bytes,
    *,
    flags: int = 0,
    check: int | None = None,
    body_bytes: int | None = None,
) -> bytes:
    size_bytes = len(body) if body_bytes is None else body_bytes
    start = bytes((section_type, flags)) + size_bytes.to_bytes(6, "little")
    return start + u64(check64(start, body) if check is None else check) + body


def header(num_tensors: int = 1, profile: int = 0, reserved: bytes = bytes(7)) -> bytes:
    return section(HEADER, bytes((profile,)) + reserved + u64(num_tensors))


def tensor_body(
    name: str | bytes = "t",
    *,
    kind: int = Kind.ADDED,
    dtype: str = "U8",
    shape: Sequence[int] = (8,),
    num_bytes: int | None = None,
    unit_bytes: int = 1,
    class_shift: int = 0,
    class_base: int = 0,
    tiles: tuple[int, int, int] | None = None,
    target: str | bytes | None = None,
    ndim: int | None = None,
    rest: bytes = b"",
) -> bytes:
    if num_bytes is None:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * unit_bytes
    if tiles is None:
        n = num_bytes // unit_bytes
        tiles = (n, min(n, 1), n)
    return b"".join(
        (
            bytes((kind, unit_bytes, class_shift, class_base)),
            text(name),
            text(dtype),
            varint(len(shape) if ndim is None else ndim),
            *map(varint, shape),
            varint(num_bytes),
            *map(varint, tiles),
            b"" if target is None else text(target),
            rest,
        )
    )


def tensor(*args, **fields) -> bytes:
    return section(TENSOR, tensor_body(*args, **fields))


def blocks_body(
    blocks: Sequence[tuple[int, bytes, int]],
    *,
    tensor: int = 0,
    first_block: int = 0,
    num_blocks: int | None = None,
    payload_bytes: Sequence[int] | None = None,
    rest: bytes = b"",
) -> bytes:
    """A BLOCKS body from (mode, payload, check) of its blocks."""
    count = len(blocks) if num_blocks is None else num_blocks
    return (
        b"".join(map(varint, (tensor, first_block, count)))
        + table(blocks, payload_bytes=payload_bytes)
        + rest
    )


def table(
    blocks: Sequence[tuple[int, bytes, int]], *, payload_bytes: Sequence[int] | None = None
) -> bytes:
    """Block table and payloads: what Backend.apply_blocks takes."""
    sizes = [len(payload) for _, payload, _ in blocks] if payload_bytes is None else payload_bytes
    entries = (
        bytes((mode,)) + (varint(size) + check.to_bytes(4, "little") if mode else b"")
        for (mode, _, check), size in zip(blocks, sizes, strict=True)
    )
    return b"".join(entries) + b"".join(payload for _, payload, _ in blocks)


def blocks(*args, **fields) -> bytes:
    return section(BLOCKS, blocks_body(*args, **fields))


def row(status: int, *digests: tuple[int, int]) -> bytes:
    """What END says of one tensor."""
    return bytes((status,)) + b"".join(u64(lane) for digest in digests for lane in digest)


def end_body(
    sections: Sequence[bytes],
    rows: Sequence[bytes],
    *,
    base_root: bytes = EMPTY_ROOT,
    new_root: bytes = bytes(32),
    frame_check: int | None = None,
    end_bytes: int | None = None,
    rest: bytes = b"",
) -> bytes:
    check = check64(*(part[8:16] for part in sections)) if frame_check is None else frame_check
    body = base_root + new_root + u64(check) + b"".join(rows)
    size_bytes = 16 + len(body) + 8 if end_bytes is None else end_bytes
    return body + u64(size_bytes) + rest


def frame(sections: Sequence[bytes], rows: Sequence[bytes], *, tail: bytes = b"", **end) -> bytes:
    """Magic, the given sections, END with the given rows, and a tail."""
    return MAGIC + b"".join(sections) + section(END, end_body(sections, rows, **end)) + tail


def digest_of(data: bytes) -> tuple[int, int]:
    return digest_bytes(np.frombuffer(data, np.uint8))


def check_of(data: bytes) -> int:
    """The check of a block that is a whole tensor."""
    return fold32(*digest_of(data))


def added(new: bytes, mode: int, payload: bytes, **fields) -> bytes:
    """A frame with one added tensor `t` of one block with this mode and payload."""
    unit_bytes = fields.get("unit_bytes", 1)
    dtype = {1: "U8", 2: "U16", 4: "U32"}[unit_bytes]
    shape = (len(new) // unit_bytes,)
    sections = [
        header(),
        tensor("t", dtype=dtype, shape=shape, **fields),
        blocks([(mode, payload, check_of(new))]),
    ]
    root = root_of([("t", dtype, shape, digest_of(new))])
    return frame(sections, [row(2, digest_of(new))], new_root=root)


def bits(*fields: tuple[int, int]) -> bytes:
    """(value, width) fields from the least significant bit upwards, zero-padded to a byte."""
    value = at = 0
    for field, width in fields:
        value |= field << at
        at += width
    return value.to_bytes((at + 7) // 8, "little")


def unary(*zeros: int) -> bytes:
    """For each number so many zeros and a one."""
    return bits(*((1 << count, count + 1) for count in zeros))
