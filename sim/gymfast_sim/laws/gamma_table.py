"""Quantiles of the gamma law as a table, so that a draw costs two logarithms and a cubic.

The table is part of the law: it is a specified sequence of operations (docs/simulator.md section
5) on `elementary`, made once for each shape, and an engine in another language is handed it.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from gymfast_sim import elementary
from gymfast_sim.elementary import Floats

NODES_PER_UNIT = 32
"""Nodes of the table for each unit of log(u / (1 - u))."""
REACH = 37
"""The table goes from -REACH to REACH: log(2^53) is 36.7."""
NUM_NODES = 2 * REACH * NODES_PER_UNIT + 1

MIN_SHAPE = 0.05
MAX_SHAPE = 1000.0

# Terms of Stirling's series for log gamma: B_2k / (2 k (2 k - 1)), the highest first.
_STIRLING = (
    1.0 / 156.0,
    -691.0 / 360360.0,
    1.0 / 1188.0,
    -1.0 / 1680.0,
    1.0 / 1260.0,
    -1.0 / 360.0,
    1.0 / 12.0,
)
_HALF_LOG_2PI = float.fromhex("0x1.d67f1c864beb5p-1")
_NUM_STEPS = 16


@functools.lru_cache(maxsize=256)
def gamma_table(shape: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Log x at the nodes, for the gamma law of this shape and scale 1, and its slopes."""
    nodes = (np.arange(NUM_NODES, dtype=np.float64) - REACH * NODES_PER_UNIT) / NODES_PER_UNIT
    y = _solve(shape, nodes)
    _, slope = _logit(shape, y)
    return tuple(y.tolist()), tuple((1.0 / (slope * NODES_PER_UNIT)).tolist())


def log_gamma(x: float) -> float:
    """Log Gamma(x) for x above 0: Stirling's series after a shift to 16 or more."""
    product = 1.0
    while x < 16.0:
        product = product * x
        x = x + 1.0
    inverse = 1.0 / (x * x)
    total = _STIRLING[0]
    for coefficient in _STIRLING[1:]:
        total = total * inverse + coefficient
    logs = elementary.log(np.array([x, product]))
    return float((x - 0.5) * logs[0] - x + _HALF_LOG_2PI + total / x - logs[1])


def log_tails(shape: float, y: Floats) -> tuple[Floats, Floats]:
    """Log P(X <= x) and log P(X > x) at x = exp(y), for scale 1."""
    x = elementary.exp(y)
    is_low = x < shape + 1.0
    head = shape * y - x
    below = _series(shape, np.where(is_low, x, shape))
    low = elementary.log(below) + (head - log_gamma(shape + 1.0))
    above = _fraction(shape, np.where(is_low, shape + 2.0, x))
    high = elementary.log(above) + (head - log_gamma(shape))
    one = np.where(is_low, low, high)
    other = _log_of_rest(one)
    return np.where(is_low, one, other), np.where(is_low, other, one)


def _solve(shape: float, nodes: Floats) -> Floats:
    """Log x at which the logit of the probability is that of each node.

    The logit is convex in log x, so Newton's steps from above stay above.
    """
    highest = elementary.log(np.array([shape + 60.0 + 12.0 * math.sqrt(shape)]))[0]
    y = np.full(nodes.shape, highest)
    for _ in range(_NUM_STEPS):
        logit, slope = _logit(shape, y)
        y = np.minimum(y + (nodes - logit) / slope, highest)
    return y


def _logit(shape: float, y: Floats) -> tuple[Floats, Floats]:
    """log(P / Q) at x = exp(y), and its slope in y."""
    below, above = log_tails(shape, y)
    density = shape * y - elementary.exp(y) - log_gamma(shape)
    return below - above, elementary.exp(density - below - above)


def _series(shape: float, x: Floats) -> Floats:
    """1 + x / (a + 1) + x^2 / ((a + 1)(a + 2)) + ...; P = x^a exp(-x) / Gamma(a + 1) times it."""
    term = np.ones_like(x)
    total = np.ones_like(x)
    for i in range(1, 40 + _more_terms(shape)):
        term = term * x / (shape + i)
        total = total + term
    return total


def _fraction(shape: float, x: Floats) -> Floats:
    """The continued fraction of Q / (x^a exp(-x) / Gamma(a)), from its end to its beginning."""
    value = np.zeros_like(x)
    for i in range(100 + _more_terms(shape), 0, -1):
        value = i * (shape - i) / (x + (2 * i + 1 - shape) + value)
    return 1.0 / (x + 1.0 - shape + value)


def _more_terms(shape: float) -> int:
    return int(10.0 * math.sqrt(shape))


def _log_of_rest(log_part: Floats) -> Floats:
    """log(1 - exp(l)), without loss where exp(l) is small."""
    part = elementary.exp(np.minimum(log_part, -(2.0**-53)))
    rest = 1.0 - part
    # log(1 - p) as log(r) p / (1 - r) for r = 1 - p rounded: the error of r cancels.
    with np.errstate(invalid="ignore", divide="ignore"):
        found = elementary.log(rest) * (part / (1.0 - rest))
    return np.where(rest == 1.0, -part, found)
