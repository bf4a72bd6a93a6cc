"""One of every law of the simulator, and some with a cap."""

from __future__ import annotations

from gymfast_sim.laws import (
    BoundedPareto,
    Burr,
    Component,
    Constant,
    Crowded,
    Empirical,
    Erlang,
    Exponential,
    Gamma,
    Law,
    Lognormal,
    Mixture,
    Pareto,
    QuantileGrid,
    Uniform,
    Weibull,
)

MIXTURE = Mixture(
    components=(
        Component(weight=0.75, of=Lognormal(median_s=2.0, sigma=0.2)),
        Component(weight=0.25, of=Weibull(scale_s=6.0, shape=0.7, cap_s=60.0)),
    )
)
LAWS: list[Law] = [
    Constant(value_s=3.0),
    Uniform(low_s=1.0, high_s=4.0),
    Exponential(mean_s=2.0),
    Exponential(mean_s=2.0, cap_s=3.0),
    Erlang(mean_s=2.0, shape=1),
    Erlang(mean_s=2.0, shape=7),
    Lognormal(median_s=2.0, sigma=1.0),
    Lognormal(median_s=2.0, sigma=0.5, shift_s=1.5),
    Lognormal(median_s=2.0, sigma=1.0, cap_s=10.0),
    Weibull(scale_s=2.0, shape=0.7),
    Weibull(scale_s=2.0, shape=3.0),
    Pareto(minimum_s=1.0, alpha=2.5),
    Pareto(minimum_s=1.0, alpha=0.9, cap_s=100.0),
    Erlang(mean_s=2.0, shape=64),
    Gamma(mean_s=2.0, shape=0.3),
    Gamma(mean_s=2.0, shape=2.5),
    Gamma(mean_s=2.0, shape=300.0, cap_s=2.1),
    Burr(scale_s=2.0, shape=5.0, tail=0.6),
    Burr(scale_s=2.0, shape=0.5, tail=1.5, cap_s=50.0),
    BoundedPareto(minimum_s=1.0, maximum_s=50.0, alpha=0.8),
    BoundedPareto(minimum_s=1.0, maximum_s=50.0, alpha=1.0),
    Empirical(values_s=(1.0, 2.0, 2.0, 7.0)),
    QuantileGrid(probabilities=(0.1, 0.5, 0.9), values_s=(1.0, 2.0, 4.0)),
    MIXTURE,
    Crowded(base=MIXTURE, counts=(1, 10, 100), factors=(1.5, 2.0, 4.0)),
]
IDS = [f"{i}-{type(law).__name__}" for i, law in enumerate(LAWS)]
