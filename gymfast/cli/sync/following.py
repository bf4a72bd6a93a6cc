"""What `pull` and `watch` share: a subscriber on a local checkpoint, and how it is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.output import format_size
from gymfast.errors import CoverageError, NotFoundError

if TYPE_CHECKING:
    from gymfast.sync import InstallReport, Subscriber

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0

reader_option = click.option(
    "--reader", metavar="NAME", help="Name of this reader in leases.  [default: a random one]"
)
force_option = click.option(
    "--force", is_flag=True, help="Replace DEST even if it has tensors of other names."
)
staging_option = click.option(
    "--staging-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Stage frames in this folder.  [default: in memory]",
)


@contextmanager
def open_subscriber(
    store: str,
    run: str,
    dest: Path,
    *,
    reader_id: str | None,
    staging_dir: Path | None,
    threads: int | None,
    is_forced: bool,
    key: bytes | None,
) -> Iterator[Subscriber]:
    """A subscriber of a run that keeps the checkpoint `dest`, closed at the end of the block.

    A `dest` that is there but no checkpoint is refused; one of other tensors too, unless forced.
    """
    from gymfast.cli.delta.source import check_checkpoint
    from gymfast.sync import CheckpointTarget, Subscriber

    if dest.is_file() or (dest.is_dir() and any(dest.iterdir())):
        check_checkpoint(dest)
    target = CheckpointTarget(dest, allow_new_names=is_forced, threads=threads)
    try:
        subscriber = Subscriber(
            store, run, target, reader_id=reader_id, staging_dir=staging_dir, key=key
        )
    except BaseException:
        target.close()
        raise
    with subscriber:
        yield subscriber


@contextmanager
def naming_run(store: str, run: str) -> Iterator[None]:
    """Inside the block, errors also say where a version was looked for, and what option helps."""
    try:
        yield
    except NotFoundError as error:
        raise NotFoundError(f"run '{run}' in {store}: {error}") from error
    except CoverageError as error:
        raise CoverageError(f"{error} (--force does that)", error.number) from error


def wait_until_visible(subscriber: Subscriber, version: int, timeout_s: float) -> None:
    """Return once that version, or a newer one, is published; DeadlineError if it does not come."""
    from gymfast.sync.clock import Deadline, SystemClock

    deadline = Deadline(SystemClock(), timeout_s)
    for _ in deadline.pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
        newest = subscriber.poll()
        if newest is not None and newest >= version:
            return
    deadline.require(f"waiting for version {version}")


def install_fields(dest: Path, report: InstallReport) -> dict[str, object]:
    """An install as JSON."""
    return {"dest": str(dest), **asdict(report)}


def install_text(dest: Path, report: InstallReport) -> list[str]:
    """An install for people."""
    if report.kind == "nothing":
        return [f"{dest}: holds version {report.version} already"]
    how = "a full state" if report.kind == "anchor" else ""
    if report.num_deltas:
        deltas = f"{report.num_deltas} delta{'s' if report.num_deltas > 1 else ''}"
        how = f"{how} and {deltas}" if how else deltas
    before = "" if report.from_version is None else f" from version {report.from_version}"
    phases = ", ".join(f"{n} {s:.2f}" for n, s in asdict(report.seconds).items() if s >= 0.005)
    size = f"{format_size(report.num_bytes)}, {report.num_changed} units changed"
    seconds = f"seconds: {phases or 'under 0.01'}"
    return [f"{dest}: version {report.version}{before} by {how} of {size}; {seconds}"]
