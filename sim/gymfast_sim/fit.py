"""Laws from measured times: fits, how good they are, and how sure, resampling whole days."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from gymfast_sim import fit_families
from gymfast_sim.elementary import Floats
from gymfast_sim.fit_log import Span
from gymfast_sim.fit_mixture import MAX_COMPONENTS, Normals, fit_normals, law_of
from gymfast_sim.laws import AnyLaw, Component, Law, Mixture, PlainLaw
from gymfast_sim.reading import to_toml

_Fit = Callable[[Floats, Floats], tuple[Law, float]]

_FAMILIES: dict[str, tuple[int, _Fit]] = {
    "exponential": (1, fit_families.exponential),
    "weibull": (2, fit_families.weibull),
    "gamma": (2, fit_families.gamma),
    "pareto": (2, fit_families.pareto),
    "burr": (3, fit_families.burr),
}
_MIXTURES = {
    "lognormal": 1,
    **{f"lognormal-{num}": num for num in range(2, MAX_COMPONENTS + 1)},
}
NAMES = ("lognormal", "lognormal-2", "lognormal-3", *_FAMILIES)
"""What is fitted unless laws are named."""
ALL_NAMES = (*_MIXTURES, *_FAMILIES)

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_MIN_SEEN = 10
_CRITICAL = 1.3581  # sqrt(n) times the distance that one sample in 20 from the law exceeds


class Times(msgspec.Struct, frozen=True):
    """Times of one phase: seen whole, or cut by a time-out; and the day of each."""

    seen: Floats
    cut: Floats
    seen_day: tuple[str, ...]
    cut_day: tuple[str, ...]
    num_failed: int = 0


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """One fitted law; a lower AIC is better, `ks` is the largest miss of a probability."""

    name: str
    law: AnyLaw
    num_settings: int
    log_likelihood: float
    aic: float
    ks: float


class Interval(msgspec.Struct, frozen=True):
    """What was measured, what the fit says, and the ends between which 95 % of resamples lie."""

    what: str
    measured_s: float | None
    fitted_s: float
    low_s: float | None
    high_s: float | None


class FitReport(msgspec.Struct, frozen=True, kw_only=True):
    """Fits of one phase, the best first."""

    phase: str
    num_seen: int
    num_cut: int
    num_failed: int
    num_days: int
    day_correlation: float | None
    ks_critical: float
    fits: tuple[Fit, ...]
    refused: dict[str, str]
    intervals: tuple[Interval, ...]
    num_resamples: int

    @property
    def best(self) -> Fit:
        """The fit with the lowest AIC."""
        return self.fits[0]

    @property
    def fail_ratio(self) -> float:
        """Failures among all."""
        return self.num_failed / (self.num_seen + self.num_cut + self.num_failed)


def times_of(spans: Sequence[Span], phase: str | None, where: Mapping[str, str]) -> Times:
    """The times of a phase (None: the only one), of spans whose labels are those of `where`.

    Raises ValueError if there are none, if the phase has to be named, or for a time of 0.
    """
    kept = [s for s in spans if all(s.labels.get(key) == value for key, value in where.items())]
    if not kept:
        asked = ", ".join(f"{key}={value}" for key, value in where.items())
        raise ValueError(f"no line has {asked}: {_known(spans, where)}")
    phases = sorted({span.phase for span in kept})
    if phase is None and len(phases) > 1:
        raise ValueError(f"the log has the phases {', '.join(phases)}: name one")
    phase = phase or phases[0]
    kept = [span for span in kept if span.phase == phase]
    if not kept:
        raise ValueError(f"the log has no phase {phase!r}, expected one of {', '.join(phases)}")
    seen = [span for span in kept if span.outcome == "ok"]
    cut = [span for span in kept if span.outcome == "timeout"]
    for span in (*seen, *cut):
        if span.seconds <= 0:
            raise ValueError(
                f"line {span.line}: {phase} took 0 s, which no law fits: the clock is too coarse, "
                "or the phase does not exist; leave it out and take the law constant"
            )
    if len(seen) < _MIN_SEEN:
        raise ValueError(
            f"{len(seen)} times of {phase} are too few for a law, expected at least {_MIN_SEEN}"
        )
    return Times(
        np.array([span.seconds for span in seen]),
        np.array([span.seconds for span in cut]),
        tuple(span.day for span in seen),
        tuple(span.day for span in cut),
        sum(span.outcome == "failed" for span in kept),
    )


def fit_times(
    times: Times,
    *,
    phase: str = "",
    names: Sequence[str] = NAMES,
    num_resamples: int = 200,
    seed: int = 0,
    advance: Callable[[int, int], None] | None = None,
) -> FitReport:
    """Fits of laws to times. Raises ValueError if no law fits, or a name is not known."""
    fits: list[Fit] = []
    refused: dict[str, str] = {}
    normals: dict[str, Normals] = {}
    for name in names:
        if name not in ALL_NAMES:
            raise ValueError(f"law {name!r} is not known, expected one of {', '.join(ALL_NAMES)}")
        try:
            law, height, settings = _fit_one(name, times.seen, times.cut, normals)
        except ValueError as error:
            refused[name] = str(error)
            continue
        fits.append(
            Fit(
                name=name,
                law=law,
                num_settings=settings,
                log_likelihood=float(height),
                aic=float(2 * settings - 2 * height),
                ks=distance(law, times),
            )
        )
    if not fits:
        raise ValueError(f"no law fits: {'; '.join(f'{k}: {v}' for k, v in refused.items())}")
    fits.sort(key=lambda fit: fit.aic)
    best, start = fits[0], normals.get(fits[0].name)
    resampled = _resample(best, start, times, num_resamples, seed, advance or _ignore)
    days = {*times.seen_day, *times.cut_day}
    return FitReport(
        phase=phase,
        num_seen=times.seen.size,
        num_cut=times.cut.size,
        num_failed=times.num_failed,
        num_days=len(days),
        day_correlation=day_correlation(times) if len(days) > 1 else None,
        ks_critical=_CRITICAL / math.sqrt(times.seen.size),
        fits=tuple(fits),
        refused=refused,
        intervals=tuple(_intervals(best.law, times, resampled)),
        num_resamples=len(resampled),
    )


def distance(law: Law, times: Times) -> float:
    """The largest miss between a law and the measured probabilities (Kolmogorov-Smirnov).

    With times that were cut, the probabilities are those of Kaplan and Meier (1958).
    """
    x, above = survival(times)
    exact = np.array([law.cdf(float(value)) for value in x])
    before = np.concatenate([[1.0], above[:-1]])
    return float(max(np.abs(1 - above - exact).max(), np.abs(1 - before - exact).max()))


def survival(times: Times) -> tuple[Floats, Floats]:
    """Distinct times, and the measured probability of a longer one."""
    x, counts = np.unique(times.seen, return_counts=True)
    cut = np.sort(times.cut)
    at_risk = times.seen.size - np.concatenate([[0], np.cumsum(counts)[:-1]])
    at_risk = at_risk + cut.size - np.searchsorted(cut, x, side="left")
    return x, np.cumprod(1 - counts / at_risk)


def day_correlation(times: Times) -> float:
    """How much of the variance of the logarithm lies between days: 0 none, 1 all of it.

    Source: the intraclass correlation of a one-way analysis of variance.
    """
    y = np.log(times.seen)
    _, index = np.unique(np.array(times.seen_day), return_inverse=True)
    sizes = np.bincount(index).astype(float)
    if sizes.size < 2 or y.size <= sizes.size:
        return 0.0
    means = np.bincount(index, y) / sizes
    between = float((sizes * (means - y.mean()) ** 2).sum()) / (sizes.size - 1)
    within = float(((y - means[index]) ** 2).sum()) / (y.size - sizes.size)
    size = (y.size - float((sizes**2).sum()) / y.size) / (sizes.size - 1)
    total = between + (size - 1) * within
    return max((between - within) / total, 0.0) if total > 0 else 0.0


def rounded(law: Law, digits: int = 6) -> Law:
    """The law with settings of so many digits; weights of a mixture still sum to 1."""
    if isinstance(law, Mixture):
        parts = [(round(c.weight, digits), rounded(c.of, digits)) for c in law.components]
        rest = round(1 - math.fsum(weight for weight, _ in parts[1:]), digits)
        first = (rest, parts[0][1])
        return Mixture(
            components=tuple(Component(weight=w, of=of) for w, of in [first, *parts[1:]])  # type: ignore[arg-type]
        )
    settings = {
        name: float(f"{value:.{digits}g}")
        for name, value in msgspec.structs.asdict(law).items()
        if isinstance(value, float) and value
    }
    return msgspec.structs.replace(law, **settings)


def law_toml(law: Law, table: str) -> str:
    """The law as a table of a scenario, for example of `sandboxes.boot`."""
    return f"[{table}]\n{to_toml(rounded(law))}"


def _fit_one(
    name: str, seen: Floats, cut: Floats, normals: dict[str, Normals]
) -> tuple[PlainLaw, float, int]:
    """Law, log-likelihood and number of settings; `normals` has starts, and gets what was found."""
    if name in _MIXTURES:
        num = _MIXTURES[name]
        found, height = fit_normals(seen, cut, num, normals.get(name))
        normals[name] = found
        return law_of(found), height, 3 * num - 1
    settings, fit = _FAMILIES[name]
    law, height = fit(seen, cut)
    return law, height, settings  # type: ignore[return-value]


def _resample(
    best: Fit,
    start: Normals | None,
    times: Times,
    num: int,
    seed: int,
    advance: Callable[[int, int], None],
) -> list[Law]:
    """The law fitted to resamples of whole days, or of single times if the log has no days."""
    if len({*times.seen_day, *times.cut_day}) > 1:
        days = sorted({*times.seen_day, *times.cut_day})
        seen = [times.seen[np.array([d == day for d in times.seen_day])] for day in days]
        cut_day = np.array(times.cut_day, dtype=object)
        cut = [times.cut[cut_day == day] for day in days]
    else:
        seen, cut = [times.seen[i : i + 1] for i in range(times.seen.size)], []
        seen += [np.empty(0)] * times.cut.size
        cut = [np.empty(0)] * times.seen.size
        cut += [times.cut[i : i + 1] for i in range(times.cut.size)]
    rng = np.random.default_rng(seed)
    laws: list[Law] = []
    for i in range(num):
        chosen = rng.integers(0, len(seen), len(seen))
        starts = {best.name: start} if start is not None else {}
        drawn = np.concatenate([seen[j] for j in chosen])
        drawn_cut = np.concatenate([cut[j] for j in chosen])
        laws.append(_fit_one(best.name, drawn, drawn_cut, starts)[0])
        advance(i + 1, num)
    return laws


def _intervals(law: Law, times: Times, resampled: Sequence[Law]) -> list[Interval]:
    x, above = survival(times)
    rows: list[tuple[str, float | None, Callable[[Law], float]]] = [
        ("mean", float(times.seen.mean()) if not times.cut.size else None, _mean)
    ]
    for p in QUANTILES:
        i = int(np.searchsorted(-above, -(1 - p) - 1e-12, side="left"))
        measured = float(x[i]) if i < x.size and times.seen.size * (1 - p) >= 1 else None
        rows.append((f"p{100 * p:g}", measured, lambda one, p=p: one.quantile(p)))  # type: ignore[misc]
    found = []
    for what, measured, number in rows:
        drawn = [number(one) for one in resampled]
        ends = np.quantile(drawn, (0.025, 0.975)) if len(drawn) >= 20 else (None, None)
        low, high = (None if end is None else float(end) for end in ends)
        found.append(Interval(what, measured, number(law), low, high))
    return found


def _mean(law: Law) -> float:
    return law.expected_s


def _known(spans: Sequence[Span], where: Mapping[str, str]) -> str:
    parts = []
    for key in where:
        found = sorted({span.labels[key] for span in spans if key in span.labels})
        parts.append(f"{key} is one of {', '.join(found[:12])}" if found else f"no line has {key}")
    return "; ".join(parts)


def _ignore(done: int, total: int) -> None:
    pass
