"""`gymfast delta verify`."""

from __future__ import annotations

from pathlib import Path

import click

from gymfast.cli.delta.key import key_file_option, read_frame_key
from gymfast.cli.delta.source import check_checkpoint, check_frame, naming_frame
from gymfast.cli.options import EXISTING, EXISTING_FILE, threads_option
from gymfast.cli.output import Output, format_size, with_output

_EPILOG = """\b
Examples:
  gymfast delta verify step.gfd
  gymfast delta verify step.gfd --base old/
  gymfast delta verify step.gfd --base old/ --result new/ --json
"""


@click.command("verify", epilog=_EPILOG)
@click.argument("file", type=EXISTING_FILE)
@click.option("--base", type=EXISTING, help="A checkpoint: is it the base of the frame?")
@click.option("--result", type=EXISTING, help="A checkpoint: is it what the frame leads to?")
@key_file_option("Was FILE encoded with")
@threads_option
@with_output
def command(
    output: Output,
    file: Path,
    base: Path | None,
    result: Path | None,
    key_file: Path | None,
    threads: int | None,
) -> None:
    """Check the frame FILE, alone or against checkpoints.

    Alone: every section, length, limit and checksum of the frame, without
    applying it. With --base and --result the digests of all tensors of those
    checkpoints are computed and compared; the first that differs is named.
    """
    from gymfast.cli.delta.compare import check_base, check_result
    from gymfast.delta.checkpoint import digest_checkpoint
    from gymfast.delta.frame_file import verify_file

    key = read_frame_key(key_file)
    check_frame(file)
    with naming_frame(file):
        info = verify_file(file, threads=threads, key=key)
    lines = [
        f"{file}: a sound frame of {len(info.tensors)} tensors, {format_size(info.frame_bytes)}"
    ]
    if key is not None:
        lines.append(f"{file}: authentic, encoded with the key in {key_file}")
    for path, check, what in ((base, check_base, "base"), (result, check_result, "result")):
        if path is not None:
            check_checkpoint(path)
            with output.progress(f"read {what}") as advance:
                check(path, info, digest_checkpoint(path, threads=threads, progress=advance))
            lines.append(f"{path}: exactly the {what} of this frame")
    fields = {
        "frame_bytes": info.frame_bytes,
        "num_tensors": len(info.tensors),
        "base_root": info.base_root.hex(),
        "new_root": info.new_root.hex(),
        "is_authentic": None if key is None else True,
        "is_base": None if base is None else True,
        "is_result": None if result is None else True,
    }
    output.result(fields, lines)
