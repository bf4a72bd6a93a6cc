"""Mixtures of lognormal laws by expectation and maximisation, with times that were cut.

Source: Dempster, Laird and Rubin, "Maximum likelihood from incomplete data via the EM algorithm",
1977. Starts are fixed parts of the sorted times, so the same log gives the same fit.
"""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np

from gymfast_sim.elementary import Floats
from gymfast_sim.laws import Component, Lognormal, Mixture

_STARTS: dict[int, tuple[tuple[float, ...], ...]] = {
    1: ((),),
    2: ((0.5,), (0.8,), (0.95,), (0.99,)),
    3: ((0.33, 0.67), (0.5, 0.95), (0.85, 0.97), (0.95, 0.98), (0.5, 0.985)),
    4: ((0.25, 0.5, 0.75), (0.5, 0.9, 0.98), (0.85, 0.95, 0.99)),
}
MAX_COMPONENTS = len(_STARTS)
_SHORT, _LONG = 400, 3000
_MIN_SIGMA = 5e-3
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Normals(msgspec.Struct, frozen=True):
    """A mixture of normal laws of the logarithm; arrays of one number a component."""

    weight: Floats
    mean: Floats
    sigma: Floats


def fit_normals(
    seen: Floats, cut: Floats, num: int, start: Normals | None = None
) -> tuple[Normals, float]:
    """The mixture of `num` components, and the log-likelihood of the times themselves.

    With a start, only from there: for a resample of a log whose fit is known. Raises ValueError for
    fewer than 3 times a setting.
    """
    if seen.size < 3 * (3 * num - 1):
        raise ValueError(f"{seen.size} times are too few for {num} components")
    y, c = np.log(seen), np.log(cut)
    if start is None:
        tried = [_climb(y, c, _split(y, parts), _SHORT) for parts in _STARTS[num]]
        start = max(tried, key=lambda pair: pair[1])[0]
    found, height = _climb(y, c, start, _LONG)
    order = np.argsort(-found.weight, kind="stable")
    ordered = Normals(found.weight[order], found.mean[order], found.sigma[order])
    return ordered, height - float(y.sum())


def law_of(found: Normals) -> Lognormal | Mixture:
    """The law of a scenario; weights have 6 digits and sum to 1."""
    laws = [
        Lognormal(median_s=math.exp(mean), sigma=float(sigma))
        for mean, sigma in zip(found.mean, found.sigma, strict=True)
    ]
    if len(laws) == 1:
        return laws[0]
    weights = [round(float(weight), 6) for weight in found.weight]
    weights[0] = round(1 - math.fsum(weights[1:]), 6)
    pairs = zip(weights, laws, strict=True)
    return Mixture(components=tuple(Component(weight=w, of=law) for w, law in pairs if w > 0))


def _split(y: Floats, parts: tuple[float, ...]) -> Normals:
    ordered = np.sort(y)
    ends = [0, *(int(part * y.size) for part in parts), y.size]
    groups = [ordered[a : max(b, a + 1)] for a, b in itertools.pairwise(ends)]
    return Normals(
        np.array([group.size / y.size for group in groups]),
        np.array([group.mean() for group in groups]),
        np.array([max(group.std(), 0.05) for group in groups]),
    )


def _climb(y: Floats, c: Floats, at: Normals, num_rounds: int) -> tuple[Normals, float]:
    height = -math.inf
    for _ in range(num_rounds):
        at, new = _round(y, c, at)
        if new - height < 1e-9 * y.size:
            return at, new
        height = new
    return at, height


def _round(y: Floats, c: Floats, at: Normals) -> tuple[Normals, float]:
    """One step; the log-likelihood is that of what came in."""
    z = (y - at.mean[:, None]) / at.sigma[:, None]
    logs = np.log(at.weight / at.sigma)[:, None] - 0.5 * z * z - _HALF_LOG_2PI
    share, height = _shares(logs)
    totals = share.sum(axis=1)
    firsts, seconds = share @ y, share @ (y * y)
    if c.size:
        a = (c - at.mean[:, None]) / at.sigma[:, None]
        log_above, hazard = _above(a)
        cut_share, more = _shares(np.log(at.weight)[:, None] + log_above)
        height += more
        mean, sigma = at.mean[:, None], at.sigma[:, None]
        first = mean + sigma * hazard
        second = mean * mean + 2 * mean * sigma * hazard + sigma * sigma * (1 + a * hazard)
        totals = totals + cut_share.sum(axis=1)
        firsts = firsts + (cut_share * first).sum(axis=1)
        seconds = seconds + (cut_share * second).sum(axis=1)
    totals = np.maximum(totals, 1e-9)
    mean = firsts / totals
    sigma = np.sqrt(np.maximum(seconds / totals - mean * mean, _MIN_SIGMA**2))
    return Normals(totals / totals.sum(), mean, sigma), height


def _shares(logs: Floats) -> tuple[Floats, float]:
    """What part of each time belongs to each component, and the sum of logarithms of densities."""
    top = logs.max(axis=0)
    parts = np.exp(logs - top)
    sums = parts.sum(axis=0)
    return parts / sums, float((top + np.log(sums)).sum())


def _above(a: Floats) -> tuple[Floats, Floats]:
    """Log P(Z > a), and the hazard: far out by its asymptote, where erfc has no digits left."""
    log_density = -0.5 * a * a - _HALF_LOG_2PI
    far = np.maximum(a, 1.0)
    far = far + 1 / far
    erfc = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in np.minimum(a, 30).ravel()])
    log_near = np.log(np.maximum(erfc, 1e-300)).reshape(a.shape)
    log_above = np.where(a < 30, log_near, log_density - np.log(far))
    return log_above, np.exp(log_density - log_above)
