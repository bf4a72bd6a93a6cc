"""What `gymfast sync status` shows of the readers of a run, once or as long as it is looked at."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gymfast.cli.output import Output, format_table
from gymfast.errors import DeadlineError, NotFoundError, StoreError

if TYPE_CHECKING:
    from rich.table import Table

    from gymfast.stores import Store
    from gymfast.sync.fleet import Fleet, ReaderRow
    from gymfast.sync.signatures import Key

HEADER = ("reader", "state", "version", "lag", "age", "last error")
_MAX_ERROR_CHARS = 60
_LOOK_S = 1.0  # that a look may take, however little time is left
_SILENCE_S = 60.0
Show = Callable[["Fleet"], None]


@dataclass(frozen=True)
class Goal:
    """What a command waits for; without version and number it waits for nothing."""

    version: int | None
    min_ready: int | None
    timeout_s: float | None

    @property
    def is_given(self) -> bool:
        """True if there is something to wait for."""
        return self.version is not None or self.min_ready is not None

    def is_met_by(self, fleet: Fleet) -> bool:
        """True if there is nothing to wait for any more."""
        return self.is_given and fleet.is_ready(self.version, self.min_ready)

    def left_s(self, start_s: float) -> float:
        """Seconds left of a wait that began then; infinite without a limit."""
        end_s = math.inf if self.timeout_s is None else start_s + self.timeout_s
        return max(0.0, end_s - time.monotonic())

    @property
    def silence_s(self) -> float | None:
        """How long a store may be silent, so that a second look is in time."""
        if self.timeout_s is None:
            return None
        return min(max(self.timeout_s / 2, _LOOK_S), _SILENCE_S)

    def require_in_time(self, start_s: float, fleet: Fleet | None, problem: str) -> None:
        """Raises DeadlineError that says how far the fleet is, once the time is over."""
        if self.left_s(start_s) == 0:
            raise self.failure(fleet, problem)

    def failure(self, fleet: Fleet | None, problem: str) -> DeadlineError:
        """The error that says how far the fleet is."""
        num = 0 if fleet is None else fleet.num_ready(self.version)
        total = 0 if fleet is None else len(fleet.readers)
        wanted = "all" if self.min_ready is None else f"{self.min_ready}"
        what = "ready" if self.version is None else f"ready with version {self.version}"
        why = f"; {problem}" if problem else ""
        return DeadlineError(
            f"{num} of {total} readers are {what} after {self.timeout_s:g} s, "
            f"expected {wanted}{why}"
        )


def fields_of(fleet: Fleet, version: int | None = None) -> dict[str, object]:
    """A fleet as JSON."""
    return {**asdict(fleet), "num_ready": fleet.num_ready(version)}


def lines_of(fleet: Fleet) -> list[str]:
    """A fleet as a table for people; no lines for one of no readers."""
    return format_table(HEADER, map(_cells, fleet.readers)) if fleet.readers else []


def watch(
    output: Output, store: Store, run: str, key: Key | None, *, interval_s: float, goal: Goal
) -> None:
    """Shows the fleet at each look, until the goal is met; for ever without one.

    Raises DeadlineError if it is not met in time, FormatError for records of another key.
    """
    from gymfast.sync.clock import SystemClock
    from gymfast.sync.fleet import FleetWatch
    from gymfast.sync.keys import RunKeys
    from gymfast.sync.log import Log
    from gymfast.sync.view import View

    clock = SystemClock()
    view, readers = View(Log(store, RunKeys(run), key), clock, None), FleetWatch(store, run, clock)

    def look() -> Fleet:
        view.refresh()
        if view.entries:
            view.advance(view.entries[-1].tip)
        return readers.look(view.newest)

    start_s, problem, fleet = time.monotonic(), "", None
    with _shown(output, goal) as show:
        while True:
            try:
                fleet, problem = _within(goal.left_s(start_s), look), ""
                show(fleet)
            except _SilentError:
                raise goal.failure(fleet, problem or f"{store.url} gives no answer") from None
            except StoreError as error:
                if str(error) != problem and not isinstance(error, NotFoundError):
                    output.remark(f"Warning: {error}; trying again")
                problem = str(error)
            if fleet is not None and not problem and goal.is_met_by(fleet):
                return
            goal.require_in_time(start_s, fleet, problem)
            time.sleep(min(interval_s, goal.left_s(start_s)))


class _SilentError(Exception):
    """A look did not end in time."""


def _within(limit_s: float, look: Callable[[], Fleet]) -> Fleet:
    """What a look finds; one that takes too long is left to itself."""
    if math.isinf(limit_s):
        return look()
    found: Future[Fleet] = Future()

    def work() -> None:
        try:
            found.set_result(look())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            found.set_exception(error)

    threading.Thread(target=work, name="gymfast-look", daemon=True).start()
    if not wait((found,), max(limit_s, _LOOK_S)).done:
        raise _SilentError
    return found.result(0)  # it is there


@contextmanager
def _shown(output: Output, goal: Goal) -> Iterator[Show]:
    """How a fleet is shown: as JSON, as a table that stays in its place, or as lines of changes."""
    if output.is_json:
        json = Output("sync.status.watch", is_json=True, has_progress=False)
        yield lambda fleet: json.result(fields_of(fleet, goal.version), ())
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            yield lambda fleet: live.update(_table(fleet, goal), refresh=True)
    else:
        yield _Changes(output).show


class _Changes:
    """Tells what has changed since the last look, a line each."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._newest: int | None = None
        self._before: dict[str, str] = {}

    def show(self, fleet: Fleet) -> None:
        lines = []
        if fleet.newest != self._newest:
            lines.append(f"run {fleet.run}: newest version {_or_none(fleet.newest)}")
        now = {row.reader: _sentence(row) for row in fleet.readers}
        lines += [f"{name}: {text}" for name, text in now.items() if self._before.get(name) != text]
        lines += [f"{name}: gone" for name in self._before if name not in now]
        self._newest, self._before = fleet.newest, now
        if lines:
            self._output.result({}, lines)


def _table(fleet: Fleet, goal: Goal) -> Table:
    from rich.table import Table
    from rich.text import Text

    newest = _or_none(fleet.newest)
    ready = f"{fleet.num_ready(goal.version)} of {len(fleet.readers)} ready"
    table = Table(title=Text(f"run {fleet.run}: newest version {newest}, {ready}"), box=None)
    for name in HEADER:
        table.add_column(name, justify="right" if name in ("version", "lag", "age") else "left")
    for row in fleet.readers:
        table.add_row(*map(Text, _cells(row)))
    return table


def _cells(row: ReaderRow) -> tuple[str, ...]:
    """What the table says of a reader, no cell empty."""
    version, lag = ("-" if value is None else str(value) for value in (row.version, row.lag))
    age = "-" if row.age_s is None else age_of(row.age_s)
    error = (
        row.error if len(row.error) <= _MAX_ERROR_CHARS else f"{row.error[:_MAX_ERROR_CHARS]}..."
    )
    return row.reader, _state(row), version, lag, age, error or "-"


def _state(row: ReaderRow) -> str:
    marks = [word for word, holds in (("silent", row.is_silent), ("stale", row.is_stale)) if holds]
    return row.state if row.state == "damaged" else " ".join([row.state, *marks])


def _sentence(row: ReaderRow) -> str:
    text = f"{_state(row)}, version {_or_none(row.version)}"
    if row.lag:
        text += f", {row.lag} behind"
    return f"{text}; last error: {row.error}" if row.error else text


def _or_none(version: int | None) -> str:
    return "none" if version is None else str(version)


def age_of(seconds: float) -> str:
    """A time for people, in its largest unit."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"
