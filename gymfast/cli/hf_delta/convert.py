"""`gymfast hf-delta convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.delta.key import key_file_option, read_frame_key
from gymfast.cli.delta.source import check_frame, naming_frame
from gymfast.cli.files import check_output, new_file
from gymfast.cli.hf_delta.options import checksum_option, encoding_option, version_option
from gymfast.cli.hf_delta.published import published_fields, published_text
from gymfast.cli.options import EXISTING, NEW, force_option, profile_option, threads_option
from gymfast.cli.output import Output, format_size, with_output

if TYPE_CHECKING:
    from gymfast.delta.encode import Profile

_EPILOG = """\b
Examples:
  gymfast hf-delta convert run/weight_v000007 --base old/ -o step.gfd
  gymfast hf-delta convert step.gfd --base old/ --source run/ --version 7
"""


@click.command("convert", epilog=_EPILOG)
@click.argument("what", type=EXISTING)
@click.option("--base", type=EXISTING, required=True, help="The checkpoint of the version before.")
@click.option("-o", "--output", "out", type=NEW, metavar="FRAME", help="The frame to write.")
@click.option("--source", type=NEW, help="Directory of versions in which to publish.")
@version_option
@encoding_option
@checksum_option
@click.option("--full", "is_full", is_flag=True, help="Publish a full version, not a delta.")
@profile_option
@key_file_option("Write the frame with, or refuse one unless encoded with")
@threads_option
@force_option
@with_output
def command(
    output: Output,
    what: Path,
    base: Path,
    out: Path | None,
    source: Path | None,
    version: int | None,
    encoding: str,
    checksum: str,
    is_full: bool,
    profile: Profile,
    key_file: Path | None,
    threads: int | None,
    force: bool,
) -> None:
    """Turn the version directory WHAT into a frame, or the frame WHAT into a version.

    Both lead from --base to the same state, bit for bit: the small frames cross
    the wide area network, and the engine's host still sees the stock format. A
    copy of the checkpoint is made beside the output and removed at the end.
    """
    if what.is_dir() != (out is not None) or what.is_dir() == (source is not None):
        raise click.UsageError("give -o FRAME for a version, --source and --version for a frame")
    from gymfast.delta.hf_delta import frame_of_version, version_of_frame

    key = read_frame_key(key_file)
    if out is not None:
        check_output(out, inputs={"WHAT": what, "BASE": base}, is_forced=force)
        with output.progress("convert") as advance, new_file(out, is_forced=force) as stream:
            stats = frame_of_version(
                base,
                what,
                stream,
                out.with_name(f"{out.name}.state"),
                profile=profile,
                threads=threads,
                progress=advance,
                key=key,
            )
        fields = {"output": str(out), "frame_bytes": stats.frame_bytes}
        output.result(fields, [f"{out}: a frame of {format_size(stats.frame_bytes)}"])
        return
    if source is None or version is None:
        raise click.UsageError("give --version")
    check_frame(what)
    with naming_frame(what), output.progress("convert") as advance:
        report = version_of_frame(
            base,
            what,
            source,
            version,
            encoding=encoding,
            algorithm=checksum,
            is_full=is_full,
            threads=threads,
            progress=advance,
            key=key,
        )
    output.result(published_fields(report), published_text(report))
