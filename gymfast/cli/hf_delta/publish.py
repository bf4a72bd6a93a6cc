"""`gymfast hf-delta publish`."""

from __future__ import annotations

from pathlib import Path

import click

from gymfast.cli.hf_delta.options import checksum_option, encoding_option, version_option
from gymfast.cli.hf_delta.published import published_fields, published_text
from gymfast.cli.options import EXISTING, NEW, threads_option
from gymfast.cli.output import Output, with_output

_EPILOG = """\b
Examples:
  gymfast hf-delta publish new/ --old old/ --source run/ --version 8
  gymfast hf-delta publish new/ --full --source run/ --version 9
"""


@click.command("publish", epilog=_EPILOG)
@click.argument("new", type=EXISTING)
@click.option("--old", type=EXISTING, help="The checkpoint of the version before, for a delta.")
@click.option("--full", "is_full", is_flag=True, help="A full version: a copy of NEW.")
@click.option("--source", type=NEW, required=True, help="Directory of the published versions.")
@version_option
@encoding_option
@checksum_option
@threads_option
@with_output
def command(
    output: Output,
    new: Path,
    old: Path | None,
    is_full: bool,
    source: Path,
    version: int | None,
    encoding: str,
    checksum: str,
    threads: int | None,
) -> None:
    """Write version N of --source: what turns --old into the checkpoint NEW.

    The version appears whole, with one rename, or not at all. Stock readers of
    the format accept it.
    """
    if is_full == (old is not None):
        raise click.UsageError("give either --old or --full")
    if version is None:
        raise click.UsageError("give --version")
    from gymfast.delta.hf_delta import publish_delta, publish_full

    with output.progress("publish") as advance:
        if old is None:
            report = publish_full(source, version, new, progress=advance)
        else:
            report = publish_delta(
                source,
                version,
                old,
                new,
                encoding=encoding,
                algorithm=checksum,
                threads=threads,
                progress=advance,
            )
    output.result(published_fields(report), published_text(report))
