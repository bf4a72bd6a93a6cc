"""The specified log, exp and normal quantile: error bounds, and the same bits in C++."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from gymfast import _core
from gymfast_sim import elementary

Floats = NDArray[np.float64]

EDGES = np.array(
    [
        *(
            0.0,
            -0.0,
            5e-324,
            2.0**-1074 * 3,
            2.0**-1022,
            np.nextafter(2.0**-1022, 0),
            2.0**-53,
            0.5,
        ),
        *(
            math.sqrt(0.5),
            np.nextafter(math.sqrt(0.5), 0),
            1.0,
            np.nextafter(1, 0),
            np.nextafter(1, 2),
        ),
        *(
            2.0,
            math.e,
            1.7976931348623157e308,
            np.inf,
            -np.inf,
            np.nan,
            -1.0,
            -5e-324,
            1e300,
            -1e300,
        ),
        *(
            709.782712893384,
            709.7827128933841,
            710.0,
            710.5,
            -708.5,
            -745.13321910194,
            -745.2,
            -746.5,
        ),
        *(0.075, 0.925, np.nextafter(0.075, 0), np.nextafter(0.925, 1), 1 - 2.0**-53),
    ]
)
PAIRS: dict[str, tuple[Callable[[Floats], Floats], Callable[[Floats, Floats], None]]] = {
    "log": (elementary.log, _core.sim_log_each),
    "exp": (elementary.exp, _core.sim_exp_each),
    "normal_quantile": (elementary.normal_quantile, _core.sim_normal_quantile_each),
}


def _inputs(name: str, count: int) -> Floats:
    rng = np.random.default_rng(7)
    if name == "log":
        # All exponents, the neighbourhood of 1, and the numbers that laws ask for.
        anywhere = rng.integers(1, 0x7FEFFFFFFFFFFFFF, count // 3).view(np.float64)
        return np.concatenate([anywhere, rng.uniform(0.5, 2, count // 3), rng.random(count // 3)])
    if name == "exp":
        return np.concatenate([rng.uniform(-750, 712, count // 2), rng.normal(size=count // 2)])
    middle = (rng.integers(0, 2**52, count // 2) + 0.5) * 2.0**-52
    return np.concatenate([middle, np.exp(rng.uniform(-740, -0.01, count // 2))])


def _bits(numbers: Floats) -> NDArray[np.uint64]:
    return numbers.view(np.uint64)


@pytest.mark.parametrize("name", PAIRS)
def test_python_and_cpp_have_the_same_bits_on_a_million_numbers(name: str) -> None:
    reference, each = PAIRS[name]
    x = np.concatenate([EDGES, _inputs(name, 1_200_000)])
    assert x.size > 10**6
    found = np.empty_like(x)
    each(x, found)
    expected = reference(x)
    assert np.array_equal(np.isnan(expected), np.isnan(found))
    real = ~np.isnan(expected)
    assert np.array_equal(_bits(expected[real]), _bits(found[real]))


@pytest.mark.parametrize("name", PAIRS)
def test_one_number_is_as_in_an_array(name: str) -> None:
    x = np.concatenate([EDGES, _inputs(name, 300)])
    found = np.empty_like(x)
    PAIRS[name][1](x, found)
    one = np.array([getattr(_core, f"sim_{name}")(float(v)) for v in x])
    assert np.array_equal(found, one, equal_nan=True)


def _exact(name: str, x: float) -> mpmath.mpf:
    if name != "normal_quantile":
        return getattr(mpmath, name)(mpmath.mpf(x))
    # Newton on the logarithm of the tail, from the answer under test: converges quadratically.
    p = min(mpmath.mpf(x), 1 - mpmath.mpf(x))
    z = mpmath.mpf(-abs(float(elementary.normal_quantile(np.array([x]))[0])))
    for _ in range(3):
        tail = mpmath.erfc(-z / mpmath.sqrt(2)) / 2
        density = mpmath.exp(-z * z / 2) / mpmath.sqrt(2 * mpmath.pi)
        z -= (mpmath.log(tail) - mpmath.log(p)) * tail / density
    return z if x < 0.5 else -z


# docs/simulator.md section 4 states these bounds, in units in the last place.
@pytest.mark.parametrize(("name", "bound_ulp"), [("log", 1), ("exp", 1), ("normal_quantile", 8)])
def test_error_is_below_the_stated_bound(name: str, bound_ulp: float) -> None:
    x = _inputs(name, 3_000 if name != "normal_quantile" else 600)
    y = PAIRS[name][0](x)
    worst = 0.0
    with mpmath.workprec(160):
        for at, value in zip(x.tolist(), y.tolist(), strict=True):
            if math.isinf(value) or (name == "exp" and abs(value) < 2.0**-1022) or value == 0:
                continue
            worst = max(worst, abs(float((_exact(name, at) - value) / mpmath.mpf(math.ulp(value)))))
    assert worst <= bound_ulp


def test_small_exponentials_are_rounded_once() -> None:
    x = np.linspace(-745.1, -708.4, 2_000)
    y = elementary.exp(x)
    assert max(abs(float(mpmath.exp(a)) - b) for a, b in zip(x, y, strict=True)) <= 5e-324


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        *[("log", 0.0, -math.inf), ("log", -1.0, math.nan), ("log", math.inf, math.inf)],
        *[("log", 1.0, 0.0), ("exp", 0.0, 1.0), ("exp", 800.0, math.inf), ("exp", -800.0, 0.0)],
        *[("exp", math.nan, math.nan), ("normal_quantile", 0.5, 0.0)],
        *[("normal_quantile", 0.0, math.nan), ("normal_quantile", 1.0, math.nan)],
    ],
)
def test_edges_have_stated_values(name: str, x: float, expected: float) -> None:
    found = getattr(_core, f"sim_{name}")(x)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_the_quantile_is_odd() -> None:
    k = np.random.default_rng(1).integers(0, 2**51, 10_000)
    p = (k + 0.5) * 2.0**-52
    assert np.array_equal(elementary.normal_quantile(p), -elementary.normal_quantile(1.0 - p))
