"""Laws in C++: the same bits as in Python, and errors of the gamma table as documented."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from sim_laws import IDS, LAWS

from gymfast import _core
from gymfast_sim.draws import Draws
from gymfast_sim.laws import Crowded, Gamma, Law, program, to_ns
from gymfast_sim.laws.gamma_table import REACH, log_gamma, log_tails
from gymfast_sim.laws.shaped import standard_gamma

ENDS = [2.0**-53, 3 * 2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53, 1 - 3 * 2.0**-53, 1 - 2.0**-53]


def _compare(law: Law, num_draws: int) -> None:
    draws = Draws(21)
    places = [draws(i, 0, 16) for i in range(num_draws)]
    places += list(itertools.product(ENDS, ENDS))
    counts = np.arange(len(places), dtype=np.int64) % 130 + 1
    found = np.empty(len(places))
    values, branches = (np.ascontiguousarray(column) for column in np.array(places).T)
    _core.sim_law_each(program(law), values, branches, counts, found)
    if isinstance(law, Crowded):
        pairs = zip(places, counts.tolist(), strict=True)
        expected = np.array([law.crowded_at(*place, count) for place, count in pairs])
    else:
        expected = np.array([law.at(*place) for place in places])
    assert np.isfinite(found).all() and (found >= 0).all()
    assert np.array_equal(found.view(np.uint64), expected.view(np.uint64))


@pytest.mark.parametrize("law", LAWS, ids=IDS)
def test_python_and_cpp_draw_the_same_bits(law: Law) -> None:
    _compare(law, 3_000)


@pytest.mark.ci
@pytest.mark.parametrize("law", LAWS, ids=IDS)
def test_python_and_cpp_draw_the_same_bits_120_000_times(law: Law) -> None:
    _compare(law, 120_000)


def test_nanoseconds_are_the_same_in_cpp() -> None:
    seconds = [0.0, 0.5e-9, 1.5e-9, 2.5e-9, 1e9, 1e300, math.inf]
    seconds += [Draws(3)(i, 0, 0)[0] * 10.0 ** (i % 12) for i in range(3_000)]
    assert [_core.sim_to_ns(x) for x in seconds if x < math.inf] == [
        to_ns(x) for x in seconds if x < math.inf
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "no program"),
        ([0.0, math.inf, 1.0], "no program"),
        ([0.0, math.inf, 2.0, 1.0, 1.0, 0.0], "no program"),
        ([13.0, math.inf, 1.0, 1.0, 0.0], "no program"),
        ([math.nan, math.inf, 1.0, 1.0, 0.0], "no program"),
        ([0.0, math.inf, 1e9, 1.0, 0.0], "no program"),
        ([0.0, math.inf, 1.0, 1.0, 0.0, 7.0], "no program"),
        ([11.0, math.inf, 1.0, 1.0, 1.0] * 9, "no program"),
    ],
)
def test_a_program_that_is_none_is_refused(numbers: list[float], text: str) -> None:
    one = np.array([0.5])
    with pytest.raises(ValueError, match=text):
        _core.sim_law_each(np.array(numbers), one, one, np.array([1]), np.empty(1))


@pytest.mark.parametrize("place", [0.0, 1.0, math.nan, -1.0])
def test_a_place_outside_of_a_law_is_refused(place: float) -> None:
    one, law = np.array([place]), program(Gamma(mean_s=1.0, shape=2.0))
    with pytest.raises(ValueError, match="between 0 and 1"):
        _core.sim_law_each(law, one, one, np.array([1]), np.empty(1))


# docs/simulator.md section 5 states the bounds.
@pytest.mark.parametrize(
    ("shape", "bound"), [(0.05, 1e-8), (0.4, 1e-8), (1.0, 2e-10), (64.0, 2e-10)]
)
def test_the_gamma_table_is_as_near_as_documented(shape: float, bound: float) -> None:
    rng = np.random.default_rng(4)
    logits = rng.uniform(-REACH + 0.5, REACH - 0.5, 60)
    with mpmath.workprec(160):
        for logit in logits.tolist():
            u = 1 / (1 + math.exp(-logit)) if logit < 0 else 1 - 1 / (1 + math.exp(logit))
            if not 0 < u < 1:
                continue
            x = mpmath.mpf(standard_gamma(shape, u))
            below = mpmath.gammainc(shape, 0, x, regularized=True)
            above = mpmath.gammainc(shape, x, mpmath.inf, regularized=True)
            density = mpmath.exp(shape * mpmath.log(x) - x - mpmath.loggamma(shape))
            miss = mpmath.log(below / above) - mpmath.log(mpmath.mpf(u) / (1 - mpmath.mpf(u)))
            assert abs(miss * below * above / density) < bound


@pytest.mark.parametrize("x", [0.05, 0.5, 1.0, 2.0, 15.9, 16.0, 64.0, 1000.0])
def test_log_gamma_is_that_of_mpmath(x: float) -> None:
    assert log_gamma(x) == pytest.approx(float(mpmath.loggamma(x)), rel=1e-14, abs=5e-15)


@pytest.mark.parametrize("shape", [0.05, 1.0, 7.5, 1000.0])
def test_the_tails_of_the_gamma_law_are_those_of_mpmath(shape: float) -> None:
    for ratio in (1e-6, 0.3, 0.99, 1.0, 1.1, 3.0):
        x = ratio * (shape + 1)
        below, above = log_tails(shape, np.array([math.log(x)]))
        for found, exact in (
            (below[0], mpmath.log(mpmath.gammainc(shape, 0, x, regularized=True))),
            (above[0], mpmath.log(mpmath.gammainc(shape, x, mpmath.inf, regularized=True))),
        ):
            assert found == pytest.approx(float(exact), rel=1e-10, abs=1e-12 * max(shape, 1))
