"""Logarithm, exponential and normal quantile as sequences of IEEE 754 operations, on arrays.

This is the specification that docs/simulator.md section 4 explains. The engines use the scalar twin
in `gymfast._core` (csrc/sim/elementary.cpp), which has the same bits and is 100 times as fast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# ln 2 in two parts; the first has 32 bits, so that its products with exponents are exact.
LN2_HIGH = float.fromhex("0x1.62e42feep-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_INVERSE_LN2 = float.fromhex("0x1.71547652b82fep+0")
_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_TO_INTEGER = 1.5 * 2.0**52  # x + this - this rounds |x| < 2^51 half to even

_ARTANH = tuple(2.0 / (2 * k + 1) for k in range(10, 0, -1))
"""Of s^(2 k) in 2 artanh(s) / s - 2."""
_EXP = tuple(
    1.0 / factorial
    for factorial in (
        87178291200.0,
        6227020800.0,
        479001600.0,
        39916800.0,
        3628800.0,
        362880.0,
        40320.0,
        5040.0,
        720.0,
        120.0,
        24.0,
        6.0,
        2.0,
    )
)

# Coefficients of M. J. Wichura, Algorithm AS 241 (PPND16), Applied Statistics 37 (1988) 477-484,
# highest power first: numerator and denominator of the centre, the tail and the far tail.
_CENTRE = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_TAIL = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
_FAR_TAIL = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580e0,
        5.46378491116411436990e0,
        6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)


def log(x: Floats) -> Floats:
    """Natural logarithms; -inf at 0, NaN below."""
    x = np.asarray(x, np.float64)
    m, exponent = np.frexp(np.where((x > 0) & np.isfinite(x), x, 1.0))
    is_low = m < _SQRT_HALF
    m = np.where(is_low, m + m, m)
    k = (exponent - is_low).astype(np.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    rest = _polynomial(_ARTANH, z) * z
    half_square = 0.5 * f * f
    found = k * LN2_HIGH - ((half_square - (s * (half_square + rest) + k * LN2_LOW)) - f)
    found = np.where(x == 0, -np.inf, found)
    return np.where(x == np.inf, np.inf, np.where(np.isnan(x) | (x < 0), np.nan, found))


def exp(x: Floats) -> Floats:
    """Exponentials; inf above 709.79, 0 below -745.14."""
    x = np.asarray(x, np.float64)
    inside = np.where((x <= 710.0) & (x >= -746.0), x, 0.0)
    k = (inside * _INVERSE_LN2 + _TO_INTEGER) - _TO_INTEGER
    high = inside - k * LN2_HIGH
    low = k * LN2_LOW
    r = high - low
    value = 1.0 + (high - (low - r * r * _polynomial(_EXP, r)))
    exponent = k.astype(np.int64)
    half = np.trunc(k / 2.0).astype(np.int64)
    # In two steps, of which only the second can round: results below 2^-1022 have fewer bits.
    with np.errstate(over="ignore", under="ignore"):
        found = value * np.ldexp(1.0, half) * np.ldexp(1.0, exponent - half)
    found = np.where(x > 710.0, np.inf, np.where(x < -746.0, 0.0, found))
    return np.where(np.isnan(x), np.nan, found)


def normal_quantile(p: Floats) -> Floats:
    """Quantiles of the standard normal law; NaN unless 0 < p < 1."""
    p = np.asarray(p, np.float64)
    is_inside = (p > 0.0) & (p < 1.0)
    p = np.where(is_inside, p, 0.5)
    q = p - 0.5
    is_centre = np.abs(q) <= 0.425
    r = 0.180625 - q * q
    centre = q * _polynomial(_CENTRE[0], r) / _polynomial(_CENTRE[1], r)
    tail = np.where(is_centre, 0.5, np.where(q < 0.0, p, 1.0 - p))
    root = np.sqrt(-log(tail))
    near, far = (
        _polynomial(above, root - shift) / _polynomial(below, root - shift)
        for (above, below), shift in ((_TAIL, 1.6), (_FAR_TAIL, 5.0))
    )
    value = np.where(root <= 5.0, near, far)
    found = np.where(is_centre, centre, np.where(q < 0.0, -value, value))
    return np.where(is_inside, found, np.nan)


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
