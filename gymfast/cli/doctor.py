"""`gymfast doctor`: what of optional parts is found on this machine, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gymfast.cli.output import Output, format_table, with_output

if TYPE_CHECKING:
    from gymfast._core import NcclLibrary

_EPILOG = """\b
Examples:
  gymfast doctor nccl
  gymfast doctor nccl --library /opt/nccl/lib/libnccl.so.2 --json
"""


_CALLS = {"window": "ncclCommWindowRegister", "buffer": "ncclCommRegister"}


@click.group(epilog=_EPILOG)
def command() -> None:
    """Look for optional parts and say what is there."""


@command.command("nccl", epilog=_EPILOG)
@click.option("--library", default="", metavar="PATH", help="Look at this libnccl.so.2.")
@click.option("--cuda-library", default="", metavar="PATH", help="Take this libcudart.so.")
@with_output
def nccl(output: Output, library: str, cuda_library: str) -> None:
    """Show the NCCL that transfers between GPUs would use, and its settings.

    The exit code is 1 if there is none that gymfast can use.
    """
    from gymfast.channels.nccl_library import (
        load,
        registrations_of,
        settings,
        warn_of_expandable_segments,
    )
    from gymfast.errors import MissingDependencyError

    found, problem = None, ""
    try:
        found = load(library, cuda_library)
    except MissingDependencyError as error:
        problem = str(error)
    driver, num_gpus, cuda_problem = _cuda(found) if found else ("-", 0, "")
    ways = registrations_of(found) if found and not found.cuda_problem else ()
    variables = settings()
    fields = {
        "version": found.version if found else None,
        "path": found.path if found else None,
        "features": found.features if found else [],
        "registration": ways[0] if ways else None,
        "cuda_path": found.cuda_path or None if found else None,
        "cuda_problem": cuda_problem,
        "driver": driver,
        "num_gpus": num_gpus,
        "settings": variables,
        "has_expandable_segments": warn_of_expandable_segments(),
    }
    rows = [
        ("NCCL", f"{found.version} at {found.path}" if found else "none"),
        ("features", ", ".join(found.features) if found else "-"),
        ("registration", _CALLS[ways[0]] if ways else "none"),
        ("CUDA runtime", (found.cuda_path if found else "") or "none"),
        ("CUDA driver", driver),
        ("GPUs", f"{num_gpus}{f' ({cuda_problem})' if cuda_problem else ''}"),
        *variables.items(),
    ]
    output.result(fields, format_table(("what", "found"), rows))
    if problem:
        output.fail(problem, MissingDependencyError.exit_code)


def _cuda(library: NcclLibrary) -> tuple[str, int, str]:
    """The newest CUDA that the driver knows, how many GPUs there are, and what is wrong."""
    from gymfast.errors import ChannelError

    if library.cuda_problem:
        return "-", 0, library.cuda_problem
    version = library.driver_version()
    driver = f"{version // 1000}.{version % 1000 // 10}" if version else "none"
    try:
        return driver, library.device_count(), ""
    except ChannelError as error:
        return driver, 0, str(error)
