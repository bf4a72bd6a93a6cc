"""`gymfast sim fit`: laws of a scenario, from a log of phases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.files import check_output, new_file
from gymfast.cli.options import EXISTING_FILE, NEW
from gymfast.cli.output import Output, format_table, with_output

if TYPE_CHECKING:
    from gymfast_sim.fit import FitReport

_EPILOG = """\b
Examples:
  gymfast sim fit starts.csv --where provider=modal --where mode=burst
  gymfast sim fit pool.jsonl --phase boot --plot boot.svg -o boot.toml
  gymfast sim fit pool.jsonl --phase exec --table rollouts.work
"""


@click.command("fit", epilog=_EPILOG)
@click.argument("log", type=EXISTING_FILE)
@click.option("--phase", help="Phase to fit.  [default: the only one in the log]")
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only lines with this label.")
@click.option("--law", "laws", multiple=True, help="Law to try; may be given more than once.")
@click.option(
    "--resamples",
    type=click.IntRange(0, 100_000),
    default=200,
    show_default=True,
    help="Resamples of whole days, for the intervals.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--table", default="sandboxes.boot", show_default=True, help="Table of the scenario to write."
)
@click.option("--plot", "svg", type=NEW, help="Write a plot, as SVG.")
@click.option("-o", "--output", "file", type=NEW, help="Write the law there, as TOML.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@with_output
def command(
    output: Output,
    log: Path,
    phase: str | None,
    where: tuple[str, ...],
    laws: tuple[str, ...],
    resamples: int,
    seed: int,
    table: str,
    svg: Path | None,
    file: Path | None,
    force: bool,
) -> None:
    """Fit laws to the times of a phase in LOG, and print the best as TOML.

    LOG is JSONL or CSV (docs/sim-fit.md). Laws are compared by AIC; KS is the
    largest miss of a probability. Times cut by a time-out count as longer ones.
    """
    from gymfast_sim.fit import NAMES, fit_times, law_toml, times_of
    from gymfast_sim.fit_log import read_log
    from gymfast_sim.fit_plot import plot

    for path in (svg, file):
        if path is not None:
            check_output(path, inputs={"LOG": log}, is_forced=force)
    labels = dict(_label(text) for text in where)
    spans = read_log(log)
    try:
        times = times_of(spans, phase, labels)
        with output.progress("resampling") as advance:
            report = fit_times(
                times,
                phase=phase or "",
                names=laws or NAMES,
                num_resamples=resamples,
                seed=seed,
                advance=advance,
            )
    except ValueError as error:
        raise ValueError(f"{log}: {error}") from error
    text = law_toml(report.best.law, table)
    if svg is not None:
        drawn = plot(times, report.fits, f"{log.name}: {report.best.name}")
        with new_file(svg, is_forced=force) as stream:
            stream.write(drawn.encode())
    if file is not None:
        with new_file(file, is_forced=force) as stream:
            stream.write(text.encode())
    output.result(_fields(report, text), [*_text(report), "", *text.splitlines()])


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise click.UsageError(f"--where {text!r}: expected KEY=VALUE, such as provider=modal")
    return key, value


def _fields(report: FitReport, text: str) -> dict[str, object]:
    import msgspec

    fields = msgspec.to_builtins(report)
    assert isinstance(fields, dict)
    return {**fields, "best": report.best.name, "fail_ratio": report.fail_ratio, "toml": text}


def _text(report: FitReport) -> list[str]:
    fits = [
        (f.name, str(f.num_settings), f"{f.aic - report.best.aic:.1f}", f"{f.ks:.4f}")
        for f in report.fits
    ]
    rows = [
        (row.what, _seconds(row.measured_s), _seconds(row.fitted_s), _ends(row.low_s, row.high_s))
        for row in report.intervals
    ]
    days = f"{report.num_days} days" if report.num_days > 1 else "no days: resampled one by one"
    cut = f"{report.num_cut} cut by a time-out"
    lines = [f"{report.num_seen} times, {cut}, {report.num_failed} failed; {days}"]
    if report.day_correlation is not None:
        lines.append(f"{100 * report.day_correlation:.0f} % of the variance lies between days")
    lines += ["", *format_table(("law", "settings", "AIC over best", "KS"), fits)]
    lines += [f"{name}: refused, {why}" for name, why in report.refused.items()]
    lines += ["", f"{report.best.name}:"]
    lines += format_table(("", "measured s", "fitted s", "95 % of resamples"), rows)
    if report.best.ks > report.ks_critical:
        lines += ["", f"KS above {report.ks_critical:.4f}: the best of these laws is not exact"]
    lines += [f"a run with more than {report.num_seen} draws reads the tail beyond the log"]
    return lines


def _seconds(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def _ends(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.4g} to {high:.4g}"
