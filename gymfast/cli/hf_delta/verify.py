"""`gymfast hf-delta verify`."""

from __future__ import annotations

from pathlib import Path

import click

from gymfast.cli.hf_delta.options import DIRECTORY
from gymfast.cli.options import EXISTING
from gymfast.cli.output import Output, with_output

_EPILOG = """\b
Examples:
  gymfast hf-delta verify run/weight_v000007
  gymfast hf-delta verify run/weight_v000007 --base old/
  gymfast hf-delta verify replica/ --json
"""


@click.command("verify", epilog=_EPILOG)
@click.argument("directory", type=DIRECTORY)
@click.option("--base", type=EXISTING, help="The checkpoint that the version builds on.")
@with_output
def command(output: Output, directory: Path, base: Path | None) -> None:
    """Check DIRECTORY: a published version, or a local checkpoint after pulls.

    A version: every header, limit and frame; with --base the digests of all
    tensors it leads to as well. A local checkpoint: every tensor against the
    digest noted by the last pull, so that rot anywhere is found.
    """
    from gymfast.delta.hf_delta import verify_local, verify_version
    from gymfast.delta.hf_delta.state import SYNC_DIR

    is_local = (directory / SYNC_DIR).is_dir()
    if is_local and base is not None:
        raise click.UsageError("--base is for a published version, not for a local checkpoint")
    with output.progress("verify") as advance:
        if is_local:
            found = verify_local(directory, progress=advance)
        else:
            found = verify_version(directory, base, progress=advance)
    fields = {
        "path": str(directory),
        "is_local": is_local,
        "is_full": found.is_full,
        "version": found.version,
        "num_tensors": found.num_tensors,
        "digests_compared": found.digests_compared,
    }
    if is_local:
        text = f"holds version {found.version}, {found.digests_compared} tensors as noted"
    elif found.is_full:
        text = f"a sound full version of {found.num_tensors} tensors"
    elif base is None:
        text = f"a sound version {found.version} of {found.num_tensors} changed tensors"
    else:
        text = f"version {found.version} of {base}, {found.digests_compared} digests are right"
    output.result(fields, [f"{directory}: {text}"])
