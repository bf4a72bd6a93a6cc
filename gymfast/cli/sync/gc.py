"""`gymfast sync gc`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import key_option, read_key, run_option, store_argument
from gymfast.cli.output import Output, format_size, with_output
from gymfast.cli.sync.folders import naming_folder
from gymfast.errors import StoreError

if TYPE_CHECKING:
    from gymfast.sync import CleanReport

_EPILOG = """\b
Examples:
  gymfast sync gc /mnt/weights --run demo --dry-run
  gymfast sync gc /mnt/weights --run demo --keep 10
"""


@click.command("gc", epilog=_EPILOG)
@store_argument
@run_option
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    metavar="N",
    help="Newest versions that stay.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and delete nothing.")
@key_option
@with_output
def command(
    output: Output, store: str, run: str, keep: int, dry_run: bool, key_file: Path | None
) -> None:
    """Delete what no reader needs any more.

    The newest N versions stay, with a full state and every delta after it; so does
    what a live reader has a lease for, and what the publisher may be writing now.
    A publisher does this by itself: gc is for runs whose publisher is gone.
    """
    from gymfast.stores import open_store
    from gymfast.sync import collect

    key = read_key(key_file)
    with naming_folder(store):
        report = collect(open_store(store), run, keep=keep, dry_run=dry_run, key=key)
    output.result({"dry_run": dry_run, **asdict(report)}, _to_text(report, dry_run))
    if report.failures:
        what = f"{len(report.failures)} deletions failed, first {report.failures[0]}"
        output.fail(f"{what}; run it again", StoreError.exit_code)


def _to_text(report: CleanReport, dry_run: bool) -> list[str]:
    verb = "would delete" if dry_run else "deleted"
    size = format_size(report.num_bytes)
    lines = [f"{verb} {len(report.records)} records and {report.num_objects} objects of {size}"]
    if report.num_folds:
        lines.append(f"{verb} {report.num_folds} folds; their objects are among these")
    if report.num_probes:
        lines.append(f"{verb} {report.num_probes} tests of the store that were killed")
    if report.num_statuses:
        lines.append(f"{verb} {report.num_statuses} statuses of readers that are gone")
    if report.held_by is not None:
        lines.append(f"record {report.held_by} and what follows stays: a reader has a lease for it")
    return lines
