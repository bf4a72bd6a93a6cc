"""`gymfast hf-delta inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.hf_delta.options import DIRECTORY
from gymfast.cli.output import Output, format_size, format_table, with_output

if TYPE_CHECKING:
    from gymfast.delta.hf_delta import DeltaVersion

_EPILOG = """\b
Examples:
  gymfast hf-delta inspect run/weight_v000007
  gymfast hf-delta inspect run/weight_v000007 --json
"""


@click.command("inspect", epilog=_EPILOG)
@click.argument("version", type=DIRECTORY)
@with_output
def command(output: Output, version: Path) -> None:
    """Show what the directory VERSION holds.

    For a delta: the changed tensors, the bytes stored for each, the digest of the
    new tensor and the file it is in. For a full version: its number of tensors.
    """
    from gymfast.delta.hf_delta import open_version, verify_version

    found = open_version(version)
    if found is None:
        num_tensors = verify_version(version).num_tensors
        fields = {"path": str(version), "is_full": True, "num_tensors": num_tensors}
        output.result(fields, [f"{version}: a full version of {num_tensors} tensors"])
        return
    with found:
        output.result(_to_json(found), _to_text(found))


def _to_json(version: DeltaVersion) -> dict[str, object]:
    return {
        "path": str(version.path),
        "is_full": False,
        "version": version.number,
        "base_version": version.base,
        "encoding": version.encoding,
        "checksum": version.algorithm,
        "stored_bytes": version.stored_bytes,
        "tensors": [
            {
                "name": tensor.name,
                "stored_bytes": tensor.num_bytes,
                "digest": tensor.digest,
                "file": version.file_of(tensor).name,
            }
            for tensor in version.tensors.values()
        ],
    }


def _to_text(version: DeltaVersion) -> list[str]:
    rows = [
        (tensor.name, format_size(tensor.num_bytes), tensor.digest, version.file_of(tensor).name)
        for tensor in version.tensors.values()
    ]
    size = format_size(version.stored_bytes)
    what = f"version {version.number} on {version.base}, {version.encoding}"
    return [
        *format_table(("tensor", "stored", version.algorithm, "file"), rows),
        "",
        f"{what}: {len(rows)} changed tensors, {size}",
    ]
