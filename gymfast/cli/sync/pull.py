"""`gymfast sync pull`."""

from __future__ import annotations

from pathlib import Path

import click

from gymfast.cli.options import (
    NEW,
    key_option,
    read_key,
    run_option,
    store_argument,
    threads_option,
)
from gymfast.cli.output import Output, with_output
from gymfast.cli.sync.following import (
    force_option,
    install_fields,
    install_text,
    naming_run,
    open_subscriber,
    reader_option,
    staging_option,
    wait_until_visible,
)

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
    help="The version to hold.  [default: the newest]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="S",
    help="Seconds to wait for a version that is not there yet.  [default: 0]",
)
@force_option
@staging_option
@reader_option
@threads_option
@key_option
@with_output
def command(
    output: Output,
    store: str,
    dest: Path,
    run: str,
    version: int | None,
    timeout_s: float,
    force: bool,
    staging_dir: Path | None,
    reader: str | None,
    threads: int | None,
    key_file: Path | None,
) -> None:
    """Bring the checkpoint DEST to a version, exactly.

    DEST is a safetensors file or a directory; it need not be there. What it holds
    is found out from its bytes: a known version is updated with deltas, in place
    and crash-safely, anything else is replaced by a full state. All frames are
    checked before DEST is touched, and DEST is checked after.

    Exit code 5: there is no such version (yet).
    """
    with open_subscriber(
        *(store, run, dest),
        reader_id=reader,
        staging_dir=staging_dir,
        threads=threads,
        is_forced=force,
        key=read_key(key_file),
    ) as subscriber:
        if timeout_s > 0:
            wait_until_visible(subscriber, version or 0, timeout_s)
        with naming_run(store, run), output.progress("pull") as advance:
            report = subscriber.pull(version, advance=advance)
    output.result(install_fields(dest, report), install_text(dest, report))
