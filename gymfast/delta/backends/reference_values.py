"""Units as numbers: steps, classes and dense symbols (docs/wire-format.md 5.2, 6, 10)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.backends.reference_rice import I64

NUM_CLASSES = 16


@dataclass(frozen=True)
class Steps:
    """Changes of k units, [k] each: v, neg and flip of section 5.2."""

    v: I64
    neg: NDArray[np.bool_]
    flip: NDArray[np.bool_]

    def take(self, index: I64) -> Steps:
        """The changes at these indices."""
        return Steps(self.v[index], self.neg[index], self.flip[index])


def half_range(unit_bytes: int) -> int:
    """M: the number of magnitudes of a unit."""
    return int(2 ** (8 * unit_bytes - 1))


def steps_between(base: I64, new: I64, unit_bytes: int) -> Steps:
    """The steps that lead from base to new, unit by unit."""
    half = half_range(unit_bytes)
    d = new % half - base % half
    return Steps((np.abs(d) - 1) % half, d < 0, base // half != new // half)


def apply_steps(base: I64, steps: Steps, unit_bytes: int) -> I64:
    """The new units; every combination of step and base gives one (modulo M)."""
    half = half_range(unit_bytes)
    d = np.where(steps.neg, -(steps.v + 1), steps.v + 1)
    sign = (base // half) ^ steps.flip
    new: I64 = sign * half + (base % half + d) % half
    return new


def exponent_field(x: I64, unit_bytes: int) -> I64:
    """field(x) of section 5.2: the exponent of BF16 and F32."""
    return x % 128 if unit_bytes == 1 else (x >> (8 * unit_bytes - 9)) % 256


def classes_of(base: I64, unit_bytes: int, class_shift: int, class_base: int) -> I64:
    """class(x) of base units, 0..15."""
    shifted = exponent_field(base, unit_bytes) >> class_shift
    classes: I64 = np.clip(shifted - class_base, 0, NUM_CLASSES - 1)
    return classes


def sample_class_params(base: NDArray[np.unsignedinteger], unit_bytes: int) -> tuple[int, int]:
    """class_shift and class_base that the canonical encoder chooses for a base tensor."""
    num_samples = min(base.size, 1024)
    if num_samples == 0:
        return 0, 0
    index = np.array([i * base.size // num_samples for i in range(num_samples)])
    fields = np.sort(exponent_field(base[index].astype(np.int64), unit_bytes))
    top = int(fields[num_samples - 1 - num_samples // 512])
    low = int(fields[num_samples // 64])
    class_shift = next(s for s in range(8) if (top >> s) - (low >> s) <= 12)
    return class_shift, max(0, (top >> class_shift) - 15)


def dense_symbols(x: I64, unit_bytes: int) -> I64:
    """sym(x) of section 6; unit_bytes is 2 or 4."""
    return (x >> (7 if unit_bytes == 2 else 23)) % 256


def dense_rests(x: I64, unit_bytes: int) -> NDArray[np.uint8]:
    """rest(x) of section 6 as bytes, [n, 1] or [n, 3]."""
    low_bits = 7 if unit_bytes == 2 else 23
    rests = (x >> (8 * unit_bytes - 1)) << low_bits | x % 2**low_bits
    as_bytes: NDArray[np.uint8] = rests.astype("<u4").view(np.uint8).reshape(-1, 4)
    return as_bytes[:, : unit_bytes - 1]


def dense_join(symbols: I64, rests: NDArray[np.uint8], unit_bytes: int) -> I64:
    """The units with these symbols and rests: the inverse of the two functions above."""
    low_bits = 7 if unit_bytes == 2 else 23
    padded = np.zeros((symbols.size, 4), np.uint8)
    padded[:, : unit_bytes - 1] = rests
    rest = padded.view("<u4").ravel().astype(np.int64)
    sign = rest >> low_bits
    units: I64 = sign << (8 * unit_bytes - 1) | symbols << low_bits | rest % 2**low_bits
    return units
