"""`gymfast sync compact`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import (
    NEW,
    FiniteRange,
    bwlimit_option,
    key_option,
    read_key,
    run_option,
    store_argument,
    threads_option,
)
from gymfast.cli.output import Output, format_size, with_output
from gymfast.cli.sync.folders import naming_folder, no_folder
from gymfast.errors import ChainError, ConflictError, FormatError, GymfastError, StoreError

if TYPE_CHECKING:
    from gymfast.sync import Compactor, FoldReport

_PASSING = (StoreError, FormatError, ChainError)

_EPILOG = """\b
Examples:
  gymfast sync compact /mnt/weights replicas/ --run demo
  gymfast sync compact /mnt/weights replicas/ --run demo --anchors 64 --once
"""


@click.command("compact", epilog=_EPILOG)
@store_argument
@click.argument("folder", type=NEW)
@run_option
@click.option(
    "--every",
    type=click.IntRange(min=2),
    default=8,
    show_default=True,
    metavar="K",
    help="Versions of the shortest fold.",
)
@click.option(
    "--levels",
    type=click.IntRange(min=1, max=8),
    default=2,
    show_default=True,
    metavar="N",
    help="Lengths of folds: K, K x K, and so on.",
)
@click.option(
    "--anchors",
    type=click.IntRange(min=2),
    metavar="M",
    help="Offer a full state every M versions, a multiple of K.  [default: none]",
)
@click.option("--once", is_flag=True, help="Fold what is published, then end.")
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(min=0.01),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks at the store.",
)
@threads_option
@bwlimit_option
@key_option
@with_output
def command(
    output: Output,
    store: str,
    folder: Path,
    run: str,
    every: int,
    levels: int,
    anchors: int | None,
    once: bool,
    interval_s: float,
    threads: int | None,
    bwlimit: int | None,
    key_file: Path | None,
) -> None:
    """Fold many versions into one frame, for readers far behind.

    A reader that starts late, or has missed many versions, takes the cheapest set of
    folds, deltas and full states; one that keeps up is not concerned. FOLDER keeps
    N + 1 checkpoints of the run. One line (or JSON object) is printed for each fold.
    """
    from gymfast.sync import Compactor

    if anchors is not None and anchors % every:
        raise click.UsageError(f"--anchors {anchors} is no multiple of --every {every}")
    key = read_key(key_file)
    if hint := no_folder(store):
        output.remark(f"Warning: run '{run}' is not in {store} yet{hint}")
    with (
        naming_folder(store),
        Compactor(
            *(store, run, folder),
            every=every,
            levels=levels,
            anchor_every=anchors,
            threads=threads,
            max_bytes_per_s=bwlimit,
            key=key,
        ) as compactor,
    ):
        if once:
            _work(output, compactor)
            return
        _watch(output, compactor, interval_s)


def _work(output: Output, compactor: Compactor) -> None:
    num_told = len(compactor.skipped)
    try:
        for report in compactor.work():
            output.result(asdict(report), [_to_text(report)])
    finally:
        for skip in compactor.skipped[num_told:]:
            what = f"versions {skip.first} to {skip.last} are not folded"
            output.remark(f"Warning: {what}: {skip.reason}")


def _watch(output: Output, compactor: Compactor, interval_s: float) -> None:
    problem = ""
    while True:
        try:
            _work(output, compactor)
            problem = ""
        except ConflictError:
            raise
        except _PASSING as error:
            problem = _warn_once(output, error, problem)
        time.sleep(interval_s)


def _warn_once(output: Output, error: GymfastError, before: str) -> str:
    if str(error) != before:
        output.remark(f"Warning: {error}; trying again")
    return str(error)


def _to_text(report: FoldReport) -> str:
    size = format_size(report.frame_bytes)
    if report.base_version < 0:
        return f"full state of version {report.version}: {size}"
    return (
        f"fold of versions {report.base_version + 1} to {report.version}: {size} in place of "
        f"{report.replaced_frames} frames of {format_size(report.replaced_bytes)}"
    )
