"""The information limit of a BF16 update for a receiver that holds the old weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U16 = NDArray[np.uint16]
NUM_EXPONENTS = 256


@dataclass(frozen=True)
class Limit:
    """Bits that no coder of this kind can go below.

    Positions are coded given the exponent of the old value, then the step in units in the last
    place given that exponent; each model parameter costs half a log2 of its sample count.
    Source: the conditional entropy of shared/tools/delta_limit.py.
    """

    num_elements: int
    num_changed: int
    position_bits: float
    value_bits: float

    @property
    def size_bytes(self) -> float:
        """The limit of the whole message."""
        return (self.position_bits + self.value_bits) / 8


class LimitCounter:
    """Counts a state tensor by tensor; `limit` answers for all that was added."""

    def __init__(self) -> None:
        self._totals = np.zeros(NUM_EXPONENTS, np.int64)
        self._changes = np.zeros(NUM_EXPONENTS, np.int64)
        self._steps: list[NDArray[np.int64]] = []

    def add(self, old: U16, new: U16) -> None:
        """Count one tensor: the bits of its BF16 values before and after."""
        self._totals += _count_exponents(old)
        where = np.flatnonzero(old != new)
        exponents = (old[where] >> 7 & 0xFF).astype(np.int64)
        self._changes += np.bincount(exponents, minlength=NUM_EXPONENTS)
        steps = _ordered(new[where]) - _ordered(old[where])
        self._steps.append(exponents << 32 | steps & 0xFFFFFFFF)

    def limit(self) -> Limit:
        """The limit of the update as one message."""
        steps = np.concatenate(self._steps) if self._steps else np.zeros(0, np.int64)
        keys, counts = np.unique(steps, return_counts=True)
        groups = np.split(counts, np.flatnonzero(np.diff(keys >> 32)) + 1)
        used = self._totals > 0
        return Limit(
            num_elements=int(self._totals.sum()),
            num_changed=int(self._changes.sum()),
            position_bits=_bernoulli_bits(self._totals[used], self._changes[used]),
            value_bits=sum(_histogram_bits(group) for group in groups if group.size),
        )


def _count_exponents(values: U16) -> NDArray[np.int64]:
    """Number of values of each exponent, by counting the upper 9 bits."""
    by_sign = np.bincount(values >> 7, minlength=2 * NUM_EXPONENTS)
    counts: NDArray[np.int64] = by_sign.reshape(2, NUM_EXPONENTS).sum(0)
    return counts


def _ordered(values: U16) -> NDArray[np.int64]:
    """Bit patterns as integers in the order of the numbers they stand for, NaN included."""
    bits = values.astype(np.int64)
    return np.where(bits & 0x8000, 0x7FFF - (bits & 0x7FFF), bits | 0x8000)


def _bernoulli_bits(totals: NDArray[np.int64], hits: NDArray[np.int64]) -> float:
    share = np.clip(hits / totals, 1e-300, 1 - 1e-16)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share))
    return float((totals * entropy).sum() + 0.5 * np.log2(totals + 1).sum())


def _histogram_bits(counts: NDArray[np.int64]) -> float:
    total = counts.sum()
    return float(-(counts * np.log2(counts / total)).sum() + 0.5 * counts.size * np.log2(total + 1))
