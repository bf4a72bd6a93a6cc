"""Laws made of other laws."""

from __future__ import annotations

import math

import msgspec

from gymfast_sim.checks import check_positive
from gymfast_sim.laws.base import Law, ascends, interpolate
from gymfast_sim.laws.measured import Empirical, QuantileGrid
from gymfast_sim.laws.shaped import BoundedPareto, Burr, Erlang, Gamma
from gymfast_sim.laws.simple import (
    Constant,
    Exponential,
    Lognormal,
    Pareto,
    Uniform,
    Weibull,
)

_WEIGHT_TOLERANCE = 1e-6


SimpleLaw = (
    Constant
    | Uniform
    | Exponential
    | Erlang
    | Lognormal
    | Weibull
    | Pareto
    | Gamma
    | Burr
    | BoundedPareto
    | Empirical
    | QuantileGrid
)


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a mixture."""

    weight: float
    of: SimpleLaw


class Mixture(Law, frozen=True, kw_only=True, tag="mixture"):
    """One of several laws, by weight."""

    components: tuple[Component, ...]

    def _check(self) -> None:
        if not self.components:
            raise ValueError("components is empty, expected at least one")
        for component in self.components:
            check_positive("weight", component.weight)
        total = math.fsum(component.weight for component in self.components)
        if abs(total - 1) > _WEIGHT_TOLERANCE:
            raise ValueError(f"weights sum to {total:.6g}, expected 1")

    def _at(self, value: float, branch: float) -> float:
        total = 0.0
        for component in self.components[:-1]:
            total = total + component.weight
            if branch < total:
                return component.of.at(value)
        return self.components[-1].of.at(value)

    def quantile(self, p: float) -> float:
        """The duration that is not exceeded with probability p, found by halving."""
        if not 0 < p < 1:
            raise ValueError(f"p is {p}, expected a number between 0 and 1")
        ends = [component.of.at(p) for component in self.components]
        low, high = min(ends), max(ends)
        for _ in range(200):
            middle = (low + high) / 2
            if not low < middle < high:
                break
            low, high = (middle, high) if self._cdf(middle) < p else (low, middle)
        return high if self.cap_s is None else min(high, self.cap_s)

    def _cdf(self, x_s: float) -> float:
        return math.fsum(c.weight * c.of.cdf(x_s) for c in self.components)

    def _mean(self) -> float:
        return math.fsum(c.weight * c.of.expected_s for c in self.components)

    def _max(self) -> float:
        return max(c.of.max_s for c in self.components)

    def limited_s(self, limit_s: float) -> float:
        """The mean of the components, each cut."""
        caps = [
            min(limit_s, math.inf if c.of.cap_s is None else c.of.cap_s) for c in self.components
        ]
        parts = zip(self.components, caps, strict=True)
        return math.fsum(c.weight * c.of.limited_s(cap) for c, cap in parts)


class Crowded(Law, frozen=True, kw_only=True, tag="crowded"):
    """A law times a factor that depends on how many sandboxes are starting, itself included.

    Between the counts the factor is straight, outside of them constant. As a plain law, without a
    count, it is that of one sandbox alone.
    """

    base: SimpleLaw | Mixture
    counts: tuple[int, ...]
    factors: tuple[float, ...]

    def _check(self) -> None:
        if len(self.counts) != len(self.factors) or not self.counts:
            raise ValueError(
                f"{len(self.counts)} counts and {len(self.factors)} factors, expected as many, "
                "at least 1"
            )
        if self.counts[0] < 1 or not ascends(self.counts):
            raise ValueError("counts have to ascend strictly from 1 or more")
        for factor in self.factors:
            check_positive("a number of factors", factor)

    def factor(self, num_starting: int) -> float:
        """What the base is multiplied with while so many sandboxes start."""
        if len(self.counts) == 1:
            return self.factors[0]
        return interpolate(float(num_starting), self.counts, self.factors)

    def crowded_at(self, value: float, branch: float, num_starting: int) -> float:
        """The duration at a place, while so many sandboxes start."""
        found = self.base.at(value, branch) * self.factor(num_starting)
        return found if self.cap_s is None or found < self.cap_s else self.cap_s

    def _at(self, value: float, branch: float) -> float:
        return self.base.at(value, branch) * self.factor(1)

    def _cdf(self, x_s: float) -> float:
        return self.base.cdf(x_s / self.factor(1))

    def _mean(self) -> float:
        return self.base.expected_s * self.factor(1)

    def _max(self) -> float:
        return self.base.max_s * max(self.factors)

    def limited_s(self, limit_s: float) -> float:
        """The mean of one sandbox alone, cut."""
        factor = self.factor(1)
        cap_s = math.inf if self.base.cap_s is None else self.base.cap_s
        return self.base.limited_s(min(limit_s / factor, cap_s)) * factor

    def quantile(self, p: float) -> float:
        """The duration of one sandbox alone that is not exceeded with probability p."""
        found = self.base.quantile(p) * self.factor(1)
        return found if self.cap_s is None else min(found, self.cap_s)
