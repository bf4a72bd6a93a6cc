"""`gymfast sync status`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import FiniteRange, key_option, read_key, run_option, store_argument
from gymfast.cli.output import Output, format_size, format_table, with_output
from gymfast.cli.sync.fleet import Goal, age_of, fields_of, lines_of, watch
from gymfast.cli.sync.folders import naming_folder

if TYPE_CHECKING:
    from gymfast.sync.fleet import Fleet
    from gymfast.sync.status import RunStatus

_EPILOG = """\b
Examples:
  gymfast sync status /mnt/weights --run demo
  gymfast sync status /mnt/weights --run demo --json
  gymfast sync status /mnt/weights --run demo --watch
  gymfast sync status /mnt/weights --run demo --min-ready 8 --timeout 600
  gymfast sync status /mnt/weights --run demo --prometheus
"""


@click.command("status", epilog=_EPILOG)
@store_argument
@run_option
@click.option("--watch", "is_watching", is_flag=True, help="Show the readers again and again.")
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(min=0.05),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks.",
)
@click.option(
    "--wait-for-version",
    "version",
    type=click.IntRange(min=0),
    metavar="N",
    help="Wait until the readers serve version N or a newer one.",
)
@click.option(
    "--min-ready",
    type=click.IntRange(min=1),
    metavar="N",
    help="Wait until N readers are ready.  [default: all that are heard of]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0),
    metavar="S",
    help="End (exit code 4) if they are not after S seconds.",
)
@click.option(
    "--prometheus", "is_metrics", is_flag=True, help="Print metrics as Prometheus reads them."
)
@key_option
@with_output
def command(
    output: Output,
    store: str,
    run: str,
    is_watching: bool,
    interval_s: float,
    version: int | None,
    min_ready: int | None,
    timeout_s: float | None,
    is_metrics: bool,
    key_file: Path | None,
) -> None:
    """Show versions, sizes and readers of a run.

    Records, leases and what readers tell of themselves are read. A reader that
    fetches is listed with the oldest version it may still need: retention leaves
    that and everything after it alone.

    With --watch only the readers are shown, until Ctrl-C: as a table on a terminal,
    else a line for each change, with --json an object for each look. A reader that
    is silent has not written for three of its periods; ready is one that is clean,
    neither silent nor stale, and at version N if one is named.

    Exit code 4: the readers were not ready in time.
    """
    from gymfast.stores import open_store
    from gymfast.sync.fleet import FleetWatch
    from gymfast.sync.status import read_status

    goal = Goal(version, min_ready, timeout_s)
    if is_metrics and (output.is_json or is_watching or goal.is_given):
        raise click.UsageError("--prometheus is one look: not with --json, --watch or a wait")
    if timeout_s is not None and not goal.is_given:
        raise click.UsageError("--timeout is for --wait-for-version and --min-ready")
    opened = open_store(store, silence_s=goal.silence_s)
    key = read_key(key_file)
    if goal.is_given or is_watching:
        watch(output, opened, run, key, interval_s=interval_s, goal=goal)
        return
    with naming_folder(store):
        status = read_status(opened, run, key=key)
    newest = None if status.newest is None else status.newest.version
    fleet = FleetWatch(opened, run).look(newest)
    if is_metrics:
        from gymfast.cli.sync.metrics import metrics_of

        output.result({}, metrics_of(status, fleet))
        return
    output.result({**asdict(status), "fleet": fields_of(fleet)}, _to_text(status, fleet))


def _to_text(status: RunStatus, fleet: Fleet) -> list[str]:
    now_s = time.time()
    rows = [
        (
            str(version.version),
            version.kind,
            format_size(version.frame_bytes),
            f"{version.num_changed}",
            age_of(now_s - version.created_us / 1e6),
            version.root[:16],
        )
        for version in status.versions
    ]
    table = format_table(("version", "frame", "size", "changed", "age", "root"), rows)
    newest = "none" if status.newest is None else str(status.newest.version)
    chain = "no full state" if status.chain_length is None else f"{status.chain_length} deltas long"
    free = "unknown" if status.free_bytes is None else format_size(status.free_bytes)
    return [
        *(table if rows else []),
        f"run {status.run}: newest version {newest}, chain {chain}",
        f"publisher: epoch {status.epoch}, {status.publisher}",
        f"frames {format_size(status.stored_bytes)}, free space {free}",
        *_folds(status),
        *_readers(status, now_s),
        *lines_of(fleet),
    ]


def _folds(status: RunStatus) -> list[str]:
    if not status.folds:
        return []
    full = [str(fold.version) for fold in status.folds if fold.base_version < 0]
    size = format_size(sum(fold.frame_bytes for fold in status.folds))
    newest = max(fold.version for fold in status.folds)
    states = f", full states of version {', '.join(full)}" if full else ""
    return [f"folds: {len(status.folds)} of {size} up to version {newest}{states}"]


def _readers(status: RunStatus, now_s: float) -> list[str]:
    return [
        f"reader {reader.reader}: needs version {_or_none(reader.version)} and newer, "
        + (f"lease for {reader.expires_us / 1e6 - now_s:.0f} s" if reader.is_live else "lease over")
        for reader in status.readers
    ]


def _or_none(version: int | None) -> str:
    return "none" if version is None else str(version)
