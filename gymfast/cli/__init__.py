"""The command line: `gymfast`. Nothing but click is imported until a command needs it."""

from __future__ import annotations

import click

from gymfast import __version__
from gymfast.cli.lazy import LazyGroup

EXIT_CODES = (
    (0, "ok"),
    (1, "failure: an unusable file, a full disk, an output that already exists"),
    (2, "usage: an unknown option, a missing argument, a file that is not there"),
    (3, "integrity: damaged or hostile bytes, the wrong base, a broken chain"),
    (4, "timeout"),
    (5, "not found, or not ready yet"),
    (6, "conflict: somebody else was first, or a newer publisher fenced this one"),
    (7, "quota: the work does not fit the memory or disk budget"),
    (130, "interrupted (Ctrl-C)"),
)

COMMANDS = {
    "delta": "Make, apply and look into frames.",
    "demo": "Train, publish, follow, break and heal, in about a minute.",
    "doctor": "Look for optional parts, such as NCCL, and say what is there.",
    "env": "Show every GYMFAST_* variable: value and origin.",
    "hf-delta": "Version directories as slime, miles and SGLang read them.",
    "integrations": "The frameworks that are here, and whether gymfast fits them.",
    "relay": "Serve a store to the readers of a site, fetched once.",
    "serve-pull": "Serve the pull endpoint of an engine over HTTP.",
    "plan": "Plan a weight transfer and predict its time.",
    "sim": "Fit laws of sandboxes to logs, and replay recorded runs.",
    "table": "What a weight sync costs, as published and corrected.",
    "sync": "Publish versions of a run, follow them, check and clean a store.",
}

_EPILOG = "\n".join(
    [
        "\b\nExamples:",
        "  gymfast delta encode old.safetensors new.safetensors -o step.gfd",
        "  gymfast delta apply old.safetensors step.gfd -o result.safetensors",
        "  gymfast sync publish /mnt/weights checkpoint/ --run demo",
        "  gymfast sync pull /mnt/weights replica/ --run demo",
        "",
        "\b\nExit codes:",
        *(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES),
        "",
        "\b\nData goes to stdout, progress and messages to stderr. With --json every",
        "command prints objects with a versioned `schema`, for errors too.",
    ]
)


@click.group(
    cls=LazyGroup,
    package="gymfast.cli",
    commands_help=COMMANDS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("-v", "--verbose", count=True, help="Log to stderr; given twice, debug messages too.")
@click.version_option(__version__, prog_name="gymfast", message="%(prog)s %(version)s")
def cli(verbose: int) -> None:
    """Fast, lossless weight sync for RL post-training."""
    from gymfast.cli.border import start_logging

    start_logging(verbose)


def main(args: list[str] | None = None) -> int:
    """Run the command line on `args` (default: those of the process); returns the exit code."""
    from gymfast.cli.border import run

    return run(cli, args)
