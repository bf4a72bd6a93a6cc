"""Laws with a shape and a tail of their own: gamma, Erlang, Burr, bounded Pareto."""

from __future__ import annotations

import math

from gymfast._core import sim_exp as exp
from gymfast._core import sim_log as log
from gymfast_sim.checks import check_positive
from gymfast_sim.laws.base import Law
from gymfast_sim.laws.gamma_table import (
    MAX_SHAPE,
    MIN_SHAPE,
    NODES_PER_UNIT,
    REACH,
    gamma_table,
)

_MAX_ERLANG = 64
_MIN_INSIDE = 1e-6


class Gamma(Law, frozen=True, kw_only=True, tag="gamma"):
    """Between exponential (shape 1) and nearly constant (a large shape)."""

    mean_s: float
    shape: float

    def _check(self) -> None:
        check_positive("mean_s", self.mean_s)
        if not MIN_SHAPE <= self.shape <= MAX_SHAPE:
            raise ValueError(f"shape is {self.shape}, expected {MIN_SHAPE} to {MAX_SHAPE:g}")

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return self.mean_s / self.shape * standard_gamma(self.shape, value)

    def _cdf(self, x_s: float) -> float:
        return gamma_cdf(self.shape, x_s / (self.mean_s / self.shape))

    def _mean(self) -> float:
        return self.mean_s


class Erlang(Law, frozen=True, kw_only=True, tag="erlang"):
    """The sum of `shape` exponential parts: a gamma law whose shape is whole."""

    mean_s: float
    shape: int

    def _check(self) -> None:
        check_positive("mean_s", self.mean_s)
        if not 1 <= self.shape <= _MAX_ERLANG:
            raise ValueError(f"shape is {self.shape}, expected 1 to {_MAX_ERLANG}")

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return self.mean_s / self.shape * standard_gamma(float(self.shape), value)

    def _cdf(self, x_s: float) -> float:
        return gamma_cdf(float(self.shape), x_s / (self.mean_s / self.shape))

    def _mean(self) -> float:
        return self.mean_s


class Burr(Law, frozen=True, kw_only=True, tag="burr"):
    """Burr XII: P(X > x) = (1 + (x / scale_s)^shape)^-tail; a mean exists for shape * tail > 1."""

    scale_s: float
    shape: float
    tail: float

    def _check(self) -> None:
        for name in ("scale_s", "shape", "tail"):
            check_positive(name, getattr(self, name))

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        odds = exp(-log(1.0 - value) / self.tail) - 1.0
        return self.scale_s * exp(log(odds) / self.shape)

    def _cdf(self, x_s: float) -> float:
        if x_s <= 0:
            return 0.0
        power = self.shape * math.log(x_s / self.scale_s)
        odds = power if power > 700 else math.log1p(math.exp(power))
        return -math.expm1(-self.tail * odds)

    def _mean(self) -> float:
        if self.shape * self.tail <= 1:
            return math.inf
        logs = (
            math.lgamma(self.tail - 1 / self.shape)
            + math.lgamma(1 + 1 / self.shape)
            - math.lgamma(self.tail)
        )
        return self.scale_s * math.exp(logs) if logs < 700 else math.inf


class BoundedPareto(Law, frozen=True, kw_only=True, tag="bounded-pareto"):
    """A power law between two ends, without the mass at the upper end that `cap_s` would give."""

    minimum_s: float
    maximum_s: float
    alpha: float

    def _check(self) -> None:
        check_positive("minimum_s", self.minimum_s)
        check_positive("maximum_s", self.maximum_s)
        check_positive("alpha", self.alpha)
        if self.maximum_s <= self.minimum_s:
            raise ValueError(
                f"maximum_s is {self.maximum_s}, expected more than minimum_s, {self.minimum_s}"
            )
        if self.inside < _MIN_INSIDE:
            raise ValueError(
                f"alpha is {self.alpha}, so near 0 that the law is not one of powers: take uniform"
            )

    @property
    def inside(self) -> float:
        """The part of the unbounded law that lies below maximum_s."""
        return 1.0 - exp(self.alpha * (log(self.minimum_s) - log(self.maximum_s)))

    def _at(self, value: float, branch: float) -> float:  # noqa: ARG002
        return self.minimum_s * exp(-log(1.0 - value * self.inside) / self.alpha)

    def _cdf(self, x_s: float) -> float:
        if x_s <= self.minimum_s:
            return 0.0
        return min(float(1 - (self.minimum_s / x_s) ** self.alpha) / self.inside, 1.0)

    def _mean(self) -> float:
        low, ratio, a = self.minimum_s, self.maximum_s / self.minimum_s, self.alpha
        if abs(a - 1) < 1e-9:
            return low * math.log(ratio) / self.inside
        return low * a / (1 - a) * math.expm1((1 - a) * math.log(ratio)) / self.inside

    def _max(self) -> float:
        return self.maximum_s


def standard_gamma(shape: float, value: float) -> float:
    """The quantile of the gamma law of scale 1: a cubic between the nodes of its table."""
    nodes, slopes = gamma_table(shape)
    place = (log(value) - log(1.0 - value) + REACH) * NODES_PER_UNIT
    i = int(place)
    part = place - i
    first, last = slopes[i], slopes[i + 1]
    rise = nodes[i + 1] - nodes[i]
    square = 3.0 * rise - 2.0 * first - last
    cube = first + last - 2.0 * rise
    found: float = exp(nodes[i] + part * (first + part * (square + part * cube)))
    return found


def gamma_cdf(shape: float, x: float) -> float:
    """The probability of at most x under the gamma law of scale 1; for people, on libm."""
    if x <= 0:
        return 0.0
    head = shape * math.log(x) - x - math.lgamma(shape)
    if head < -740:
        return float(x > shape)
    if x < shape + 1:
        term = total = 1 / shape
        i = 0
        while term > total * 1e-17:
            i += 1
            term *= x / (shape + i)
            total += term
        return min(total * math.exp(head), 1.0)
    value = 0.0
    for i in range(100 + int(10 * math.sqrt(shape)), 0, -1):
        value = i * (shape - i) / (x + (2 * i + 1 - shape) + value)
    return max(1 - math.exp(head) / (x + 1 - shape + value), 0.0)
