"""What all laws of durations have in common."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from gymfast_sim.checks import check_positive


class Law(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="law",
):
    """A law of durations; with `cap_s`, longer ones are cut to it, as a time-out does."""

    cap_s: float | None = None

    def __post_init__(self) -> None:
        if self.cap_s is not None:
            check_positive("cap_s", self.cap_s)
        self._check()
        if self.cap_s is None and not math.isfinite(self.expected_s):
            raise ValueError("the law has no mean, so no run with it has a mean either: give cap_s")

    def at(self, value: float, branch: float = 0.5) -> float:
        """The duration at place `value` in (0, 1); `branch` chooses a component of a mixture."""
        found = self._at(value, branch)
        return found if self.cap_s is None or found < self.cap_s else self.cap_s

    def cdf(self, x_s: float) -> float:
        """The probability of at most x_s."""
        return 1.0 if self.cap_s is not None and x_s >= self.cap_s else self._cdf(x_s)

    def quantile(self, p: float) -> float:
        """The duration that is not exceeded with probability p. Raises ValueError for a bad p."""
        if not 0 < p < 1:
            raise ValueError(f"p is {p}, expected a number between 0 and 1")
        return self.at(p)

    @property
    def expected_s(self) -> float:
        """The expected duration; inf if there is none."""
        return self._mean() if self.cap_s is None else self.limited_s(self.cap_s)

    @property
    def max_s(self) -> float:
        """The longest possible duration; inf if there is none."""
        most = self._max()
        return most if self.cap_s is None else min(most, self.cap_s)

    def limited_s(self, limit_s: float) -> float:
        """The mean of what is cut at limit_s, from the probability of more than each x below it."""
        nodes, weights = np.polynomial.legendre.leggauss(64)
        edges = [0.0, *(limit_s * 2.0 ** np.arange(-30.0, 1.0))]
        total = 0.0
        for low, high in itertools.pairwise(edges):
            half = (high - low) / 2
            places = low + half * (nodes + 1)
            total += half * sum(
                w * (1 - self.cdf(float(x))) for w, x in zip(weights, places, strict=True)
            )
        return float(total)

    def _check(self) -> None:
        raise NotImplementedError

    def _at(self, value: float, branch: float) -> float:
        raise NotImplementedError

    def _cdf(self, x_s: float) -> float:
        raise NotImplementedError

    def _mean(self) -> float:
        raise NotImplementedError

    def _max(self) -> float:
        return math.inf


def interpolate(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    """The value at x on straight lines between places; the first or last one outside."""
    if x <= places[0]:
        return values[0]
    if x >= places[-1]:
        return values[-1]
    i = bisect.bisect_right(places, x) - 1
    part = (x - places[i]) / (places[i + 1] - places[i])
    return values[i] + (values[i + 1] - values[i]) * part


def ascends(numbers: Sequence[float]) -> bool:
    """Whether each number is above the one before."""
    return all(a < b for a, b in itertools.pairwise(numbers))
