"""Laws of durations: samples against their own distribution, bits, dictionaries, bad settings."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from sim_laws import IDS, LAWS, MIXTURE

from gymfast_sim import elementary
from gymfast_sim.draws import Draws
from gymfast_sim.laws import (
    MAX_NS,
    AnyLaw,
    Component,
    Constant,
    Crowded,
    Exponential,
    Law,
    Lognormal,
    Mixture,
    Pareto,
    Uniform,
    Weibull,
    duration_ns,
    to_ns,
)
from gymfast_sim.reading import ScenarioError, from_dict, from_toml, to_dict, to_toml

SAMPLES = 20_000


@pytest.fixture(scope="module")
def places() -> list[tuple[float, float]]:
    draws = Draws(5)
    return [draws(i, 0, 0) for i in range(SAMPLES)]


@pytest.mark.parametrize("law", LAWS, ids=IDS)
def test_samples_follow_the_law(law: Law, places: list[tuple[float, float]]) -> None:
    """Kolmogorov-Smirnov at 0.1 %, and the mean within 3.5 standard errors."""
    found = np.sort([law.at(*place) for place in places])
    values, last = np.unique(found, return_index=False, return_counts=True)
    above = np.cumsum(last) / SAMPLES
    exact = np.array([law.cdf(float(x)) for x in values])
    assert np.abs(above - exact).max() < 1.95 / math.sqrt(SAMPLES)
    error = found.std(ddof=1) / math.sqrt(SAMPLES)
    assert abs(found.mean() - law.expected_s) <= 3.5 * error + 1e-12
    assert found[-1] <= law.max_s


@pytest.mark.parametrize("law", LAWS, ids=IDS)
def test_a_quantile_is_where_the_distribution_says(law: Law) -> None:
    for p in (0.001, 0.05, 0.3, 0.55, 0.8, 0.97, 0.9999):
        x = law.quantile(p)
        assert law.cdf(x) >= p - 1e-9
        assert law.cdf(x * (1 - 1e-9) - 1e-12) <= p + 1e-8


@pytest.mark.parametrize("law", LAWS, ids=IDS)
def test_toml_and_dictionaries_give_the_same_law(law: Law) -> None:
    class Holder(msgspec.Struct, frozen=True):
        law: AnyLaw

    assert from_toml(to_toml(Holder(law)), Holder) == Holder(law)  # type: ignore[arg-type]
    assert from_dict(to_dict(Holder(law)), Holder) == Holder(law)  # type: ignore[arg-type]


def test_durations_are_sequences_of_ieee_operations() -> None:
    """The formulas of docs/simulator.md section 5, from the arrays of the specification."""
    draws = Draws(9)
    places = [draws(i, 1, 2) for i in range(2_000)]
    u = np.array([place[0] for place in places])
    above = 1.0 - u
    expected = {
        Exponential(mean_s=2.0): -2.0 * elementary.log(above),
        Lognormal(median_s=2.0, sigma=0.7, shift_s=0.25): 0.25
        + 2.0 * elementary.exp(0.7 * elementary.normal_quantile(u)),
        Weibull(scale_s=3.0, shape=0.7): 3.0
        * elementary.exp(elementary.log(-elementary.log(above)) / 0.7),
        Pareto(minimum_s=1.5, alpha=2.5): 1.5 * elementary.exp(-elementary.log(above) / 2.5),
        Uniform(low_s=1.0, high_s=4.0): 1.0 + u * 3.0,
    }
    for law, seconds in expected.items():
        assert [law.at(*place) for place in places] == seconds.tolist()
        nanoseconds = np.rint(seconds * 1e9).astype(np.int64)
        assert [duration_ns(law, place) for place in places] == nanoseconds.tolist()


def test_nanoseconds_are_rounded_half_to_even_and_end_after_31_years() -> None:
    assert [to_ns(x * 1e-9) for x in (0.5, 1.5, 2.5, 0.49)] == [0, 2, 2, 0]
    assert to_ns(1e300) == to_ns(1e9) == MAX_NS


def test_a_mixture_is_chosen_by_the_second_number_alone() -> None:
    law = Mixture(
        components=(
            Component(weight=0.25, of=Constant(value_s=1.0)),
            Component(weight=0.75, of=Constant(value_s=2.0)),
        )
    )
    assert [law.at(0.5, v) for v in (0.0001, 0.2499, 0.25, 0.9999)] == [1.0, 1.0, 2.0, 2.0]


def test_a_crowded_start_depends_on_how_many_are_starting() -> None:
    law = Crowded(base=Constant(value_s=2.0), counts=(1, 101), factors=(1.0, 3.0))
    assert [duration_ns(law, (0.5, 0.5), n) for n in (1, 51, 101, 900)] == [
        *(2 * 10**9, 4 * 10**9, 6 * 10**9, 6 * 10**9)
    ]


BAD = [
    ({"law": "constant", "value_s": -1}, "value_s is -1.0, expected 0 or more"),
    ({"law": "constant", "value_s": math.nan}, "value_s is nan"),
    ({"law": "uniform", "low_s": 2, "high_s": 1}, "high_s is 1.0, expected more than low_s, 2.0"),
    ({"law": "exponential", "mean_s": 0}, "mean_s is 0.0, expected a number above 0"),
    ({"law": "exponential", "mean_s": math.inf}, "mean_s is inf"),
    ({"law": "erlang", "mean_s": 1, "shape": 0}, "shape is 0, expected 1 to 64"),
    ({"law": "gamma", "mean_s": 1, "shape": 0.01}, "shape is 0.01, expected 0.05 to 1000"),
    ({"law": "gamma", "mean_s": 1, "shape": math.nan}, "shape is nan"),
    ({"law": "gamma", "mean_s": -1, "shape": 2}, "mean_s is -1.0"),
    ({"law": "burr", "scale_s": 1, "shape": 2, "tail": 0.5}, "has no mean.*give cap_s"),
    ({"law": "burr", "scale_s": 1, "shape": 2, "tail": -1}, "tail is -1.0"),
    ({"law": "bounded-pareto", "minimum_s": 2, "maximum_s": 1, "alpha": 1}, "maximum_s is 1.0"),
    ({"law": "bounded-pareto", "minimum_s": 1, "maximum_s": 2, "alpha": 1e-9}, "take uniform"),
    ({"law": "lognormal", "median_s": 1, "sigma": -1}, "sigma is -1.0"),
    ({"law": "weibull", "scale_s": 1, "shape": 0}, "shape is 0.0"),
    ({"law": "weibull", "scale_s": 1, "shape": 1e-4}, "has no mean"),
    ({"law": "pareto", "minimum_s": 1, "alpha": 1}, "has no mean.*give cap_s"),
    ({"law": "pareto", "minimum_s": 1, "alpha": 0.5, "cap_s": 0}, "cap_s is 0.0"),
    ({"law": "empirical", "values_s": []}, "values_s is empty"),
    ({"law": "empirical", "values_s": [2, 1]}, "has to ascend"),
    ({"law": "empirical", "values_s": [1, math.nan]}, "a number of values_s is nan"),
    ({"law": "quantiles", "probabilities": [0.5], "values_s": [1]}, "at least 2"),
    ({"law": "quantiles", "probabilities": [0.5, 0.4], "values_s": [1, 2]}, "ascend strictly"),
    ({"law": "quantiles", "probabilities": [0.5, 1.4], "values_s": [1, 2]}, "at most 1"),
    ({"law": "quantiles", "probabilities": [0.5, 0.6], "values_s": [2, 1]}, "values_s has to"),
    ({"law": "mixture", "components": [{"weight": 0.9, "of": {"law": "constant", "value_s": 1}}]},
     "weights sum to 0.9, expected 1"),
    ({"law": "mixture", "components": []}, "components is empty"),
    ({"law": "crowded", "base": {"law": "constant", "value_s": 1}, "counts": [0], "factors": [1]},
     "counts have to ascend"),
    ({"law": "lognormal", "median_s": 1, "sigmma": 1}, "key 'sigmma' is not known.*'sigma'"),
    ({"law": "lognormall"}, "'lognormall' is not known, did you mean 'lognormal'"),
    ({"law": "constant", "value_s": "1"}, "value_s: Expected `float`, got `str`"),
    ({"law": "constant"}, "missing required field `value_s`"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "text"), BAD)
def test_a_bad_law_is_refused_with_what_was_found(data: dict[str, object], text: str) -> None:
    class Holder(msgspec.Struct, frozen=True):
        law: AnyLaw

    with pytest.raises(ScenarioError, match=text) as refusal:
        from_dict({"law": data}, Holder)
    assert str(refusal.value).startswith("law")


def test_a_quantile_of_0_or_1_is_refused() -> None:
    for p in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            MIXTURE.quantile(p)
        with pytest.raises(ValueError, match="between 0 and 1"):
            LAWS[2].quantile(p)
