"""`gymfast sync status`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import key_option, read_key, run_option, store_argument
from gymfast.cli.output import Output, format_size, format_table, with_output
from gymfast.cli.sync.folders import naming_folder

if TYPE_CHECKING:
    from gymfast.sync.status import RunStatus

_EPILOG = """\b
Examples:
  gymfast sync status /mnt/weights --run demo
  gymfast sync status /mnt/weights --run demo --json
"""


@click.command("status", epilog=_EPILOG)
@store_argument
@run_option
@key_option
@with_output
def command(output: Output, store: str, run: str, key_file: Path | None) -> None:
    """Show versions, sizes and readers of a run.

    Only records and leases are read. A reader is listed with the oldest version it
    may still need: retention leaves that and everything after it alone.
    """
    from gymfast.stores import open_store
    from gymfast.sync.status import read_status

    with naming_folder(store):
        status = read_status(open_store(store), run, key=read_key(key_file))
    output.result(asdict(status), _to_text(status))


def _to_text(status: RunStatus) -> list[str]:
    now_s = time.time()
    rows = [
        (
            str(version.version),
            version.kind,
            format_size(version.frame_bytes),
            f"{version.num_changed}",
            _age(now_s - version.created_us / 1e6),
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


def _age(seconds: float) -> str:
    for limit, unit in ((120, 1), (7200, 60), (172_800, 3600)):
        if seconds < limit:
            return (
                f"{max(0, seconds) / unit:.0f} {'s' if unit == 1 else 'min' if unit == 60 else 'h'}"
            )
    return f"{seconds / 86_400:.0f} d"
