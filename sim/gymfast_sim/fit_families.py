"""Maximum likelihood for laws with a formula; times cut by a time-out count as longer ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gymfast_sim.elementary import Floats
from gymfast_sim.laws import Burr, Exponential, Gamma, Law, Pareto, Weibull
from gymfast_sim.laws.gamma_table import MAX_SHAPE, MIN_SHAPE, log_tails

_NUM_MOVES = 600


def exponential(seen: Floats, cut: Floats) -> tuple[Law, float]:
    """The law and its log-likelihood."""
    mean = (seen.sum() + cut.sum()) / seen.size
    return Exponential(mean_s=float(mean)), float(-seen.size * (math.log(mean) + 1))


def weibull(seen: Floats, cut: Floats) -> tuple[Law, float]:
    """The law and its log-likelihood; the equation of its shape is solved by halving."""
    times = np.concatenate([seen, cut])
    logs, mean_log = np.log(times / times.max()), float(np.log(seen / times.max()).mean())

    def too_big(shape: float) -> bool:
        powers = np.exp(shape * logs)
        return bool((powers * logs).sum() / powers.sum() - mean_log > 1 / shape)

    low, high = 1e-3, 1e3
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if too_big(middle) else (middle, high)
    shape = high
    scale = times.max() * (np.exp(shape * logs).sum() / seen.size) ** (1 / shape)
    log_ratio = np.log(seen / scale)
    found = seen.size * math.log(shape / scale) + ((shape - 1) * log_ratio).sum()
    return Weibull(scale_s=float(scale), shape=shape), float(found - seen.size)


def pareto(seen: Floats, cut: Floats) -> tuple[Law, float]:
    """The law and its log-likelihood. Raises ValueError if it has no mean."""
    low = float(seen.min())
    total = np.log(seen / low).sum() + np.log(np.maximum(cut / low, 1)).sum()
    alpha = float(seen.size / total) if total > 0 else math.inf
    if not 1 < alpha < math.inf:
        raise ValueError(f"alpha is {alpha:.3g}: the law has no mean")
    found = seen.size * math.log(alpha / low) - (alpha + 1) * np.log(seen / low).sum()
    return Pareto(minimum_s=low, alpha=alpha), float(
        found - alpha * np.log(np.maximum(cut / low, 1)).sum()
    )


def gamma(seen: Floats, cut: Floats) -> tuple[Law, float]:
    """The law and its log-likelihood."""
    n, total, log_total = seen.size, float(seen.sum()), float(np.log(seen).sum())
    log_cut = np.log(cut)

    def likelihood(place: Floats) -> float:
        shape, scale = math.exp(place[0]), math.exp(place[1])
        if not MIN_SHAPE <= shape <= MAX_SHAPE:
            return -math.inf
        found = (shape - 1) * log_total - total / scale
        found -= n * (shape * place[1] + math.lgamma(shape))
        above = log_tails(shape, log_cut - place[1])[1] if cut.size else log_cut
        return float(found + above.sum())

    spread = max(float(np.log(seen).var()), 1e-4)
    shape = min(max(1 / spread, MIN_SHAPE), MAX_SHAPE)
    place, found = _climb(likelihood, np.array([math.log(shape), math.log(seen.mean() / shape)]))
    shape = math.exp(place[0])
    return Gamma(mean_s=shape * math.exp(place[1]), shape=shape), found


def burr(seen: Floats, cut: Floats) -> tuple[Law, float]:
    """The law and its log-likelihood. Raises ValueError if it has no mean."""
    logs, log_cut = np.log(seen), np.log(cut)

    def likelihood(place: Floats) -> float:
        shape, tail = math.exp(place[1]), math.exp(place[2])
        z, z_cut = shape * (logs - place[0]), shape * (log_cut - place[0])
        found = seen.size * (place[1] + place[2]) + (z - logs).sum()
        found -= (tail + 1) * np.logaddexp(0.0, z).sum()
        return float(found - tail * np.logaddexp(0.0, z_cut).sum())

    shape = 1.8 / max(float(logs.std()), 1e-2)
    start = np.array([float(np.median(logs)), math.log(shape), 0.0])
    place, found = _climb(likelihood, start)
    scale, shape, tail = (math.exp(x) for x in place)
    return Burr(scale_s=scale, shape=shape, tail=tail), found


def _climb(height: Callable[[Floats], float], start: Floats) -> tuple[Floats, float]:
    """Where a function is highest near a start, and how high: Nelder and Mead's simplex, twice.

    Source: Nelder and Mead, "A simplex method for function minimization", 1965.
    """
    for spread in (0.3, 0.05):
        corners = [start, *(start + spread * row for row in np.eye(start.size))]
        points = sorted((-height(corner), tuple(corner)) for corner in corners)
        for _ in range(_NUM_MOVES):
            if points[-1][0] - points[0][0] < 1e-9:
                break
            points = sorted(_move(height, points))
        start = np.array(points[0][1])
    return start, -points[0][0]


def _move(
    height: Callable[[Floats], float], points: list[tuple[float, tuple[float, ...]]]
) -> list[tuple[float, tuple[float, ...]]]:
    rest, worst = points[:-1], np.array(points[-1][1])
    centre = np.mean([point for _, point in rest], axis=0)

    def at(part: float) -> tuple[float, tuple[float, ...]]:
        place = centre + part * (worst - centre)
        return -height(place), tuple(place)

    mirrored = at(-1.0)
    if mirrored < points[0]:
        return [*rest, min(mirrored, at(-2.0))]
    if mirrored < rest[-1]:
        return [*rest, mirrored]
    inside = at(-0.5 if mirrored < points[-1] else 0.5)
    if inside < min(mirrored, points[-1]):
        return [*rest, inside]
    best = np.array(points[0][1])
    shrunk = [(best + np.array(point)) / 2 for _, point in points[1:]]
    return [points[0], *((-height(place), tuple(place)) for place in shrunk)]
