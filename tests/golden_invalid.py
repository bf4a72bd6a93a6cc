"""The invalid golden frames: each breaks one rule of docs/wire-format.md and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from delta_frames import (
    EMPTY_ROOT,
    HEADER,
    TENSOR,
    added,
    bits,
    blocks,
    check_of,
    digest_of,
    end_body,
    frame,
    header,
    row,
    section,
    tensor,
    tensor_body,
    u16,
    u64,
    unary,
    varint,
)
from golden_valid import EXAMPLE_OLD

from gymfast.delta.frame import MAGIC, Kind, root_of

NEW = bytes((0, 0, 0, 1, 0, 0, 0, 0))
STEP = bytes((1, 0, 0, 0, 8))
VALID = added(NEW, 1, STEP)
RAW_BLOCK = (5, NEW, check_of(NEW))
NEW_ROOT = root_of([("t", "U8", (8,), digest_of(NEW))])


@dataclass(frozen=True)
class Broken:
    """A golden frame that is refused with this number; `base` names the frame it applies to."""

    rule: str
    number: int
    frame: Callable[[], bytes] = field(repr=False)
    base: str = ""


def one(*sections: bytes, rows=None, num_tensors: int = 1, **end) -> bytes:
    """A frame of these sections behind HEADER, whose first tensor becomes NEW."""
    rows = [row(2, digest_of(NEW))] if rows is None else rows
    end = {"base_root": EMPTY_ROOT, "new_root": NEW_ROOT, **end}
    return frame([header(num_tensors), *sections], rows, **end)


def payload(mode: int, data: bytes, new: bytes = NEW, **fields) -> Callable[[], bytes]:
    return lambda: added(new, mode, data, **fields)


def long_varint() -> bytes:
    body = tensor_body()
    return one(section(TENSOR, body[:4] + varint(1, 1) + body[5:]), blocks([RAW_BLOCK]))


def swapped() -> bytes:
    sections = [header(2), tensor("a"), tensor("b")]
    zero = (0, 0)
    end = section(4, end_body(sections, [row(2, zero), row(2, zero)]))
    return MAGIC + sections[0] + sections[2] + sections[1] + end


def on_example(t: bytes = NEW, **changes) -> bytes:
    """A delta against the worked example's base, whose tensors are w and b."""
    w, b = (EXAMPLE_OLD[name].data.tobytes() for name in ("w", "b"))
    new_w = b"\1" + w[1:]
    specs = {"w": ("BF16", (4, 4)), "b": ("F32", (2,))}
    old_root = root_of([("w", *specs["w"], digest_of(w)), ("b", *specs["b"], digest_of(b))])
    new_root = root_of([("w", *specs["w"], digest_of(new_w)), ("b", *specs["b"], digest_of(b))])
    use = {"base": digest_of(w), "new": digest_of(new_w), "names": ("w", "b"), **changes}
    names = use["names"]
    sections = [
        header(len(names)),
        tensor(names[0], kind=Kind.DELTA, dtype="BF16", shape=(4, 4), unit_bytes=2),
        blocks([(5, new_w, check_of(new_w))]),
    ]
    rows = [row(1, use["base"], use["new"])]
    entries = [(names[0], *specs["w"], use["new"])]
    if len(names) > 1:
        sections.append(tensor(names[1], kind=Kind.DELTA, dtype="F32", shape=(2,), unit_bytes=4))
        rows.append(row(0, digest_of(b)))
        entries.append((names[1], *specs["b"], digest_of(b)))
    roots = {"base_root": old_root, "new_root": root_of(entries), **changes.get("roots", {})}
    assert changes or roots["new_root"] == new_root
    return frame(sections, rows, **roots)


def alias(**fields) -> Callable[[], bytes]:
    rows = [row(2, digest_of(NEW)), row(5)]
    entries = [(name, "U8", (8,), digest_of(NEW)) for name in ("t", "u")]
    return lambda: one(
        tensor(),
        blocks([RAW_BLOCK]),
        tensor("u", kind=Kind.ALIAS, **fields),
        rows=rows,
        num_tensors=2,
        new_root=root_of(entries),
    )


DENSE_NEW = np.array([0x3F80, 0x0001], "<u2").tobytes()
DENSE = bytes((0, 1, 0x7F, 0, 0)) + bytes((0, 1)) + unary(0, 1)
TWO = {"unit_bytes": 2}
UNIT_64 = dict.fromkeys(("shape",), (2**33, 2**33))

INVALID: dict[str, Broken] = {
    "R1_magic": Broken("R1", 10, lambda: b"GFDE" + VALID[4:]),
    "R2_version": Broken("R2", 11, lambda: VALID[:7] + b"\2" + VALID[8:]),
    "R3_unassigned": Broken("R3", 12, lambda: one(section(5, b""), tensor(), blocks([RAW_BLOCK]))),
    "R3_must_stop": Broken("R3", 12, lambda: one(tensor(), blocks([RAW_BLOCK]), section(64, b""))),
    "R4_flags": Broken("R4", 13, lambda: one(section(TENSOR, tensor_body(), flags=1))),
    "R4_header": Broken("R4", 13, lambda: frame([header(0, 0, b"\1" + bytes(6))], [])),
    "R4_position_group": Broken("R4", 13, payload(1, bytes((1, 0x40)) + STEP[2:])),
    "R4_value_group": Broken("R4", 13, payload(1, bytes((1, 0, 1)) + STEP[3:])),
    "R4_dense": Broken("R4", 13, payload(4, b"\2" + DENSE[1:], DENSE_NEW, **TWO)),
    "R5_cut": Broken("R5", 20, lambda: VALID[:-1]),
    "R5_no_end": Broken("R5", 20, lambda: VALID[: -int.from_bytes(VALID[-8:], "little")]),
    "R6_trailing": Broken("R6", 21, lambda: VALID + b"\0"),
    "R7_section": Broken("R7", 22, lambda: VALID[:40] + b"\xff" + VALID[41:]),
    "R7_end": Broken("R7", 22, lambda: VALID[:-20] + b"\xff" + VALID[-19:]),
    "R8_no_header": Broken("R8", 23, lambda: frame([], [])),
    "R8_two_headers": Broken("R8", 23, lambda: one(header(), tensor(), blocks([RAW_BLOCK]))),
    "R8_other_tensor": Broken("R8", 23, lambda: one(tensor(), blocks([RAW_BLOCK], tensor=1))),
    "R9_swapped": Broken("R9", 24, swapped),
    "R9_end_bytes": Broken("R9", 24, lambda: one(tensor(), blocks([RAW_BLOCK]), end_bytes=7)),
    "R10_varint": Broken("R10", 25, long_varint),
    "R10_long_body": Broken("R10", 25, lambda: one(tensor(rest=b"\0"), blocks([RAW_BLOCK]))),
    "R10_short_body": Broken("R10", 25, lambda: frame([section(HEADER, bytes(15))], [])),
    "R10_kind": Broken("R10", 25, lambda: one(tensor(kind=5), blocks([RAW_BLOCK]))),
    "R10_profile": Broken("R10", 25, lambda: frame([header(0, 3)], [])),
    "R11_tensors": Broken("R11", 30, lambda: frame([header(2**22 + 1)], [])),
    "R11_dims": Broken("R11", 30, lambda: one(tensor(shape=(*[1] * 32, 8)), blocks([RAW_BLOCK]))),
    "R11_block": Broken(
        "R11", 30, lambda: one(tensor(shape=(2**20 + 1,), tiles=(2**20 + 1, 1, 2**20 + 1)))
    ),
    "R11_blocks": Broken("R11", 30, lambda: one(tensor(shape=(4101,), tiles=(4101, 1, 1)))),
    "R11_tiles": Broken("R11", 30, lambda: one(tensor(shape=(64, 128), tiles=(128, 1, 1)))),
    "R12_overflow": Broken("R12", 31, lambda: one(tensor(num_bytes=0, **UNIT_64))),
    "R13_empty": Broken("R13", 40, lambda: one(tensor(""), blocks([RAW_BLOCK]))),
    "R13_control": Broken("R13", 40, lambda: one(tensor("a\nb"), blocks([RAW_BLOCK]))),
    "R13_utf8": Broken("R13", 40, lambda: one(tensor(b"\xed\xa0\x80"), blocks([RAW_BLOCK]))),
    "R13_long": Broken("R13", 40, lambda: one(tensor("x" * 1025), blocks([RAW_BLOCK]))),
    "R14_twice": Broken(
        "R14", 41, lambda: one(tensor(), tensor(), rows=[row(2, (0, 0))] * 2, num_tensors=2)
    ),
    "R15_dtype": Broken("R15", 42, lambda: one(tensor(dtype="F7"), blocks([RAW_BLOCK]))),
    "R15_size": Broken("R15", 42, lambda: one(tensor(shape=(9,), num_bytes=8))),
    "R15_unit": Broken(
        "R15", 42, lambda: one(tensor(shape=(9,), unit_bytes=2, num_bytes=9, tiles=(4, 1, 4)))
    ),
    "R16_cols": Broken("R16", 43, lambda: one(tensor(tiles=(3, 1, 3)))),
    "R16_tile": Broken("R16", 43, lambda: one(tensor(tiles=(4, 3, 4)))),
    "R17_missing": Broken("R17", 44, alias(target="v")),
    "R17_itself": Broken("R17", 44, alias(target="u")),
    "R17_shape": Broken("R17", 44, alias(target="t", shape=(2, 4))),
    "R18_fewer": Broken("R18", 45, lambda: one(tensor(), blocks([RAW_BLOCK]), num_tensors=2)),
    "R18_more": Broken("R18", 45, lambda: one(tensor(), blocks([RAW_BLOCK]), num_tensors=0)),
    "R19_kind": Broken(
        "R19", 46, lambda: one(tensor(), blocks([RAW_BLOCK]), rows=[row(4, (0, 0))])
    ),
    "R19_blocks": Broken(
        "R19", 46, lambda: one(tensor(kind=Kind.DELTA), rows=[row(1, (0, 0), (1, 2))])
    ),
    "R20_range": Broken("R20", 50, lambda: one(tensor(), blocks([RAW_BLOCK], first_block=1))),
    "R20_order": Broken("R20", 50, lambda: one(tensor(), *[blocks([RAW_BLOCK])] * 2)),
    "R21_mode": Broken("R21", 51, lambda: one(tensor(), blocks([(6, NEW, 0)]))),
    "R21_dense_bytes": Broken("R21", 51, lambda: one(tensor(), blocks([(4, NEW, 0)]))),
    "R21_value_mode": Broken("R21", 51, payload(1, bytes((1, 0, 96)) + STEP[3:])),
    "R22_short": Broken("R22", 52, lambda: one(tensor(), blocks([RAW_BLOCK], payload_bytes=[7]))),
    "R23_k": Broken("R23", 53, payload(1, b"\x09" + STEP[1:])),
    "R23_e": Broken("R23", 53, payload(1, bytes((1, 0, 32, 2, 0)) + b"\0" + unary(3, 0, 0, 0))),
    "R23_f": Broken("R23", 53, payload(1, bytes((1, 0, 128, 0, 0)) + b"\0" + unary(3))),
    "R23_mask": Broken("R23", 53, payload(3, u16(0) + b"\0")),
    "R23_balanced": Broken(
        "R23", 53, payload(2, bytes((1, 0)) + u16(2) + bytes((1, 0)) + b"\0" + unary(3))
    ),
    "R23_dense": Broken(
        "R23", 53, payload(4, DENSE[:4] + b"\x08\0\0" + DENSE[5:], DENSE_NEW, **TWO)
    ),
    "R24_position": Broken("R24", 54, payload(1, STEP[:4] + unary(8))),
    "R24_value": Broken(
        "R24", 54, payload(1, bytes((1, 0, 64 | 6)) + bits((0, 6)) + b"\0" + unary(3, 2))
    ),
    "R24_index": Broken("R24", 54, payload(1, bytes((1, 0, 128, 1, 0)) + b"\0" + unary(3, 1))),
    "R24_symbol": Broken("R24", 54, payload(4, DENSE[:-1] + unary(0, 2), DENSE_NEW, **TWO)),
    "R24_listed_twice": Broken(
        "R24", 54, payload(4, DENSE[:3] + b"\x7f" + DENSE[4:], DENSE_NEW, **TWO)
    ),
    "R25_long": Broken("R25", 55, payload(1, STEP + b"\0")),
    "R25_short": Broken("R25", 55, payload(1, STEP[:-1])),
    "R25_header": Broken("R25", 55, payload(1, STEP[:1])),
    "R25_varint": Broken("R25", 55, payload(1, varint(1, 1) + STEP[1:])),
    "R25_sign_padding": Broken("R25", 55, payload(1, STEP[:3] + b"\2" + STEP[4:])),
    "R25_low_padding": Broken("R25", 55, payload(1, bytes((1, 2, 0, 7, 0)) + unary(0))),
    "R25_raw": Broken("R25", 55, payload(5, NEW[:-1])),
    "R26_result": Broken("R26", 58, payload(1, STEP[:4] + unary(4))),
    "R26_raw": Broken("R26", 58, payload(5, bytes(8))),
    "R27_digest": Broken("R27", 60, lambda: on_example(base=(1, 2)), "example_base"),
    "R28_digest": Broken("R28", 61, lambda: on_example(new=(1, 2)), "example_base"),
    "R29_surplus": Broken("R29", 62, lambda: on_example(names=("w",)), "example_base"),
    "R29_missing": Broken("R29", 62, lambda: on_example(names=("v", "b")), "example_base"),
    "R30_new_root": Broken(
        "R30", 63, lambda: on_example(roots={"new_root": u64(1) * 4}), "example_base"
    ),
}
