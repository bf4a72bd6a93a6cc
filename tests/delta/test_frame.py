"""Records and writer of frames: what is written is what the parser reads."""

from __future__ import annotations

import hashlib

import pytest

from gymfast.delta.backends.reference_digest import check64
from gymfast.delta.frame import (
    EndEntry,
    FrameWriter,
    Kind,
    Status,
    TensorRecord,
    frame_info,
    parse_frame,
    root_of,
)
from gymfast.delta.geometry import plan_geometry
from gymfast.delta.varint import decode_varint, encode_varint

ENTRIES = [("b", "BF16", (2, 3), (1, 2)), ("a", "F32", (), (3, 4)), ("ä", "U8", (0,), (0, 0))]


def record(kind: Kind, name: str, **fields) -> TensorRecord:
    return TensorRecord(kind, name, "BF16", (2, 3), plan_geometry("BF16", (2, 3)), **fields)


def test_a_written_frame_is_read_as_written() -> None:
    records = (
        record(Kind.DELTA, "w", class_shift=3, class_base=9),
        record(Kind.ADDED, "v"),
        record(Kind.REMOVED, "u"),
        record(Kind.ALIAS, "t", target="v"),
    )
    entries = (
        EndEntry(Status.CHANGED, (1, 2), (3, 4)),
        EndEntry(Status.ADDED, None, (5, 6)),
        EndEntry(Status.REMOVED, (7, 8)),
        EndEntry(Status.ALIAS),
    )
    writer = FrameWriter(check64)
    body = bytes((5, 12)) + bytes(4) + bytes(12)
    parts = [writer.header(2, len(records)), writer.tensor(records[0])]
    parts += [writer.blocks(0, 0, 1, body), *map(writer.tensor, records[1:])]
    parts.append(writer.end(b"a" * 32, b"b" * 32, entries))
    frame = parse_frame(b"".join(parts))
    assert (frame.header.profile, frame.tensors, frame.end.entries) == (2, records, entries)
    assert (frame.end.base_root, frame.end.new_root) == (b"a" * 32, b"b" * 32)
    assert [bytes(blocks.body) for blocks in frame.blocks_of(0)] == [body]
    assert frame.frame_bytes == sum(map(len, parts))
    names = {name: digest for name, _, _, digest in frame.new_entries()}
    assert names == {"w": (3, 4), "v": (5, 6), "t": (5, 6)}
    info = frame_info(frame)
    assert (info.profile, info.tensors[0].modes, info.tensors[0].payload_bytes) == (
        "small",
        {"raw": 1},
        12,
    )
    assert [tensor.status for tensor in info.tensors] == ["changed", "added", "removed", "alias"]


def test_the_root_is_that_of_the_specification_whatever_the_order() -> None:
    text = b"gymfast-root-1\n"
    text += b"\1a\3F32\0" + (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    text += b"\1b\4BF16\2\2\3" + (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    text += b"\2\xc3\xa4\2U8\1\0" + bytes(16)
    assert root_of(ENTRIES) == root_of(ENTRIES[::-1]) == hashlib.sha256(text).digest()


@pytest.mark.parametrize("value", [0, 1, 127, 128, 2**14, 2**32, 2**63, 2**64 - 1])
def test_varints_are_read_as_written(value: int) -> None:
    data = encode_varint(value)
    assert decode_varint(b"xx" + data, 2, what="test") == (value, 2 + len(data))
    assert len(data) == max(1, -(-value.bit_length() // 7))


@pytest.mark.parametrize("value", [-1, 2**64])
def test_varints_outside_64_bits_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="varint"):
        encode_varint(value)
