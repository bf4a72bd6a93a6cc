"""Laws of durations, in seconds; each draws by inversion, so that all engines agree to the bit.

`at(value, branch)` is what the engines call; its order of operations is normative
(docs/simulator.md section 5). `cdf`, `quantile` and `expected_s` are for people and for theory.
"""

from __future__ import annotations

from gymfast_sim.laws.base import Law
from gymfast_sim.laws.composite import Component, Crowded, Mixture, SimpleLaw
from gymfast_sim.laws.measured import Empirical, QuantileGrid
from gymfast_sim.laws.program import program
from gymfast_sim.laws.shaped import BoundedPareto, Burr, Erlang, Gamma
from gymfast_sim.laws.simple import (
    Constant,
    Exponential,
    Lognormal,
    Pareto,
    Uniform,
    Weibull,
)

__all__ = [
    "MAX_NS",
    "NONE",
    "AnyLaw",
    "BoundedPareto",
    "Burr",
    "Component",
    "Constant",
    "Crowded",
    "Empirical",
    "Erlang",
    "Exponential",
    "Gamma",
    "Law",
    "Lognormal",
    "Mixture",
    "Pareto",
    "PlainLaw",
    "QuantileGrid",
    "SimpleLaw",
    "Uniform",
    "Weibull",
    "duration_ns",
    "program",
    "to_ns",
]

MAX_NS = 10**18
"""Longer durations, 31 years, are cut to this."""

PlainLaw = SimpleLaw | Mixture
"""For times that do not depend on how many sandboxes are starting."""
AnyLaw = PlainLaw | Crowded
"""For phases of a start."""


def duration_ns(law: Law, draw: tuple[float, float], num_starting: int = 1) -> int:
    """What a law gives for two numbers in (0, 1), in whole nanoseconds, half to even."""
    seconds = law.crowded_at(*draw, num_starting) if isinstance(law, Crowded) else law.at(*draw)
    return to_ns(seconds)


def to_ns(seconds: float) -> int:
    """Seconds as whole nanoseconds, half to even; at most MAX_NS."""
    scaled = seconds * 1e9
    return round(scaled) if scaled < MAX_NS else MAX_NS


NONE = Constant(value_s=0.0)
"""A phase that takes no time."""
