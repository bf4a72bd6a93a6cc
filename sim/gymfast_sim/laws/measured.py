"""Laws made of measurements."""

from __future__ import annotations

import bisect
import itertools
import math

from gymfast_sim.checks import check_not_negative
from gymfast_sim.laws.base import Law, ascends, interpolate


class Empirical(Law, frozen=True, kw_only=True, tag="empirical"):
    """One of the values measured, each as likely as the others."""

    values_s: tuple[float, ...]

    def _check(self) -> None:
        if not self.values_s:
            raise ValueError("values_s is empty, expected at least one duration")
        for value in self.values_s:
            check_not_negative("a number of values_s", value)
        if any(b < a for a, b in zip(self.values_s, self.values_s[1:], strict=False)):
            raise ValueError("values_s has to ascend: sort the measurements")

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return self.values_s[min(int(value * len(self.values_s)), len(self.values_s) - 1)]

    def _cdf(self, x_s: float) -> float:
        return bisect.bisect_right(self.values_s, x_s) / len(self.values_s)

    def _mean(self) -> float:
        return math.fsum(self.values_s) / len(self.values_s)

    def _max(self) -> float:
        return self.values_s[-1]

    def limited_s(self, limit_s: float) -> float:
        """The mean of the values, each cut."""
        return math.fsum(min(value, limit_s) for value in self.values_s) / len(self.values_s)


class QuantileGrid(Law, frozen=True, kw_only=True, tag="quantiles"):
    """Straight between the quantiles given; what lies outside of them gets the first or the last.

    So the tail ends at the last value: a run that draws more numbers than were measured sees no
    longer duration.
    """

    probabilities: tuple[float, ...]
    values_s: tuple[float, ...]

    def _check(self) -> None:
        p, x = self.probabilities, self.values_s
        if len(p) != len(x) or len(p) < 2:
            raise ValueError(
                f"{len(p)} probabilities and {len(x)} values_s, expected as many, at least 2"
            )
        if not (p[0] >= 0 and p[-1] <= 1 and ascends(p)):
            raise ValueError("probabilities have to ascend strictly, from 0 or more to at most 1")
        for value in x:
            check_not_negative("a number of values_s", value)
        if any(b < a for a, b in itertools.pairwise(x)):
            raise ValueError("values_s has to ascend with the probabilities")

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return interpolate(value, self.probabilities, self.values_s)

    def _cdf(self, x_s: float) -> float:
        p, x = self.probabilities, self.values_s
        if x_s < x[0]:
            return 0.0
        if x_s >= x[-1]:
            return 1.0
        i = bisect.bisect_right(x, x_s) - 1
        return p[i] + (p[i + 1] - p[i]) * ((x_s - x[i]) / (x[i + 1] - x[i]))

    def _mean(self) -> float:
        p, x = self.probabilities, self.values_s
        inside = ((b - a) * (v + w) / 2 for a, b, v, w in zip(p, p[1:], x, x[1:], strict=False))
        return p[0] * x[0] + math.fsum(inside) + (1 - p[-1]) * x[-1]

    def _max(self) -> float:
        return self.values_s[-1]
