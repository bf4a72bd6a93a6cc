"""A law as a list of numbers, which a native engine reads (csrc/sim/laws.h)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gymfast_sim.laws.base import Law
from gymfast_sim.laws.composite import Crowded, Mixture
from gymfast_sim.laws.gamma_table import gamma_table
from gymfast_sim.laws.measured import Empirical, QuantileGrid
from gymfast_sim.laws.shaped import BoundedPareto, Burr, Erlang, Gamma
from gymfast_sim.laws.simple import Constant, Exponential, Lognormal, Pareto, Uniform, Weibull


def program(law: Law) -> NDArray[np.float64]:
    """Kind, cap (inf for none), number of settings, settings, number of parts, parts."""
    return np.array(_numbers(law), np.float64)


def _numbers(law: Law) -> list[float]:
    kind, settings, parts = _of(law)
    cap_s = math.inf if law.cap_s is None else law.cap_s
    inner = [number for part in parts for number in _numbers(part)]
    return [kind, cap_s, len(settings), *settings, len(parts), *inner]


def _of(law: Law) -> tuple[int, tuple[float, ...], tuple[Law, ...]]:  # noqa: C901
    match law:
        case Constant():
            return 0, (law.value_s,), ()
        case Uniform():
            return 1, (law.low_s, law.high_s), ()
        case Exponential():
            return 2, (law.mean_s,), ()
        case Gamma() | Erlang():
            nodes, slopes = gamma_table(float(law.shape))
            return 3, (law.mean_s / law.shape, *nodes, *slopes), ()
        case Lognormal():
            return 4, (law.median_s, law.sigma, law.shift_s), ()
        case Weibull():
            return 5, (law.scale_s, law.shape), ()
        case Pareto():
            return 6, (law.minimum_s, law.alpha), ()
        case Empirical():
            return 7, law.values_s, ()
        case QuantileGrid():
            return 8, (*law.probabilities, *law.values_s), ()
        case Burr():
            return 9, (law.scale_s, law.shape, law.tail), ()
        case BoundedPareto():
            return 10, (law.minimum_s, law.alpha, law.inside), ()
        case Mixture():
            weights = tuple(component.weight for component in law.components)
            return 11, weights, tuple(component.of for component in law.components)
        case Crowded():
            return 12, (*law.counts, *law.factors), (law.base,)
    raise TypeError(f"{type(law).__name__} is no law that a native engine knows")
