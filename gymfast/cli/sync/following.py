"""What `pull` and `watch` share: a subscriber on a local checkpoint, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gymfast.cli.options import bwlimit_option, key_option, read_key, threads_option
from gymfast.cli.output import format_size
from gymfast.cli.sync.folders import no_folder
from gymfast.errors import CoverageError, NotFoundError

if TYPE_CHECKING:
    from gymfast.sync import InstallReport, Subscriber
    from gymfast.sync.signatures import Key

Command = Callable[..., Any]
STAGING_S = 60.0
"""How long a fetch goes on in which nothing arrives."""
_SHORTEST_SILENCE_S = 1.0

_OPTIONS = (
    click.option(
        "--force", is_flag=True, help="Replace DEST even if it has tensors of other names."
    ),
    click.option(
        "--staging-dir",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Stage frames in this folder.  [default: in memory]",
    ),
    click.option(
        "--reader",
        metavar="NAME",
        help="Name of this reader in the store.  [default: a new one with that of the host]",
    ),
    threads_option,
    bwlimit_option,
    key_option,
)


@dataclass(frozen=True)
class Reader:
    """What the options of a command say about the reader that it is."""

    name: str | None
    staging_dir: Path | None
    threads: int | None
    is_forced: bool
    key: Key | None
    max_bytes_per_s: int | None


def reader_options(command: Command) -> Command:
    """The options of a command that keeps a checkpoint; it gets them as one argument `reader`."""

    @wraps(command)
    def run(
        *args: Any,
        force: bool,
        staging_dir: Path | None,
        reader: str | None,
        threads: int | None,
        key_file: Path | None,
        bwlimit: int | None,
        **others: Any,
    ) -> None:
        found = Reader(reader, staging_dir, threads, force, read_key(key_file), bwlimit)
        command(*args, reader=found, **others)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


def silence_of(timeout_s: float | None) -> float | None:
    """How long a store may be silent in a command that ends after `timeout_s`; None without end."""
    return None if timeout_s is None else max(timeout_s, _SHORTEST_SILENCE_S)


@contextmanager
def open_subscriber(
    store: str,
    run: str,
    dest: Path,
    reader: Reader,
    *,
    report_s: float | None = None,
    timeout_s: float | None = None,
) -> Iterator[Subscriber]:
    """A subscriber of a run that keeps the checkpoint `dest`, closed at the end of the block.

    A `dest` that is there but no checkpoint is refused; one of other tensors too, unless forced.
    No wait for the store is longer than the `timeout_s` of the command, if it has one.
    """
    from gymfast.cli.delta.source import check_checkpoint
    from gymfast.stores import open_store
    from gymfast.sync import CheckpointTarget, Subscriber

    silence_s = silence_of(timeout_s)
    opened = open_store(store, silence_s=silence_s)

    if dest.is_file() or (dest.is_dir() and any(dest.iterdir())):
        check_checkpoint(dest)
    target = CheckpointTarget(dest, allow_new_names=reader.is_forced, threads=reader.threads)
    try:
        subscriber = Subscriber(
            *(opened, run, target),
            reader_id=reader.name,
            staging_dir=reader.staging_dir,
            timeout_s=STAGING_S if silence_s is None else min(silence_s, STAGING_S),
            report_s=report_s,
            key=reader.key,
            max_bytes_per_s=reader.max_bytes_per_s,
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
        raise NotFoundError(f"run '{run}' in {store}: {error}{no_folder(store)}") from error
    except CoverageError as error:
        raise CoverageError(f"{error} (--force does that)", error.number) from error


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
