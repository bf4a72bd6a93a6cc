"""Rules R1..R22 of docs/wire-format.md that a parser checks, each broken alone."""

from __future__ import annotations

import math

import pytest
from delta_frames import (
    BLOCKS,
    END,
    HEADER,
    TENSOR,
    added,
    blocks,
    blocks_body,
    end_body,
    frame,
    header,
    row,
    section,
    tensor,
    tensor_body,
    text,
    u64,
    varint,
)

from gymfast.delta.frame import MAGIC, Kind, parse_frame
from gymfast.errors import ChecksumError, FormatError

NEW = bytes((0, 0, 0, 1, 0, 0, 0, 0))
FAST = bytes((1, 0, 0, 0, 8))
RAW_BLOCK = (5, NEW, 0)
D = (1, 2)
ADDED, DELTA, REMOVED, ALIAS = Kind.ADDED, Kind.DELTA, Kind.REMOVED, Kind.ALIAS
VALID = added(NEW, 1, FAST)


def assert_refused(parse, data: bytes, *numbers: int) -> None:
    with pytest.raises(FormatError) as caught:
        parse(data)
    assert caught.value.number in numbers, str(caught.value)
    assert str(caught.value)


ONE_ADDED = (row(2, D),)


def one(*sections: bytes, rows=ONE_ADDED, num_tensors: int = 1, **end) -> bytes:
    return frame([header(num_tensors), *sections], rows, **end)


def test_the_frames_that_the_tests_break_are_valid(parse) -> None:
    parse(VALID)
    parse(one(tensor(), blocks([RAW_BLOCK])))
    parse(one(num_tensors=0, rows=()))


def test_R1_every_byte_of_the_magic_counts(parse) -> None:
    for at in range(7):
        for bit in range(8):
            broken = bytearray(VALID)
            broken[at] ^= 1 << bit
            assert_refused(parse, bytes(broken), 10)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_R2_another_format_version_is_refused(parse, version: int) -> None:
    assert_refused(parse, VALID[:7] + bytes((version,)) + VALID[8:], 11)


@pytest.mark.parametrize("number", [0x00, 0x05, 0x3F, 0x40, 0x7F])
def test_R3_unassigned_and_must_stop_sections_are_refused(parse, number: int) -> None:
    assert_refused(parse, one(tensor(), section(number, b"x"), blocks([RAW_BLOCK])), 12)


@pytest.mark.parametrize("number", [0x80, 0xFF])
def test_R3_skippable_sections_are_skipped(parse, number: int) -> None:
    extra = section(number, b"whatever")
    sections = (extra, tensor(), extra, extra, blocks([RAW_BLOCK]), extra)
    parse(one(*sections))
    damaged = section(number, b"whatever", check=1)
    assert_refused(parse, one(damaged, tensor(), blocks([RAW_BLOCK])), 22)


def test_R4_section_flags_are_reserved(parse) -> None:
    for flags in (1, 0x80):
        assert_refused(parse, one(section(TENSOR, tensor_body(), flags=flags)), 13)
        assert_refused(parse, one(section(0x80, b"", flags=flags), tensor()), 13)


@pytest.mark.parametrize("at", range(7))
def test_R4_reserved_bytes_of_the_header(parse, at: int) -> None:
    reserved = bytes(at) + b"\1" + bytes(6 - at)
    assert_refused(parse, frame([header(1, 0, reserved), tensor()], [row(2, D)]), 13)


def test_R5_a_section_that_says_more_bytes_than_there_are(parse) -> None:
    body = tensor_body()
    data = one(section(TENSOR, body, body_bytes=len(body) + 10_000))
    assert_refused(parse, data, 20)
    end_bytes = int.from_bytes(VALID[-8:], "little")
    assert_refused(parse, VALID[:-end_bytes], 20)


@pytest.mark.parametrize("tail", [b"\0", VALID, section(0x80, b"")])
def test_R6_bytes_behind_end_are_refused(parse, tail: bytes) -> None:
    assert_refused(parse, VALID + tail, 21)


def test_R7_every_byte_of_every_body_is_checked(parse) -> None:
    at = len(MAGIC)
    while at < len(VALID):
        end = at + 16 + int.from_bytes(VALID[at + 2 : at + 8], "little")
        for i in range(at + 8, end):
            broken = bytearray(VALID)
            broken[i] ^= 0x10
            assert_refused(parse, bytes(broken), 22)
        at = end
    with pytest.raises(ChecksumError):
        parse(VALID[:-1] + b"\xff")


def test_R8_sections_in_a_wrong_order(parse) -> None:
    body = [RAW_BLOCK]
    rows = [row(2, D)]
    assert_refused(parse, frame([tensor(), blocks(body)], rows), 23)
    assert_refused(parse, frame([section(0x80, b""), header(), tensor()], rows), 23)
    assert_refused(parse, frame([], []), 23)
    assert_refused(parse, one(header(), tensor()), 23)
    assert_refused(parse, one(blocks(body), tensor()), 23)
    assert_refused(parse, one(tensor(), blocks(body, tensor=1)), 23)
    two = (tensor("a"), tensor("b"), blocks(body, tensor=0))
    assert_refused(parse, one(*two, rows=[row(2, D), row(2, D)], num_tensors=2), 23)


@pytest.mark.parametrize(("kind", "status"), [(REMOVED, 4), (ALIAS, 5)])
def test_R8_removed_tensors_and_aliases_have_no_blocks(parse, kind: Kind, status: int) -> None:
    target = "t" if kind is ALIAS else None
    rows = [row(2, D), row(status, *([D] if kind is REMOVED else []))]
    sections = [tensor(), tensor("u", kind=kind, target=target)]
    parse(one(*sections, rows=rows, num_tensors=2))
    sections.append(blocks([RAW_BLOCK], tensor=1))
    assert_refused(parse, one(*sections, rows=rows, num_tensors=2), 23)


def test_R9_frame_check_sees_moved_and_lost_sections(parse) -> None:
    sections = [header(3), tensor("a"), tensor("b"), tensor("c")]
    rows = [row(2, D)] * 3
    end = section(END, end_body(sections, rows))
    parse(MAGIC + b"".join(sections) + end)
    moved = [sections[i] for i in (0, 2, 1, 3)]
    assert_refused(parse, MAGIC + b"".join(moved) + end, 24)
    skippable = section(0x80, b"new")
    assert_refused(parse, MAGIC + b"".join((*sections, skippable)) + end, 24)


def test_R9_end_bytes_is_checked(parse) -> None:
    assert_refused(parse, one(tensor(), end_bytes=1), 24)
    assert_refused(parse, one(tensor(), frame_check=1), 24)


def test_R10_varints_have_one_form(parse) -> None:
    body = tensor_body()
    name = text("t")
    assert body[4:6] == name
    for bad in (varint(1, 1), varint(1, 2), b"\x81" + b"\x80" * 8 + b"\0", b"\xff" * 9 + b"\x02"):
        assert_refused(parse, one(section(TENSOR, body[:4] + bad + body[5:])), 25)
    assert_refused(parse, one(section(TENSOR, body[:4] + b"\xff" * 11)), 25)


@pytest.mark.parametrize("rest", [b"\0", b"more"])
def test_R10_a_body_ends_where_its_fields_end(parse, rest: bytes) -> None:
    assert_refused(parse, frame([section(HEADER, bytes(8) + u64(0) + rest)], []), 25)
    assert_refused(parse, one(tensor(rest=rest)), 25)
    assert_refused(parse, one(tensor(), rest=rest), 24, 25)
    assert_refused(parse, frame([section(HEADER, bytes(15))], []), 25)


def test_R10_a_body_that_ends_inside_its_fields(parse) -> None:
    body = tensor_body()
    for size in range(len(body)):
        assert_refused(parse, one(section(TENSOR, body[:size])), 25)
    body = blocks_body([RAW_BLOCK, RAW_BLOCK])
    for size in range(3 + 12):
        assert_refused(parse, one(two_blocks(), section(BLOCKS, body[:size])), 25, 52)
    sections = [header(), tensor()]
    body = end_body(sections, [row(2, D)])
    for size in range(72, len(body)):
        broken = section(END, body[:size])
        assert_refused(parse, MAGIC + b"".join((*sections, broken)), 24, 25)


def two_blocks() -> bytes:
    return tensor(shape=(16,), tiles=(16, 1, 8))


def test_R10_values_that_are_not_listed(parse) -> None:
    assert_refused(parse, frame([header(1, profile=3), tensor()], [row(2, D)]), 25)
    assert_refused(parse, one(tensor(kind=5)), 25)
    assert_refused(parse, one(tensor(class_shift=8)), 25)
    parse(one(tensor(class_shift=7, class_base=255)))


def test_R11_limits(parse) -> None:
    assert_refused(parse, frame([header(4_194_305)], []), 30, 45)
    assert_refused(parse, one(section(TENSOR, b"", body_bytes=2**40 + 1)), 30)
    assert_refused(parse, one(tensor(shape=(1,) * 33)), 30)
    parse(one(tensor(shape=(1,) * 32)))
    big = {"shape": (2**20 + 1,), "tiles": (2**20 + 1, 1, 2**20 + 1)}
    assert_refused(parse, one(tensor(**big)), 30)
    parse(one(tensor(shape=(2**20 + 1,), tiles=(2**20 + 1, 1, 2**20))))


@pytest.mark.parametrize("kind", [Kind.DELTA, Kind.ADDED, Kind.REPLACED, Kind.REMOVED, Kind.ALIAS])
@pytest.mark.parametrize(
    ("shape", "tiles", "is_refused"),
    [
        ((4100,), (4100, 1, 1), False),
        ((4101,), (4101, 1, 1), True),
        ((5121,), (5121, 1, 1), True),
        ((64, 64), (64, 1, 1), False),
        ((64, 128), (128, 1, 1), True),
        ((64, 128), (128, 2, 1), False),
        ((2**20, 2**11), (2**11, 1, 2**10), False),
        ((2**20, 2**11), (2**11, 1, 2**9), True),
        ((2**30, 2**30), (2**30, 2**10, 1), False),
        ((2**30, 2**30), (2**30, 2**9, 1), True),
        ((2**30, 2**30), (2**60, 1, 1), True),
    ],
)
def test_R11_the_number_of_blocks_is_limited_by_the_units(
    parse, shape, tiles, is_refused: bool, kind: Kind
) -> None:
    status = {0: 0, 1: 2, 2: 3, 3: 4, 4: 5}[kind]
    rows = [row(status, *[(0, 0)] * (1, 2, 1, 2, 1, 0)[status])]
    sections = [tensor(kind=kind, shape=shape, tiles=tiles, target="u" if kind == 4 else None)]
    if kind is Kind.ALIAS:
        n = math.prod(shape)
        sections.append(tensor("u", shape=shape, tiles=(n, 1, min(n, 2**20))))
        rows.append(row(2, (0, 0)))
    data = frame([header(len(rows)), *sections], rows)
    if is_refused:
        assert_refused(parse, data, 30)
    else:
        parse(data)


@pytest.mark.parametrize("shape", [(2**33, 2**33), (2**62, 2**62, 0), (2**61,), (2**63, 2)])
def test_R12_sizes_that_overflow(parse, shape) -> None:
    num_bytes = 0 if 0 in shape else 8
    assert_refused(parse, one(tensor(shape=shape, num_bytes=num_bytes)), 31)


def test_R12_dims_behind_a_zero_do_not_overflow(parse) -> None:
    parse(one(tensor(shape=(2**62, 0, 2**62), num_bytes=0)))


BAD_NAMES = [b"", b"x" * 1025, b"\xff", b"a\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"]
BAD_NAMES += [b"\xe2\x82", b"a\nb", b"\0", b"a\x1f", b"a\x7f"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_R13_bad_names(parse, name: bytes) -> None:
    assert_refused(parse, one(tensor(name)), 40)
    sections = [tensor(), tensor("u", kind=ALIAS, target=name)]
    assert_refused(parse, one(*sections, rows=[row(2, D), row(5)], num_tensors=2), 40, 44)


@pytest.mark.parametrize("name", [b"x" * 1024, "größe.日本.🙂", " ", "../../etc/passwd", "\x80"])
def test_R13_good_names(parse, name) -> None:
    parse(one(tensor(name)))


def test_R14_a_name_occurs_once(parse) -> None:
    rows = [row(2, D)] * 2
    assert_refused(parse, one(tensor("a"), tensor("a"), rows=rows, num_tensors=2), 41)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "BF17"},
        {"dtype": ""},
        {"dtype": "bf16"},
        {"num_bytes": 9, "tiles": (9, 1, 9)},
        {"num_bytes": 7, "tiles": (7, 1, 7)},
        {"dtype": "F4", "num_bytes": 8},
        {"dtype": "BF16", "num_bytes": 8},
        {"unit_bytes": 0, "tiles": (8, 1, 8), "num_bytes": 8},
        {"unit_bytes": 3, "shape": (9,), "num_bytes": 9, "tiles": (3, 1, 3)},
        {"unit_bytes": 8, "num_bytes": 8, "tiles": (1, 1, 1)},
        {"unit_bytes": 4, "shape": (10,), "num_bytes": 10, "tiles": (2, 1, 2)},
    ],
)
def test_R15_dtype_dims_size_and_unit_fit(parse, fields) -> None:
    assert_refused(parse, one(tensor(**{"num_bytes": 8, **fields})), 42)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [
        ("F4", (5,), 3),
        ("F6_E2M3", (3, 3), 7),
        ("C64", (2,), 16),
        ("BOOL", (), 1),
        ("F4", (1, 0), 0),
    ],
)
def test_R15_packed_and_other_sizes(parse, dtype, shape, num_bytes) -> None:
    parse(one(tensor(dtype=dtype, shape=shape, num_bytes=num_bytes)))


TILES = [(0, 1, 8), (8, 0, 8), (8, 1, 0), (16, 1, 8), (8, 2, 8), (8, 1, 9), (3, 1, 3), (4, 3, 4)]
TILES += [(0, 0, 0), (4, 1, 5), (2**64 - 1, 1, 8), (8, 2**64 - 1, 8), (8, 1, 2**64 - 1)]


@pytest.mark.parametrize("tiles", TILES)
def test_R16_geometries_that_do_not_exist(parse, tiles) -> None:
    assert_refused(parse, one(tensor(tiles=tiles)), 43)


@pytest.mark.parametrize(
    "tiles", [(8, 1, 8), (8, 1, 3), (4, 2, 4), (2, 3, 1), (1, 8, 1), (1, 1, 1)]
)
def test_R16_geometries_that_exist(parse, tiles) -> None:
    parse(one(tensor(tiles=tiles)))
    assert_refused(parse, one(tensor(shape=(0,), tiles=tiles, num_bytes=0)), 43)


def test_R17_an_alias_needs_its_target(parse) -> None:
    rows = [row(2, D), row(5)]
    for fields in (
        {"target": "missing"},
        {"target": "u"},
        {"target": "t", "shape": (4, 2)},
        {"target": "t", "dtype": "I8"},
        {"target": "t", "shape": (9,)},
    ):
        sections = (tensor(), tensor("u", kind=ALIAS, **fields))
        assert_refused(parse, one(*sections, rows=rows, num_tensors=2), 44)
    chain = (tensor(), tensor("u", kind=ALIAS, target="t"), tensor("v", kind=ALIAS, target="u"))
    assert_refused(parse, one(*chain, rows=[*rows, row(5)], num_tensors=3), 44)
    removed = (tensor(kind=REMOVED), tensor("u", kind=ALIAS, target="t"))
    assert_refused(parse, one(*removed, rows=[row(4, D), row(5)], num_tensors=2), 44)
    forward = (tensor("u", kind=ALIAS, target="t"), tensor())
    parse(one(*forward, rows=rows[::-1], num_tensors=2))


def test_R18_the_number_of_tensors(parse) -> None:
    assert_refused(parse, one(tensor(), num_tensors=2), 45)
    assert_refused(parse, one(tensor(), num_tensors=0), 45)
    assert_refused(parse, frame([header(4_194_304), tensor()], [row(2, D)]), 45)


@pytest.mark.parametrize("kind", [DELTA, ADDED, Kind.REPLACED, REMOVED])
@pytest.mark.parametrize("status", [0, 1, 2, 3, 4, 5, 6, 255])
def test_R19_status_follows_kind(parse, kind: Kind, status: int) -> None:
    digests = {0: 1, 1: 2, 2: 1, 3: 2, 4: 1}.get(status, 0)
    body = [] if status in (0, 4) or kind is REMOVED else [blocks([RAW_BLOCK])]
    data = one(tensor(kind=kind), *body, rows=[row(status, *[D] * digests)])
    if status in {DELTA: (0, 1), ADDED: (2,), Kind.REPLACED: (3,), REMOVED: (4,)}[kind]:
        parse(data)
    else:
        assert_refused(parse, data, 46)


def test_R19_status_follows_blocks(parse) -> None:
    unchanged, delta = blocks([(0, b"", 0)]), tensor(kind=DELTA)
    parse(one(delta, unchanged, rows=[row(0, D)]))
    assert_refused(parse, one(delta, blocks([RAW_BLOCK]), rows=[row(0, D)]), 46)
    assert_refused(parse, one(delta, rows=[row(1, D, D)]), 46)
    assert_refused(parse, one(delta, unchanged, rows=[row(1, D, D)]), 46)


def test_R20_block_indices_ascend_below_the_number_of_blocks(parse) -> None:
    parse(one(two_blocks(), blocks([RAW_BLOCK]), blocks([RAW_BLOCK], first_block=1)))
    for bad in (
        [blocks([RAW_BLOCK], first_block=2)],
        [blocks([RAW_BLOCK] * 2, first_block=1)],
        [blocks([RAW_BLOCK] * 3)],
        [blocks([RAW_BLOCK]), blocks([RAW_BLOCK])],
        [blocks([RAW_BLOCK], first_block=1), blocks([RAW_BLOCK])],
        [blocks([])],
        [blocks([RAW_BLOCK], first_block=2**64 - 1)],
        [blocks([RAW_BLOCK], first_block=1, num_blocks=2**64 - 1)],
    ):
        assert_refused(parse, one(two_blocks(), *bad), 50)
    empty = tensor(shape=(0,), tiles=(0, 0, 0))
    assert_refused(parse, one(empty, blocks([(0, b"", 0)])), 50)


def test_R21_modes_are_known(parse) -> None:
    for mode in (6, 7, 255, 4):
        assert_refused(parse, one(tensor(), blocks([(mode, NEW, 0)])), 51)
    two_bytes = tensor(dtype="BF16", unit_bytes=2)
    parse(one(two_bytes, blocks([(4, NEW, 0)])))


def test_R22_payload_lengths_add_up(parse) -> None:
    for sizes in ([7, 8], [9, 8], [8, 0], [2**63, 2**63], [2**64 - 1, 17]):
        body = blocks([RAW_BLOCK] * 2, payload_bytes=sizes)
        assert_refused(parse, one(two_blocks(), body), 52, 31)
    assert_refused(parse, one(tensor(), blocks([(0, b"", 0)], rest=b"x")), 52)


def test_the_reference_parser_allocates_in_proportion_to_the_frame() -> None:
    body = blocks([(0, b"", 0)], num_blocks=2**40)
    wide = tensor(shape=(2**51,), tiles=(2**51, 1, 2**11))
    assert_refused(parse_frame, one(wide, body), 25)
