"""What a command says: data on stdout as text or JSON, progress and remarks on stderr."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Concatenate, NoReturn, ParamSpec, Protocol

import click

from gymfast.cli.border import StdoutError

P = ParamSpec("P")
PLAIN_EVERY_S = 10.0


class Advance(Protocol):
    """Tells a progress display how much is done of how much, in bytes (or steps)."""

    def __call__(self, done: int, total: int) -> None: ...


class Output:
    """The two streams of one command.

    `command` is the dotted name in the schema, for example `delta.encode`.
    """

    def __init__(self, command: str, *, is_json: bool, has_progress: bool) -> None:
        self.is_json = is_json
        self._schema = f"gymfast.{command}/1"
        self._has_progress = has_progress

    def result(self, fields: Mapping[str, object], text: Iterable[str]) -> None:
        """Print the data of the command: `fields` as one line of JSON, or the lines of `text`."""
        if self.is_json:
            text = [json.dumps({"schema": self._schema, **fields}, allow_nan=False)]
        try:
            print(*text, sep="\n", flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StdoutError(error.errno, error.strerror) from error

    def remark(self, text: str) -> None:
        """Print a line for people on stderr, never data."""
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            self._has_progress = False

    def fail(self, message: str, exit_code: int) -> NoReturn:
        """End the command after its result was printed: a message on stderr and the exit code."""
        self.remark(f"Error: {message}")
        raise click.exceptions.Exit(exit_code)

    @contextmanager
    def progress(self, label: str) -> Iterator[Advance]:
        """Show progress while the block runs: a bar on a terminal, else a line every 10 s."""
        if not self._has_progress:
            yield _ignore
        elif _is_terminal():
            with _bar(label) as advance:
                yield advance
        else:
            yield _plain(label, self.remark)


def with_output(function: Callable[Concatenate[Output, P], None]) -> Callable[P, None]:
    """Give a command the options --json and --no-progress, and an Output as first argument."""

    @click.option("--json", "is_json", is_flag=True, help="Print JSON, also for errors.")
    @click.option("--no-progress", is_flag=True, help="Show no progress on stderr.")
    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        is_json, no_progress = bool(kwargs.pop("is_json")), bool(kwargs.pop("no_progress"))
        path = click.get_current_context().command_path.split()[1:]
        output = Output(".".join(path), is_json=is_json, has_progress=not no_progress)
        _warn_of_unknown_variables(output)
        function(output, *args, **kwargs)

    return command


def format_size(size_bytes: int) -> str:
    """A size for people, in powers of 1000: `1.23 GB`."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{size_bytes} B" if unit == "B" else f"{value:.3g} {unit}"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns; columns of numbers are right-aligned."""
    cells = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_right = [
        len(cells) > 1 and all(text[:1].isdigit() or text == "-" for text in column[1:])
        for column in zip(*cells, strict=True)
    ]
    return [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, is_right, strict=True)
        ).rstrip()
        for row in cells
    ]


def _warn_of_unknown_variables(output: Output) -> None:
    from gymfast.cli.settings import find_unknown

    for name, hint in find_unknown():
        output.remark(f"Warning: {name} is no variable of gymfast{hint}; see: gymfast env")


def _is_terminal() -> bool:
    import os

    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _ignore(done: int, total: int) -> None:
    pass


def _plain(label: str, remark: Callable[[str], None]) -> Advance:
    last_s = time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= PLAIN_EVERY_S:
            last_s = now_s
            remark(f"{label}: {format_size(done)} of {format_size(total)}")

    return advance


@contextmanager
def _bar(label: str) -> Iterator[Advance]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
