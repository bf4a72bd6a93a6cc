"""`gymfast delta encode`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.delta.key import key_file_option, read_frame_key
from gymfast.cli.delta.source import check_checkpoint
from gymfast.cli.files import check_output, new_file
from gymfast.cli.options import EXISTING, NEW, force_option, profile_option, threads_option
from gymfast.cli.output import Output, format_size, with_output

if TYPE_CHECKING:
    from gymfast.delta.encode import EncodeStats, Profile

_EPILOG = """\b
Examples:
  gymfast delta encode old.safetensors new.safetensors -o step.gfd
  gymfast delta encode old/ new/ -o step.gfd --profile small --threads 4
  gymfast delta encode old/ new/ -o step.gfd --tiled --json
"""


@click.command("encode", epilog=_EPILOG)
@click.argument("old", type=EXISTING)
@click.argument("new", type=EXISTING)
@click.option("-o", "--output", "out", type=NEW, required=True, metavar="FILE", help="The frame.")
@profile_option
@threads_option
@click.option("--tiled", is_flag=True, help="Blocks that a tensor-parallel rank can take alone.")
@key_file_option("Authenticate FILE with")
@force_option
@with_output
def command(
    output: Output,
    old: Path,
    new: Path,
    out: Path,
    profile: Profile,
    threads: int | None,
    tiled: bool,
    key_file: Path | None,
    force: bool,
) -> None:
    """Write the frame that turns OLD into NEW.

    OLD and NEW are safetensors files or sharded checkpoint directories. They are
    read in pieces: memory stays far below the size of the weights.
    """
    from gymfast.delta.checkpoint import encode_checkpoint

    key = read_frame_key(key_file)
    check_output(out, inputs={"OLD": old, "NEW": new}, is_forced=force)
    check_checkpoint(old)
    check_checkpoint(new)
    with output.progress("encode") as advance, new_file(out, is_forced=force) as stream:
        stats = encode_checkpoint(
            *(old, new, stream),
            profile=profile,
            threads=threads,
            tiled=tiled,
            progress=advance,
            key=key,
        )
    fields = {
        "output": str(out),
        "raw_bytes": stats.raw_bytes,
        "frame_bytes": stats.frame_bytes,
        "num_units": stats.num_units,
        "num_changed": stats.num_changed,
        "seconds": stats.seconds,
    }
    output.result(fields, [_to_text(out, stats)])


def _to_text(out: Path, stats: EncodeStats) -> str:
    size_ratio = stats.frame_bytes / max(1, stats.raw_bytes)
    changed_ratio = stats.num_changed / max(1, stats.num_units)
    rate = stats.raw_bytes / 1e9 / max(1e-9, stats.seconds)
    return (
        f"{out}: {format_size(stats.frame_bytes)} for {format_size(stats.raw_bytes)} of weights "
        f"({size_ratio:.3%}), {changed_ratio:.3%} of the units changed, "
        f"{stats.seconds:.2f} s ({rate:.2f} GB/s)"
    )
