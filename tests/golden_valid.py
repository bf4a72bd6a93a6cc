"""The valid golden frames: what state they lead from and to, and how they were made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from delta_frames import (
    EMPTY_ROOT,
    bits,
    blocks,
    check_of,
    digest_of,
    frame,
    header,
    row,
    section,
    tensor,
    unary,
)

from gymfast.delta import Tensor
from gymfast.delta.backends.reference_digest import splitmix64
from gymfast.delta.frame import Kind, root_of

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Valid:
    """A golden frame; `base` names the one that leads to `old`, by_hand what no encoder makes."""

    old: Weights
    new: Weights
    base: str = ""
    profile: str = "auto"
    block_units: int = 2**19
    tiled: bool = False
    key: bytes | None = None
    by_hand: Callable[[], bytes] | None = field(default=None, repr=False)


def numbers(seed: int, count: int) -> np.ndarray:
    """The first 64-bit numbers of a stream that is the same for ever."""
    return splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(seed << 32))


def weights(seed: int, count: int, unit_bytes: int) -> np.ndarray:
    """Units that look like trained weights: the sum of four uniform numbers, about 0.02 wide."""
    parts = numbers(seed, 4 * count).reshape(count, 4) >> np.uint64(40)
    values = (parts.astype(np.int64).sum(axis=1) - 2**25).astype(np.float64) * (0.04 / 2**24)
    return (values.astype("<f4").view("<u4") >> (32 - 8 * unit_bytes)).astype(f"<u{unit_bytes}")


def as_tensor(dtype: str, shape: tuple[int, ...], units) -> Tensor:
    return Tensor(dtype, shape, np.ascontiguousarray(units).view(np.uint8).ravel())


def stepped(units: np.ndarray, seed: int, per_million: int) -> np.ndarray:
    """The units after an optimiser's step: each binade below the largest changes twice as often."""
    draws = numbers(seed, units.size)
    exponent = units >> {1: 3, 2: 7, 4: 23}[units.itemsize] & (15 if units.itemsize == 1 else 255)
    binades = np.minimum(exponent.max() - exponent, 10).astype(np.uint64)
    where = draws % np.uint64(1_000_000) < np.uint64(per_million) << binades
    is_large = (draws >> np.uint64(32)) % np.uint64(8) == 0
    size = 1 + is_large * ((draws >> np.uint64(40)) % np.uint64(7)).astype(np.int64)
    step = np.where(draws >> np.uint64(63) == 0, size, -size).astype(units.dtype)
    return np.where(where, units + step, units)


def example() -> tuple[Weights, Weights]:
    """The worked example of the specification: one matrix of BF16 and an unchanged vector."""
    base = np.array([0x3C00 + 16 * i for i in range(16)], "<u2")
    new = base.copy()
    new[3] += 1
    new[9] -= 1
    new[14] += 3
    bias = as_tensor("F32", (2,), np.array([0x3F800000, 0xBF800000], "<u4"))
    old = {"w": as_tensor("BF16", (4, 4), base), "b": bias}
    return old, {"w": as_tensor("BF16", (4, 4), new), "b": bias}


MODEL_SHAPES = {"BF16": (160, 100), "F32": (2000,), "F8_E4M3": (50, 80)}
WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


def model(change: Callable[[np.ndarray, int], np.ndarray]) -> Weights:
    """Three tensors, one per unit size, after a change of their units."""
    return {
        f"layer.{dtype}": as_tensor(dtype, shape, change(units, 10 + i))
        for i, (dtype, shape) in enumerate(MODEL_SHAPES.items())
        for units in [weights(i, int(np.prod(shape)), WIDTHS[dtype])]
    }


def noisy(units: np.ndarray, seed: int) -> np.ndarray:
    """New signs and mantissas under the old exponents: what dense blocks are for."""
    exponent = {1: 0x78, 2: 0x7F80, 4: 0x7F800000}[units.itemsize]
    random = numbers(seed, units.size).astype(units.dtype)
    mask = units.dtype.type(exponent)
    return (units & mask) | (random & ~mask)


def special(units: np.ndarray, seed: int) -> np.ndarray:
    """Sign flips, wraps around zero and the largest magnitude, infinities, NaNs with payloads."""
    bits_of = 8 * units.itemsize
    top = 1 << (bits_of - 1)
    inf = {1: 0x78, 2: 0x7F80, 4: 0x7F800000}[units.itemsize]
    new = units.copy()
    new[5::40] ^= units.dtype.type(top)
    for i, value in enumerate((0, top, top - 1, 2 * top - 1, inf, inf | top, inf | 1, inf | 3)):
        new[i::97] = value
    return new


def tiles(change: Callable[[np.ndarray, int], np.ndarray]) -> Weights:
    """Tensors that tile and one that does not."""
    shapes = {"a": ("BF16", (64, 32), 2), "b": ("F64", (32, 16), 4), "c": ("U8", (3, 16, 64), 1)}
    shapes["odd"] = ("BF16", (33, 32), 2)
    made = {}
    for i, (name, (dtype, shape, width)) in enumerate(shapes.items()):
        count = int(np.prod(shape)) * (2 if dtype == "F64" else 1)
        made[name] = as_tensor(dtype, shape, change(weights(20 + i, count, width), 30 + i))
    return made


def kinds() -> tuple[Weights, Weights]:
    """Every kind and status, empty and 0-dim tensors, ties, and every dtype of the format."""
    raw = numbers(40, 64).view(np.uint8)

    def take(dtype: str, shape: tuple[int, ...], num_bytes: int, at: int = 0) -> Tensor:
        return Tensor(dtype, shape, raw[at : at + num_bytes].copy())

    tied = take("BF16", (4, 8), 64)
    old = {
        "kept": take("U8", (10,), 10),
        "changed": take("I32", (5,), 20),
        "gone": take("F16", (3,), 6),
        "retyped": take("F32", (4,), 16),
        "reshaped": take("I16", (2, 3), 12),
        "empty": take("F32", (0, 7), 0),
        "scalar": take("F64", (), 8),
        "embedding": tied,
        "head": tied,
        "untied": tied,
    }
    new_tied = take("BF16", (4, 8), 64, 1)
    new = {
        "kept": old["kept"],
        "changed": take("I32", (5,), 20, 4),
        "retyped": take("BF16", (4,), 8),
        "reshaped": take("I16", (3, 2), 12, 3),
        "empty": old["empty"],
        "scalar": take("F64", (), 8, 9),
        "embedding": new_tied,
        "head": new_tied,
        "untied": take("BF16", (4, 8), 64, 2),
        "größe/日本.🙂": take("BOOL", (2,), 2),
        "zeros": Tensor("U64", (3,), np.zeros(24, np.uint8)),
    }
    packed = {"F4": (5,), "F6_E2M3": (3, 3), "F6_E3M2": (4,)}
    sizes = {"F4": 3, "F6_E2M3": 7, "F6_E3M2": 3, "U16": 6, "U32": 12, "I64": 24, "C64": 24}
    sizes |= dict.fromkeys(("I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 3)
    for i, (dtype, size) in enumerate(sizes.items()):
        new[f"dtype.{dtype}"] = take(dtype, packed.get(dtype, (3,)), size, i)
    return old, new


def lenient() -> bytes:
    """A frame that no encoder of ours writes and every reader takes.

    Skippable sections, an alias before its target, poor Rice parameters, a listed unchanged block,
    dense use_base without a base, reset class fields, blocks in sections of their own.
    """
    steps = bytes((0, 0, 0, 1, 0, 0, 0, 0))
    poor = bytes((1, 7, 0x40 | 3)) + bits((3, 7), (0, 3)) + b"\0" + unary(0, 0)
    dense = bytes((1, 1, 0x7F, 0)) + bytes((0,)) + bytes((0x01, 0x80)) + unary(0, 1)
    dense_new = np.array([0x3F81, 0x8000], "<u2").tobytes()
    skippable = section(0xC3, b"a later version says more here")
    sections = [
        header(4, 2),
        skippable,
        tensor("tie", kind=Kind.ALIAS, target="steps", class_shift=7, class_base=255),
        tensor("steps", class_shift=3, class_base=9),
        skippable,
        blocks([(1, poor, check_of(steps))], tensor=1),
        tensor("dense", dtype="U16", shape=(2,), unit_bytes=2),
        blocks([(4, dense, check_of(dense_new))], tensor=2),
        tensor("blocks", shape=(4, 2), tiles=(2, 2, 1)),
        blocks([(0, b"", 0)], tensor=3),
        section(0x80, b""),
        blocks([(5, b"\0\0", 0), (0, b"", 0), (0, b"", 0)], tensor=3, first_block=1),
    ]
    rows = [row(5), row(2, digest_of(steps)), row(2, digest_of(dense_new)), row(2, (0, 0))]
    entries = [
        ("tie", "U8", (8,), digest_of(steps)),
        ("steps", "U8", (8,), digest_of(steps)),
        ("dense", "U16", (2,), digest_of(dense_new)),
        ("blocks", "U8", (4, 2), (0, 0)),
    ]
    return frame(sections, rows, base_root=EMPTY_ROOT, new_root=root_of(entries))


def lenient_state() -> Weights:
    steps = as_tensor("U8", (8,), np.array([0, 0, 0, 1, 0, 0, 0, 0], np.uint8))
    dense = as_tensor("U16", (2,), np.array([0x3F81, 0x8000], "<u2"))
    return {"tie": steps, "steps": steps, "dense": dense} | {
        "blocks": as_tensor("U8", (4, 2), np.zeros(8, np.uint8))
    }


def same(units: np.ndarray, seed: int) -> np.ndarray:
    return units


def a_few(units: np.ndarray, seed: int) -> np.ndarray:
    return stepped(units, seed, 100)


def many(units: np.ndarray, seed: int) -> np.ndarray:
    return stepped(units, seed, 5_000)


def most(units: np.ndarray, seed: int) -> np.ndarray:
    return stepped(units, seed, 150_000)


def every_bit(units: np.ndarray, seed: int) -> np.ndarray:
    return numbers(seed, units.size).astype(units.dtype)


def model_case(change, profile: str = "auto") -> Valid:
    return Valid(model(same), model(change), "model", profile, 8192)


KEY = bytes(range(16))
EXAMPLE_OLD, EXAMPLE_NEW = example()
KINDS_OLD, KINDS_NEW = kinds()

VALID: dict[str, Valid] = {
    "example_base": Valid({}, EXAMPLE_OLD),
    "example": Valid(EXAMPLE_OLD, EXAMPLE_NEW, "example_base", "fast"),
    "unchanged": Valid(EXAMPLE_OLD, EXAMPLE_OLD, "example_base"),
    "model": Valid({}, model(same), block_units=8192),
    "model_a_few_auto": model_case(a_few),
    "model_a_few_fast": model_case(a_few, "fast"),
    "model_many_auto": model_case(many),
    "model_many_fast": model_case(many, "fast"),
    "model_many_small": model_case(many, "small"),
    "model_most_auto": model_case(most),
    "model_most_small": model_case(most, "small"),
    "model_noisy": model_case(noisy),
    "model_special_fast": model_case(special, "fast"),
    "model_special_small": model_case(special, "small"),
    "model_every_bit": model_case(every_bit),
    "tiles": Valid({}, tiles(same), block_units=64, tiled=True),
    "tiles_many": Valid(tiles(same), tiles(many), "tiles", "small", 64, tiled=True),
    "kinds_base": Valid({}, KINDS_OLD),
    "kinds": Valid(KINDS_OLD, KINDS_NEW, "kinds_base"),
    "authenticated": Valid(EXAMPLE_OLD, EXAMPLE_NEW, "example_base", "fast", key=KEY),
    "lenient": Valid({}, lenient_state(), by_hand=lenient),
}
