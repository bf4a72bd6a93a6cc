"""`gymfast env`: the back ends that work here, and every GYMFAST_* variable with its origin."""

from __future__ import annotations

import os
from collections.abc import Callable

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
    """Show the back ends of the codec, and every GYMFAST_* variable.

    A back end that is missing says what to install.

    An option on the command line goes before the variable, the variable before
    the default. An unknown GYMFAST_* variable is a warning: it has no effect.
    """
    from gymfast.delta.backends import NAMES

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
    found = [_find(name) for name in NAMES if name != "auto"]
    backends = [{"name": n, "is_available": ok, "detail": detail} for n, ok, detail in found]
    lines = [
        (name, "yes" if is_available else "no", detail) for name, is_available, detail in found
    ]
    text = [*format_table(("back end", "works", "detail"), lines), "", *table]
    output.result({"backends": backends, "settings": settings, "unknown": unknown}, text)


def _find(name: str) -> tuple[str, bool, str]:
    """A back end's name, whether it can be made, and what it runs on or why it cannot."""
    from gymfast.delta.backends import select
    from gymfast.errors import MissingDependencyError

    try:
        select(name)
        return name, True, _DETAILS[name]()
    except MissingDependencyError as error:
        return name, False, str(error)
    except ValueError as error:  # a GYMFAST_CPU that names nothing
        return name, False, _cpu_choices(error)


def _cpu_choices(error: ValueError) -> str:
    from gymfast import _core

    value = os.environ.get("GYMFAST_CPU")
    if value is None or value in _core.cpu_targets():
        raise error
    return f"GYMFAST_CPU is {value!r}, expected one of {', '.join(_core.cpu_targets())}"


def _cpu() -> str:
    from gymfast import _core

    return f"C++, {_core.cpu_target()}"


def _cuda() -> str:
    from gymfast import _cuda

    return f"CUDA kernels, {_cuda.device_count()} devices"


def _triton() -> str:
    import torch
    import triton

    return f"triton {triton.__version__}, {torch.cuda.device_count()} devices"


_DETAILS: dict[str, Callable[[], str]] = {
    "cpu": _cpu,
    "reference": lambda: "NumPy",
    "cuda": _cuda,
    "triton": _triton,
}


def _describe(name: str, default: str) -> tuple[str, str, str]:
    value = os.environ.get(name)
    return (name, value, "environment") if value is not None else (name, default or "-", "default")
