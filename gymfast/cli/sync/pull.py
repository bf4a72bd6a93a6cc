"""`gymfast sync pull`."""

from __future__ import annotations

from pathlib import Path

import click

from gymfast.cli.options import NEW, FiniteRange, run_option, store_argument
from gymfast.cli.output import Output, with_output
from gymfast.cli.sync.following import (
    Reader,
    install_fields,
    install_text,
    naming_run,
    open_subscriber,
    reader_options,
)

_LOOK_EVERY_S = 0.25

_EPILOG = """\b
Examples:
  gymfast sync pull /mnt/weights replica/ --run demo
  gymfast sync pull /mnt/weights replica.safetensors --run demo --json
  gymfast sync pull /mnt/weights replica/ --run demo --version 41 --timeout 60
"""


@click.command("pull", epilog=_EPILOG)
@store_argument
@click.argument("dest", type=NEW)
@run_option
@click.option(
    "--version",
    type=click.IntRange(min=0),
    metavar="N",
    help="The version to hold, none older than DEST holds.  [default: the newest]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0),
    default=0.0,
    metavar="S",
    help="Seconds to wait for a version that is not there yet, or a store that does not answer.  "
    "[default: 0, and as the store does]",
)
@reader_options
@with_output
def command(
    output: Output,
    store: str,
    dest: Path,
    run: str,
    version: int | None,
    timeout_s: float,
    reader: Reader,
) -> None:
    """Bring the checkpoint DEST to a version, exactly.

    DEST is a safetensors file or a directory; it need not be there. What it holds
    is found out from its bytes: a known version is updated with deltas, in place
    and crash-safely, anything else is replaced by a full state. All frames are
    checked before DEST is touched, and DEST is checked after.

    Exit code 5: there is no such version (yet).
    """
    limit_s = timeout_s or None
    with (
        open_subscriber(store, run, dest, reader, timeout_s=limit_s) as subscriber,
        naming_run(store, run),
        output.progress("pull") as advance,
    ):
        if limit_s is None:
            report = subscriber.pull(version, advance=advance)
        else:
            report = subscriber.wait(
                *(version or 0, limit_s),
                interval_s=_LOOK_EVERY_S,
                is_exact=version is not None,
                advance=advance,
            )
    output.result(install_fields(dest, report), install_text(dest, report))
