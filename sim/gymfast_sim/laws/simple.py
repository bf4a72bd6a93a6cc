"""Laws with a formula."""

from __future__ import annotations

import math

from gymfast._core import sim_exp as exp
from gymfast._core import sim_log as log
from gymfast._core import sim_normal_quantile as normal_quantile
from gymfast_sim.checks import check_not_negative, check_positive
from gymfast_sim.laws.base import Law


class Constant(Law, frozen=True, kw_only=True, tag="constant"):
    """Always the same."""

    value_s: float

    def _check(self) -> None:
        check_not_negative("value_s", self.value_s)

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return self.value_s

    def _cdf(self, x_s: float) -> float:
        return float(x_s >= self.value_s)

    def _mean(self) -> float:
        return self.value_s

    def _max(self) -> float:
        return self.value_s

    def limited_s(self, limit_s: float) -> float:
        """The shorter of the two."""
        return min(self.value_s, limit_s)


class Uniform(Law, frozen=True, kw_only=True, tag="uniform"):
    """Anything between two ends."""

    low_s: float
    high_s: float

    def _check(self) -> None:
        check_not_negative("low_s", self.low_s)
        check_not_negative("high_s", self.high_s)
        if self.high_s <= self.low_s:
            raise ValueError(f"high_s is {self.high_s}, expected more than low_s, {self.low_s}")

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return self.low_s + value * (self.high_s - self.low_s)

    def _cdf(self, x_s: float) -> float:
        return min(max((x_s - self.low_s) / (self.high_s - self.low_s), 0.0), 1.0)

    def _mean(self) -> float:
        return (self.low_s + self.high_s) / 2

    def _max(self) -> float:
        return self.high_s


class Exponential(Law, frozen=True, kw_only=True, tag="exponential"):
    """Without memory."""

    mean_s: float

    def _check(self) -> None:
        check_positive("mean_s", self.mean_s)

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return -self.mean_s * log(1.0 - value)

    def _cdf(self, x_s: float) -> float:
        return -math.expm1(-x_s / self.mean_s) if x_s > 0 else 0.0

    def _mean(self) -> float:
        return self.mean_s


class Lognormal(Law, frozen=True, kw_only=True, tag="lognormal"):
    """exp of a normal number, on top of `shift_s`."""

    median_s: float
    sigma: float
    shift_s: float = 0.0

    def _check(self) -> None:
        check_positive("median_s", self.median_s)
        check_positive("sigma", self.sigma)
        check_not_negative("shift_s", self.shift_s)

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return self.shift_s + self.median_s * exp(self.sigma * normal_quantile(value))

    def _cdf(self, x_s: float) -> float:
        if x_s <= self.shift_s:
            return 0.0
        z = math.log((x_s - self.shift_s) / self.median_s) / self.sigma
        return math.erfc(-z / math.sqrt(2)) / 2

    def _mean(self) -> float:
        return self.shift_s + self.median_s * exp(self.sigma**2 / 2)


class Weibull(Law, frozen=True, kw_only=True, tag="weibull"):
    """Heavier than exponential below shape 1, lighter above."""

    scale_s: float
    shape: float

    def _check(self) -> None:
        check_positive("scale_s", self.scale_s)
        check_positive("shape", self.shape)

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return self.scale_s * exp(log(-log(1.0 - value)) / self.shape)

    def _cdf(self, x_s: float) -> float:
        return -math.expm1(-((x_s / self.scale_s) ** self.shape)) if x_s > 0 else 0.0

    def _mean(self) -> float:
        try:
            return self.scale_s * math.gamma(1 + 1 / self.shape)
        except OverflowError:
            return math.inf


class Pareto(Law, frozen=True, kw_only=True, tag="pareto"):
    """At least `minimum_s`, with a power tail; a mean exists for alpha above 1 only."""

    minimum_s: float
    alpha: float

    def _check(self) -> None:
        check_positive("minimum_s", self.minimum_s)
        check_positive("alpha", self.alpha)

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return self.minimum_s * exp(-log(1.0 - value) / self.alpha)

    def _cdf(self, x_s: float) -> float:
        return 1 - (self.minimum_s / x_s) ** self.alpha if x_s > self.minimum_s else 0.0

    def _mean(self) -> float:
        return math.inf if self.alpha <= 1 else self.minimum_s * self.alpha / (self.alpha - 1)
