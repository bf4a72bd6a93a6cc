"""`gymfast env`: every GYMFAST_* variable with its value and where that comes from."""

from __future__ import annotations

import os

import click

from gymfast.cli.output import Output, format_table, with_output
from gymfast.cli.settings import SETTINGS, find_unknown

_EPILOG = """\b
Examples:
  gymfast env
  GYMFAST_THREADS=4 gymfast env --json
"""


@click.command("env", epilog=_EPILOG)
@with_output
def command(output: Output) -> None:
    """Show every GYMFAST_* variable: value and origin.

    An option on the command line goes before the variable, the variable before
    the default. An unknown GYMFAST_* variable is a warning: it has no effect.
    """
    rows = [_describe(setting.name, setting.default) for setting in SETTINGS]
    settings = [
        {"name": name, "value": value, "origin": origin, "flag": s.flag, "meaning": s.meaning}
        for (name, value, origin), s in zip(rows, SETTINGS, strict=True)
    ]
    table = format_table(
        ("name", "value", "origin", "option", "meaning"),
        [(*row, s.flag or "-", s.meaning) for row, s in zip(rows, SETTINGS, strict=True)],
    )
    unknown = [name for name, _ in find_unknown()]
    output.result({"settings": settings, "unknown": unknown}, table)


def _describe(name: str, default: str) -> tuple[str, str, str]:
    value = os.environ.get(name)
    return (name, value, "environment") if value is not None else (name, default or "-", "default")
