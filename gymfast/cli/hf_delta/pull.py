"""`gymfast hf-delta pull`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.hf_delta.options import DIRECTORY
from gymfast.cli.options import NEW, threads_option
from gymfast.cli.output import Output, with_output

if TYPE_CHECKING:
    from gymfast.delta.hf_delta import PullReport

_EPILOG = """\b
Examples:
  gymfast hf-delta pull --base old --source run --local replica --target 7
"""


@click.command("pull", epilog=_EPILOG)
@click.option("--base", type=DIRECTORY, required=True, help="The checkpoint that is version 0.")
@click.option("--source", type=NEW, required=True, help="Directory of the published versions.")
@click.option("--local", type=NEW, required=True, help="The checkpoint to bring up to date.")
@click.option(
    "--target", type=click.IntRange(min=0), required=True, metavar="N", help="The version to hold."
)
@click.option(
    "--pre-read-hook",
    metavar="MODULE.FUNCTION",
    help="Called with source and target before anything is read.",
)
@click.option("--reseed", is_flag=True, help="Begin again from a full version.")
@threads_option
@with_output
def command(
    output: Output,
    base: Path,
    source: Path,
    local: Path,
    target: int,
    pre_read_hook: str | None,
    reseed: bool,
    threads: int | None,
) -> None:
    """Bring the checkpoint --local to version N of those in --source.

    A fresh directory begins with the newest full version up to N, or with --base;
    then the deltas follow in order. Every tensor is checked before a byte is
    written, and a pull that was killed is completed or undone by the next one.
    The state file is that of the stock receiver. A target that is not above the
    version held changes nothing.

    Exit code 5: there is no such version (yet).
    """
    from gymfast.delta.hf_delta import pull

    with output.progress("pull") as advance:
        report = pull(
            local,
            base,
            source,
            target,
            pre_read_hook=pre_read_hook,
            reseed=reseed,
            threads=threads,
            progress=advance,
        )
    fields = {
        "local": str(local),
        "version": report.version,
        "seed": None if report.seed is None else str(report.seed),
        "applied": list(report.applied),
        "num_changed": report.num_changed,
        "recovered": report.recovered,
    }
    output.result(fields, _to_text(local, report))


def _to_text(local: Path, report: PullReport) -> list[str]:
    lines = [f"{local}: version {report.version}"]
    if report.recovered:
        lines.append("completed what a killed pull had begun")
    if report.seed is not None:
        lines.append(f"copied from {report.seed}")
    if report.applied:
        first, last = report.applied[0], report.applied[-1]
        which = f"version {first}" if first == last else f"versions {first} to {last}"
        lines.append(f"applied {which}, {report.num_changed} units changed")
    return lines
