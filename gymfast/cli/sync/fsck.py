"""`gymfast sync fsck`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import bwlimit_option, key_option, read_key, run_option, store_argument
from gymfast.cli.output import Output, format_size, with_output
from gymfast.cli.sync.folders import naming_folder
from gymfast.errors import ChecksumError

if TYPE_CHECKING:
    from gymfast.sync.fsck import FsckReport

_EPILOG = """\b
Examples:
  gymfast sync fsck /mnt/weights --run demo
  gymfast sync fsck /mnt/weights --run demo --quick --json
"""


@click.command("fsck", epilog=_EPILOG)
@store_argument
@run_option
@click.option("--quick", is_flag=True, help="Compare lengths only, read no objects.")
@bwlimit_option
@key_option
@with_output
def command(
    output: Output,
    store: str,
    run: str,
    quick: bool,
    bwlimit: int | None,
    key_file: Path | None,
) -> None:
    """Check every record and object of a run.

    Each record must follow the one before it, each object must have its length
    and its SHA-256. What no record names is waste, not damage. Every finding says
    what heals it. Nothing is changed; a publisher and readers may go on meanwhile.

    Exit code 3 if anything is damaged, even if no version is lost.
    """
    from gymfast.stores import open_store
    from gymfast.sync.bandwidth import limited
    from gymfast.sync.fsck import fsck

    opened = limited(open_store(store), bwlimit)
    with naming_folder(store), output.progress("fsck") as advance:
        key = read_key(key_file)
        report = fsck(opened, run, key=key, reads_objects=not quick, advance=advance)
    fields = {**asdict(report), "is_sound": not report.damage}
    output.result(fields, _to_text(report))
    if report.damage:
        output.fail(f"{len(report.damage)} of the findings are damage", ChecksumError.exit_code)


def _to_text(report: FsckReport) -> list[str]:
    lines = [f"{f.severity}: {f.key}: {f.problem}; {f.repair}" for f in report.findings]
    size = format_size(report.num_bytes)
    lines.append(
        f"run {report.run}: {report.num_records} records, {report.num_objects} objects of {size}"
    )
    newest = "none" if report.newest is None else str(report.newest)
    restorable = "none" if report.restorable is None else str(report.restorable)
    lines.append(f"newest version {newest}, newest that can be loaded {restorable}")
    return lines
