"""Fits: known laws come back, times that were cut are not short ones, days are kept together."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from sim_laws import MIXTURE

from gymfast_sim import fit_mixture, presets
from gymfast_sim.draws import Draws
from gymfast_sim.fit import (
    ALL_NAMES,
    Times,
    day_correlation,
    distance,
    fit_times,
    law_toml,
    survival,
    times_of,
)
from gymfast_sim.fit_log import Span, read_log
from gymfast_sim.fit_plot import plot
from gymfast_sim.laws import (
    Burr,
    Exponential,
    Gamma,
    Law,
    Lognormal,
    Mixture,
    Pareto,
    Weibull,
)
from gymfast_sim.scenario import Scenario

DATA = Path("../shared/data/sandbox-startup/create_to_first_command_ms.csv")
KNOWN: dict[str, Law] = {
    "exponential": Exponential(mean_s=3.0),
    "lognormal": Lognormal(median_s=2.0, sigma=0.8),
    "weibull": Weibull(scale_s=2.0, shape=0.7),
    "gamma": Gamma(mean_s=2.0, shape=3.5),
    "pareto": Pareto(minimum_s=1.5, alpha=2.5),
    "burr": Burr(scale_s=2.0, shape=4.0, tail=0.8),
}
NUM = 4_000


def _sample(law: Law, num: int = NUM, limit_s: float = math.inf, days: int = 40) -> Times:
    draws = Draws(8)
    drawn = np.array([law.at(*draws(i, 0, 0)) for i in range(num)])
    is_cut = drawn > limit_s
    day = np.array([f"day {i % days}" for i in range(num)])
    return Times(
        drawn[~is_cut],
        np.full(int(is_cut.sum()), limit_s),
        tuple(day[~is_cut].tolist()),
        tuple(day[is_cut].tolist()),
    )


def _agrees(found: Law, law: Law, num: int) -> None:
    """Every quantile lies within 4 standard errors of a sample quantile, in probability."""
    for p in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert abs(law.cdf(found.quantile(p)) - p) < 4 * math.sqrt(p * (1 - p) / num)


@pytest.mark.parametrize("name", KNOWN)
def test_a_law_comes_back_from_its_sample(name: str) -> None:
    report = fit_times(_sample(KNOWN[name]), names=[name], num_resamples=0)
    _agrees(report.best.law, KNOWN[name], NUM)
    assert report.best.ks < report.ks_critical


@pytest.mark.parametrize("name", KNOWN)
def test_times_cut_by_a_time_out_count_as_longer_ones(name: str) -> None:
    law = KNOWN[name]
    times = _sample(law, limit_s=law.quantile(0.7))
    assert times.cut.size > 0.25 * NUM
    _agrees(fit_times(times, names=[name], num_resamples=0).best.law, law, NUM)
    seen_alone = Times(times.seen, np.empty(0), times.seen_day, ())
    wrong = fit_times(seen_alone, names=[name], num_resamples=0).best.law
    assert wrong.quantile(0.95) < 0.9 * law.quantile(0.95)


@pytest.mark.parametrize("limit", [1.0, 0.97])
def test_a_mixture_comes_back_with_and_without_a_time_out(limit: float) -> None:
    law = Mixture(
        components=(
            MIXTURE.components[0],
            type(MIXTURE.components[0])(weight=0.25, of=Lognormal(median_s=9.0, sigma=0.5)),
        )
    )
    limit_s = math.inf if limit == 1.0 else law.quantile(limit)
    report = fit_times(_sample(law, limit_s=limit_s), names=["lognormal-2"], num_resamples=0)
    _agrees(report.best.law, law, NUM)
    assert isinstance(report.best.law, Mixture)
    parts = [(c.weight, c.of.median_s, c.of.sigma) for c in report.best.law.components]  # type: ignore[union-attr]
    assert np.array(parts) == pytest.approx(np.array([(0.75, 2, 0.2), (0.25, 9, 0.5)]), rel=0.1)


def test_the_law_that_made_the_times_has_the_best_aic() -> None:
    report = fit_times(_sample(KNOWN["gamma"]), names=list(ALL_NAMES), num_resamples=0)
    near = [fit.name for fit in report.fits if fit.aic < report.best.aic + 10]
    assert "gamma" in near and "exponential" not in near and "pareto" not in near
    assert [fit.aic for fit in report.fits] == sorted(fit.aic for fit in report.fits)


def test_a_likelihood_is_that_of_the_density() -> None:
    """The derivative of the distribution, which the fits do not use."""
    times = _sample(KNOWN["weibull"], num=300)
    for fit in fit_times(times, names=list(ALL_NAMES), num_resamples=0).fits:
        if fit.name in ("pareto", "lognormal-4"):  # a jump; a component may be a spike
            continue
        step = 1e-5 * times.seen
        density = [
            (fit.law.cdf(x + h) - fit.law.cdf(x - h)) / (2 * h)
            for x, h in zip(times.seen.tolist(), step.tolist(), strict=True)
        ]
        assert fit.log_likelihood == pytest.approx(float(np.log(density).sum()), rel=1e-4)


def test_the_survival_of_cut_times_is_that_of_kaplan_and_meier() -> None:
    """The example of a text book: remissions of 6-MP, Freireich 1963."""
    seen = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    cut = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    times = Times(np.array(seen, float), np.array(cut, float), ("",) * 9, ("",) * 12)
    x, above = survival(times)
    assert x.tolist() == [6, 7, 10, 13, 16, 22, 23]
    expected = [0.8571, 0.8067, 0.7529, 0.6902, 0.6275, 0.5378, 0.4482]
    assert above.tolist() == pytest.approx(expected, abs=5e-5)


def test_an_interval_covers_what_is_true_and_knows_of_days() -> None:
    """Days differ: resampling single times would be too sure of itself."""
    rng = np.random.default_rng(2)
    level = np.repeat(rng.normal(0, 0.4, 30), 60)
    seen = np.exp(level + rng.normal(0, 0.2, level.size))
    day = tuple(f"d{i // 60}" for i in range(level.size))
    by_day = Times(seen, np.empty(0), day, ())
    alone = Times(seen, np.empty(0), ("",) * seen.size, ())
    widths = []
    for times in (by_day, alone):
        report = fit_times(times, names=["lognormal"], num_resamples=60)
        row = report.intervals[1]
        assert row.what == "p50" and row.low_s is not None and row.high_s is not None
        assert row.low_s < row.fitted_s < row.high_s
        widths.append(row.high_s - row.low_s)
    assert widths[0] > 4 * widths[1]  # sqrt(60 * 0.8) = 7 in theory
    assert day_correlation(by_day) == pytest.approx(0.8, abs=0.12)
    shuffled = Times(rng.permutation(seen), np.empty(0), day, ())
    assert day_correlation(shuffled) < 0.05


def test_the_same_log_and_seed_give_the_same_report() -> None:
    times = _sample(KNOWN["lognormal"], num=500)
    one, two, other = (
        fit_times(times, names=["lognormal", "gamma"], num_resamples=25, seed=s) for s in (1, 1, 2)
    )
    assert one == two != other


def test_a_law_is_written_as_a_scenario_reads_it() -> None:
    report = fit_times(_sample(MIXTURE), names=["lognormal-3"], num_resamples=0)
    text = 'name = "x"\n[policy]\npolicy = "elastic"\nmax_size = 10\n[rollouts]\nprompts = 10\n'
    text += 'work = { law = "constant", value_s = 1.0 }\n'
    scenario = Scenario.from_toml(text + law_toml(report.best.law, "sandboxes.boot"))
    assert scenario.sandboxes.boot.quantile(0.9) == pytest.approx(
        report.best.law.quantile(0.9), rel=1e-4
    )


def test_a_plot_is_one_svg_without_anything_from_elsewhere() -> None:
    from xml.etree import ElementTree as ET

    times = _sample(KNOWN["burr"], num=800, limit_s=9.0)
    report = fit_times(times, names=["burr", "lognormal"], num_resamples=0)
    text = plot(times, report.fits, "a <title> & more")
    root = ET.fromstring(text)
    assert root.tag.endswith("svg") and len(text) < 60_000
    assert len(root.findall(".//{*}polyline")) == 6
    assert "href" not in text and "nan" not in text and "inf" not in text


def _spans(num: int = 20, **changes: object) -> list[Span]:
    base = {"line": 1, "phase": "boot", "seconds": 1.0, "outcome": "ok", "start_s": None}
    fields = {**base, "labels": {}, "numbers": {}, **changes}
    return [Span(**fields) for _ in range(num)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spans", "phase", "where", "text"),
    [
        (_spans(), None, {"provider": "x"}, "no line has provider=x"),
        (_spans(), "setup", {}, "no phase 'setup', expected one of boot"),
        (_spans() + _spans(phase="setup"), None, {}, "the phases boot, setup: name one"),
        (_spans(seconds=0.0, line=7), None, {}, "line 7: boot took 0 s"),
        (_spans(num=4), None, {}, "4 times of boot are too few"),
    ],
)
def test_times_that_cannot_be_fitted_are_refused(
    spans: list[Span], phase: str | None, where: dict[str, str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        times_of(spans, phase, where)


def test_a_law_that_is_not_known_or_has_no_mean_is_named() -> None:
    heavy = _sample(Pareto(minimum_s=1.0, alpha=0.9, cap_s=1e6), num=500)
    report = fit_times(heavy, names=["pareto", "lognormal"], num_resamples=0)
    assert "no mean" in report.refused["pareto"] and report.best.name == "lognormal"
    with pytest.raises(ValueError, match=r"no law fits: pareto: .*no mean"):
        fit_times(heavy, names=["pareto"], num_resamples=0)
    with pytest.raises(ValueError, match="'normal' is not known, expected one of lognormal"):
        fit_times(heavy, names=["normal"], num_resamples=0)


PUBLISHED = {
    ("modal", "burst"): ("modal-measured-2026", 0.22),
    ("modal", "sequential"): ("modal-measured-2026-sequential", None),
    ("e2b", "burst"): ("e2b-measured-2026", None),
    ("daytona", "burst"): ("daytona-measured-2026", None),
}


@pytest.fixture(scope="module")
def starts() -> list[Span]:
    if not DATA.exists():
        pytest.skip("needs ../shared/data/sandbox-startup")
    return read_log(DATA)


@pytest.mark.parametrize(("provider", "mode"), PUBLISHED)
def test_the_published_fits_come_back_from_the_measurements(
    provider: str, mode: str, starts: list[Span]
) -> None:
    """Three lognormal laws of docs/simulator.md section 11: as likely, and the same quantiles."""
    preset, correlation = PUBLISHED[provider, mode]
    law = presets.provider(preset).sandboxes.boot
    assert isinstance(law, Mixture)
    times = times_of(starts, None, {"provider": provider, "mode": mode})
    report = fit_times(times, names=["lognormal-3", "lognormal", "burr"], num_resamples=0)
    found = next(fit for fit in report.fits if fit.name == "lognormal-3")
    single = next(fit for fit in report.fits if fit.name == "lognormal")
    at = fit_mixture.Normals(
        np.array([c.weight for c in law.components]),
        np.log([c.of.median_s for c in law.components]),  # type: ignore[union-attr]
        np.array([c.of.sigma for c in law.components]),  # type: ignore[union-attr]
    )
    _, height = fit_mixture._round(np.log(times.seen), np.empty(0), at)
    assert found.log_likelihood >= height - float(np.log(times.seen).sum())
    for p in (0.1, 0.25, 0.5, 0.75, 0.9, 0.95):
        assert found.law.quantile(p) == pytest.approx(law.quantile(p), rel=0.03)
    measured_s = float(np.quantile(times.seen, 0.99))
    assert found.law.quantile(0.99) == pytest.approx(measured_s, rel=0.25)  # as in test_presets
    assert found.ks <= 0.025 < 0.07 < single.ks
    assert distance(law, times) < 0.021
    # The published settings lie on the hill that is climbed from them.
    near, _ = fit_mixture.fit_normals(times.seen, times.cut, 3, at)
    if provider != "modal":
        assert near.weight == pytest.approx(at.weight, rel=0.03)
        assert np.exp(near.mean) == pytest.approx(np.exp(at.mean), rel=0.01)
        assert near.sigma == pytest.approx(at.sigma, rel=0.02)
    if correlation is not None:
        assert report.day_correlation == pytest.approx(correlation, abs=0.005)


def test_the_measured_quantiles_are_those_of_the_research(starts: list[Span]) -> None:
    times = times_of(starts, None, {"provider": "modal", "mode": "burst"})
    report = fit_times(times, names=["lognormal"], num_resamples=0)
    measured = {row.what: row.measured_s for row in report.intervals}
    expected = {"p50": 2.14, "p90": 2.94, "p95": 3.38, "p99": 8.4, "p99.9": 25.0}
    for what, seconds in expected.items():
        assert measured[what] == pytest.approx(seconds, rel=0.04)
    # One lognormal law says 4.4 s for p99 of single creations, where 9 were measured.
    alone = times_of(starts, None, {"provider": "modal", "mode": "sequential"})
    found = fit_times(alone, names=["lognormal"], num_resamples=0).best.law
    assert found.quantile(0.99) == pytest.approx(4.4, rel=0.03)
