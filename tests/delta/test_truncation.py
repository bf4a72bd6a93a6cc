"""No prefix of a frame and no frame with a flipped bit is a frame."""

from __future__ import annotations

import pytest
from delta_cases import case_of, encode
from delta_frames import added, blocks, digest_of, frame, header, row, section, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from gymfast import _core
from gymfast.delta.backends import select
from gymfast.delta.backends.reference_digest import check64
from gymfast.delta.frame import Kind, parse_frame
from gymfast.errors import FormatError


def frames() -> dict[str, bytes]:
    """Small frames of every kind of section and block."""
    new = bytes((0, 0, 0, 1, 0, 0, 0, 0))
    d = digest_of(new)
    many = frame(
        [
            header(5),
            tensor("empty", shape=(0,), tiles=(0, 0, 0)),
            tensor("delta", kind=Kind.DELTA, tiles=(4, 1, 4)),
            blocks([(5, new[:4], 0), (0, b"", 0)], tensor=1),
            section(0x80, b"skipped"),
            tensor("gone", kind=Kind.REMOVED),
            tensor("tied", kind=Kind.ALIAS, target="delta"),
            tensor("other", kind=Kind.REPLACED),
            blocks([(5, new, 0)], tensor=4),
        ],
        [row(2, (0, 0)), row(1, d, d), row(4, d), row(5), row(3, d, d)],
    )
    case = case_of([5] * 90, [5, 6, 7, 8, 9, 10] * 15, 1)
    encoded = encode(select("reference"), case).body
    coded = frame(
        [
            header(),
            tensor(kind=Kind.DELTA, shape=(90,)),
            section(3, bytes((0, 0, 1)) + encoded),
        ],
        [row(1, d, d)],
    )
    empty = frame([header(0)], [])
    return {"empty": empty, "many": many, "coded": coded, "added": added(new, 5, new)}


FRAMES = frames()


@pytest.mark.parametrize("name", FRAMES)
def test_every_prefix_is_refused_as_truncated(parse, name: str) -> None:
    data = FRAMES[name]
    parse(data)
    for size in range(len(data)):
        with pytest.raises(FormatError) as caught:
            parse(data[:size])
        assert caught.value.number == 20, size


@pytest.mark.parametrize("name", FRAMES)
def test_every_flipped_bit_is_seen(parse, name: str) -> None:
    data = FRAMES[name]
    for at in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(FormatError):
                parse(bytes(broken))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_raise_nothing_but_format_errors(data: bytes, with_magic: bool) -> None:
    frame = (FRAMES["empty"][:8] if with_magic else b"") + data
    for parse in (parse_frame, _core.parse_frame):
        with pytest.raises(FormatError):
            parse(frame)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FRAMES)), st.data())
def test_changed_bodies_with_right_checks_are_taken_or_refused_by_both_parsers(name, data) -> None:
    sections = split(FRAMES[name])
    which = data.draw(st.integers(0, len(sections) - 1))
    kind, body = sections[which]
    at = data.draw(st.integers(0, max(0, len(body) - 1)))
    length = data.draw(st.integers(0, 4))
    body = body[:at] + data.draw(st.binary(max_size=6)) + body[at + length :]
    sections[which] = (kind, body)
    written = [section(kind, body) for kind, body in sections]
    if which < len(sections) - 1:  # frame_check is right too
        frame_check = check64(*(part[8:16] for part in written[:-1])).to_bytes(8, "little")
        end = sections[-1][1]
        written[-1] = section(4, end[:64] + frame_check + end[72:])
    broken = FRAMES[name][:8] + b"".join(written)
    assert is_taken(parse_frame, broken) is is_taken(_core.parse_frame, broken)


def is_taken(parse, frame: bytes) -> bool:
    try:
        parse(frame)
    except FormatError:
        return False
    return True


def split(data: bytes) -> list[tuple[int, bytes]]:
    """Type and body of each section of a valid frame."""
    sections, at = [], 8
    while at < len(data):
        end = at + 16 + int.from_bytes(data[at + 2 : at + 8], "little")
        sections.append((data[at], data[at + 16 : end]))
        at = end
    return sections
