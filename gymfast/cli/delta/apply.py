"""`gymfast delta apply`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.delta.key import key_file_option, read_frame_key
from gymfast.cli.delta.source import check_checkpoint, check_frame, naming_frame
from gymfast.cli.files import check_output
from gymfast.cli.options import EXISTING, EXISTING_FILE, NEW, force_option, threads_option
from gymfast.cli.output import Output, with_output

if TYPE_CHECKING:
    from gymfast.delta.apply import ApplyReport

_HINT = "choose another name, or update BASE with --in-place"
_EPILOG = """\b
Examples:
  gymfast delta apply old.safetensors step.gfd -o new.safetensors
  gymfast delta apply old/ step.gfd -o new/ --json
  gymfast delta apply replica/ step.gfd --in-place
"""


@click.command("apply", epilog=_EPILOG)
@click.argument("base", type=EXISTING)
@click.argument("file", type=EXISTING_FILE)
@click.option("-o", "--output", "out", type=NEW, metavar="OUT", help="The new checkpoint.")
@click.option("--in-place", is_flag=True, help="Change BASE itself, crash-safely.")
@key_file_option("Refuse FILE unless encoded with")
@threads_option
@force_option
@with_output
def command(
    output: Output,
    base: Path,
    file: Path,
    out: Path | None,
    in_place: bool,
    key_file: Path | None,
    threads: int | None,
    force: bool,
) -> None:
    """Turn BASE into the next version with the frame FILE.

    Everything is checked before the first byte is written, and the result is
    exact or absent. With --in-place a journal makes an interrupted run
    repeatable: run the same command again. A frame applied twice is a no-op.
    """
    if in_place == (out is not None):
        raise click.UsageError("give either -o OUT or --in-place")
    if out is not None and base.is_file() and out.suffix != ".safetensors":
        raise click.UsageError(f"BASE is a file, so OUT is one: name it {out.name}.safetensors")
    from gymfast.delta import checkpoint

    key = read_frame_key(key_file)
    check_frame(file)
    check_checkpoint(base)
    with naming_frame(file), output.progress("apply") as advance:
        if out is None:
            report = checkpoint.apply_checkpoint_in_place(
                base, file, threads=threads, progress=advance, key=key
            )
        else:
            check_output(
                out,
                inputs={"BASE": base, "FILE": file},
                is_forced=force,
                is_directory=base.is_dir(),
                hint=_HINT,
            )
            report = checkpoint.apply_checkpoint(
                base, file, out, threads=threads, progress=advance, key=key, replace=force
            )
    output.result({"output": str(out or base), **_to_json(report)}, _to_text(out or base, report))


def _to_json(report: ApplyReport) -> dict[str, object]:
    return {
        "base_root": report.base_root.hex(),
        "new_root": report.new_root.hex(),
        "num_tensors": report.num_tensors,
        "num_changed": report.num_changed,
        "skipped": list(report.skipped),
        "added": list(report.added),
        "replaced": list(report.replaced),
        "removed": list(report.removed),
    }


def _to_text(path: Path, report: ApplyReport) -> list[str]:
    counts = {
        "added": report.added,
        "replaced": report.replaced,
        "removed": report.removed,
        "skipped": report.skipped,
    }
    lines = [f"{path}: {report.num_changed} units of {report.num_tensors} tensors changed"]
    lines += [f"{word}: {len(names)} tensors" for word, names in counts.items() if names]
    return [*lines, f"root {report.new_root.hex()}"]
