"""`gymfast sim backtest`: a recorded run against its simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import EXISTING_FILE
from gymfast.cli.output import Output, format_table, with_output

if TYPE_CHECKING:
    from gymfast_sim.backtest import BacktestReport, ErrorOfMean

_EPILOG = """\b
Examples:
  gymfast sim backtest pool.jsonl --scenario run.toml
  gymfast sim backtest pool.jsonl --scenario run.toml --replications 20 --json
"""


@click.command("backtest", epilog=_EPILOG)
@click.argument("log", type=EXISTING_FILE)
@click.option(
    "--scenario",
    "file",
    type=EXISTING_FILE,
    required=True,
    help="TOML with the policy and the limits of the run; the rest is the log's.",
)
@click.option("--replications", type=click.IntRange(1, 10_000), default=5, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@with_output
def command(output: Output, log: Path, file: Path, replications: int, seed: int) -> None:
    """Replay the run in LOG step by step, and tell the error of the simulation.

    Arrivals, work, thoughts, failures and sandbox starts are those of the log
    (docs/sim-fit.md); policy and limits are those of the scenario.
    """
    import msgspec

    from gymfast_sim.backtest import backtest
    from gymfast_sim.fit_log import read_log
    from gymfast_sim.scenario import Scenario

    scenario, spans = Scenario.from_file(file), read_log(log)
    try:
        with output.progress("steps") as advance:
            report = backtest(
                spans, scenario, num_replications=replications, seed=seed, advance=advance
            )
    except ValueError as error:
        raise ValueError(f"{log}: {error}") from error
    fields = msgspec.to_builtins(report)
    assert isinstance(fields, dict)
    output.result(fields, _text(report))


def _text(report: BacktestReport) -> list[str]:
    rows = [
        (
            str(row.step),
            str(row.num_rollouts),
            f"{row.recorded_s:.3f}",
            f"{row.simulated_s:.3f}",
            f"{row.recorded_blocked_s:.3f}",
            f"{row.simulated_blocked_s:.3f}",
        )
        for row in report.steps
    ]
    header = ("step", "rollouts", "recorded s", "simulated s", "blocked s", "simulated s")
    return [
        *format_table(header, rows),
        "",
        f"error of the step time: {_ratio(report.step_time)}",
        f"error of the blocked time: {_ratio(report.blocked_time)}",
    ]


def _ratio(error: ErrorOfMean) -> str:
    if error.low is None or error.high is None:
        return f"{100 * error.ratio:+.2f} % (fewer than 5 steps: no interval)"
    return (
        f"{100 * error.ratio:+.2f} %, 95 % from {100 * error.low:+.2f} to {100 * error.high:+.2f} %"
    )
