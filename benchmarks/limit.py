"""The information limit of a delta whose receiver holds the old weights.

No codec can go below it without knowing more than the old weights: entropy of the changed positions
given the exponent of the old value, plus entropy of the step in units of the last place given that
exponent, plus half a log2(n) for each parameter of this model.
Source: codec.md section 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]

_CHUNK = 1 << 24
_STEP_BITS = 17  # a step lies in -65535 .. 65535


@dataclass(frozen=True)
class Limit:
    """All costs in bits, over the whole state."""

    num_elements: int
    num_changed: int
    positions_blind: float
    positions: float
    values: float

    @property
    def num_bytes(self) -> float:
        return (self.positions + self.values) / 8

    @property
    def bits_per_change(self) -> float:
        return 8 * self.num_bytes / max(1, self.num_changed)


def limit(old: Mapping[str, Bits], new: Mapping[str, Bits]) -> Limit:
    """The limit over all tensors together, whose exponents share one model."""
    elements = np.zeros(256, np.int64)
    changed = np.zeros(256, np.int64)
    steps = np.zeros(256 << _STEP_BITS, np.int64)
    for name, before in old.items():
        flat_old, flat_new = before.reshape(-1), new[name].reshape(-1)
        for start in range(0, flat_old.size, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            _count(flat_old[chunk], flat_new[chunk], elements, changed, steps)
    return Limit(
        num_elements=int(elements.sum()),
        num_changed=int(changed.sum()),
        positions_blind=_bernoulli_bits(elements.sum(keepdims=True), changed.sum(keepdims=True)),
        positions=_bernoulli_bits(elements[elements > 0], changed[elements > 0]),
        values=sum(_histogram_bits(row) for row in steps.reshape(256, -1)),
    )


def _count(
    old: Bits,
    new: Bits,
    elements: NDArray[np.int64],
    changed: NDArray[np.int64],
    steps: NDArray[np.int64],
) -> None:
    elements += np.bincount((old >> 7) & 0xFF, minlength=256)
    at = np.flatnonzero(old != new)
    before, after = old[at], new[at]
    exponent = ((before >> 7) & 0xFF).astype(np.int64)
    changed += np.bincount(exponent, minlength=256)
    keys = (exponent << _STEP_BITS) + (_order(after) - _order(before)) + (1 << _STEP_BITS - 1)
    if keys.size > steps.size // 16:
        steps += np.bincount(keys, minlength=steps.size)
    else:
        np.add.at(steps, keys, 1)


def _order(bits: Bits) -> NDArray[np.int32]:
    """All bit patterns as integers in numerical order, NaN payloads and -0.0 included."""
    wide = bits.astype(np.int32)
    return np.where(wide & 0x8000, 0x7FFF - (wide & 0x7FFF), wide | 0x8000)


def _bernoulli_bits(num: NDArray[np.int64], hits: NDArray[np.int64]) -> float:
    p = np.clip(hits / np.maximum(num, 1), 1e-300, 1 - 1e-16)
    entropy = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
    return float((num * entropy).sum() + 0.5 * np.log2(num + 1.0).sum())


def _histogram_bits(counts: NDArray[np.int64]) -> float:
    used = counts[counts > 0].astype(float)
    total = used.sum()
    if not total:
        return 0.0
    return float(-(used * np.log2(used / total)).sum() + 0.5 * len(used) * np.log2(total + 1))
