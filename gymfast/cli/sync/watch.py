"""`gymfast sync watch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import NEW, FiniteRange, run_option, store_argument
from gymfast.cli.output import Output, format_size, with_output
from gymfast.cli.sync.folders import no_folder
from gymfast.cli.sync.following import (
    Reader,
    install_fields,
    install_text,
    open_subscriber,
    reader_options,
    silence_of,
)
from gymfast.errors import (
    ChainError,
    ConflictError,
    DeadlineError,
    FormatError,
    GymfastError,
    StoreError,
)

if TYPE_CHECKING:
    from gymfast.sync import Subscriber
    from gymfast.sync.log import Log
    from gymfast.sync.manifest import VersionRecord
    from gymfast.sync.signatures import Key

_WAIT_S = 3600.0  # for a version, before another wait begins: as good as for ever
_PASSING = (StoreError, FormatError, ChainError)

_EPILOG = """\b
Examples:
  gymfast sync watch /mnt/weights replica/ --run demo
  gymfast sync watch /mnt/weights --run demo --json
  gymfast sync watch /mnt/weights replica/ --run demo --until 20 --timeout 600
"""


@click.command("watch", epilog=_EPILOG)
@store_argument
@click.argument("dest", type=NEW, required=False)
@run_option
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(min=0.01),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks at the store.",
)
@click.option("--until", type=click.IntRange(min=0), metavar="N", help="End with this version.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0),
    metavar="S",
    help="End (exit code 4) after S seconds without a new version.",
)
@reader_options
@with_output
def command(
    output: Output,
    store: str,
    dest: Path | None,
    run: str,
    interval_s: float,
    until: int | None,
    timeout_s: float | None,
    reader: Reader,
) -> None:
    """Follow a run: pull each version as it appears.

    With DEST the checkpoint there is kept at the newest version, as by `gymfast
    sync pull`; one line (or JSON object) is printed for each install. A damaged
    object or a store that fails is a warning: DEST keeps its version and the next
    look tries again. What DEST holds is told in the store, for gymfast sync
    status. Without DEST the versions are only listed.
    """
    if hint := no_folder(store):
        output.remark(f"Warning: run '{run}' is not in {store} yet{hint}; waiting for it")
    looks = _Looks(output, interval_s, timeout_s, until)
    if dest is None:
        _list_versions(output, looks, _open_log(store, run, reader.key, timeout_s))
        return
    from gymfast.sync.reader_status import period_s

    with open_subscriber(
        *(store, run, dest, reader), report_s=period_s(), timeout_s=timeout_s
    ) as subscriber:
        _follow(output, looks, subscriber, dest)


@dataclass
class _Looks:
    """When to look at the store again, and when to end; `version` is the newest one told."""

    output: Output
    interval_s: float
    timeout_s: float | None
    until: int | None
    version: int | None = None
    problem: str = ""
    moved_s: float = field(default_factory=time.monotonic)

    def __iter__(self) -> Iterator[float]:
        """The seconds that a look may wait for a version, one look per interval at most.

        Raises DeadlineError when no new version came for too long.
        """
        while True:
            begin_s = time.monotonic()
            yield self._left_s
            if self.until is not None and self.version is not None and self.version >= self.until:
                return
            idle_s = time.monotonic() - self.moved_s
            if self.timeout_s is not None and idle_s >= self.timeout_s:
                after = "" if self.version is None else f" after version {self.version}"
                why = f"; {self.problem}" if self.problem else ""
                raise DeadlineError(f"no new version{after} within {self.timeout_s:g} s{why}")
            rest_s = begin_s + self.interval_s - time.monotonic()
            time.sleep(max(0.0, min(rest_s, self._left_s)))

    @property
    def _left_s(self) -> float:
        if self.timeout_s is None:
            return _WAIT_S
        return max(0.0, self.moved_s + self.timeout_s - time.monotonic())

    def move(self, version: int) -> None:
        """That version is told: the time without a new one starts again."""
        if version != self.version:
            self.version, self.problem, self.moved_s = version, "", time.monotonic()

    def warn(self, error: GymfastError) -> None:
        """Tell a problem that may pass, once."""
        if str(error) != self.problem:
            self.problem = str(error)
            self.output.remark(f"Warning: {error}; trying again")


def _follow(output: Output, looks: _Looks, subscriber: Subscriber, dest: Path) -> None:
    for limit_s in looks:
        held = subscriber.version
        # What DEST holds at first is told as well, for --until.
        wanted = 0 if held is None or looks.version is None else held + 1
        try:
            report = subscriber.wait(wanted, limit_s, interval_s=looks.interval_s)
        except ConflictError:
            raise
        except DeadlineError as error:
            newest = subscriber.status.newest
            if newest is not None and (held is None or newest > held):  # its frame does not come
                looks.warn(error)
            continue
        except _PASSING as error:
            looks.warn(error)
            continue
        if report.kind != "nothing":
            output.result(install_fields(dest, report), install_text(dest, report))
        looks.move(report.version)


def _open_log(store: str, run: str, key: Key | None, timeout_s: float | None) -> Log:
    from gymfast.stores import open_store
    from gymfast.sync.keys import RunKeys
    from gymfast.sync.log import Log

    return Log(open_store(store, silence_s=silence_of(timeout_s)), RunKeys(run), key)


def _list_versions(output: Output, looks: _Looks, log: Log) -> None:
    from gymfast.sync.clock import SystemClock
    from gymfast.sync.manifest import VersionRecord
    from gymfast.sync.view import View

    view = View(log, SystemClock(), None)
    for _ in looks:
        try:
            view.refresh()
        except _PASSING as error:
            looks.warn(error)
            continue
        for entry in view.entries:
            record = entry.record
            is_new = looks.version is None or (entry.tip.version or 0) > looks.version
            if isinstance(record, VersionRecord) and is_new:
                output.result(_version_fields(record), [_version_text(record)])
                looks.move(record.version)
        if view.entries and looks.version is not None:
            view.advance(view.entries[-1].tip)


def _version_fields(record: VersionRecord) -> dict[str, object]:
    return {
        "version": record.version,
        "kind": record.kind,
        "root": record.root,
        "raw_bytes": record.raw_bytes,
        "frame_bytes": record.frame.num_bytes,
        "num_changed": record.num_changed,
        "created_us": record.created_us,
    }


def _version_text(record: VersionRecord) -> str:
    return (
        f"version {record.version}: {record.kind} of {format_size(record.frame.num_bytes)} for "
        f"{format_size(record.raw_bytes)} of weights, {record.num_changed} units changed"
    )
