"""`gymfast delta inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.delta.source import check_frame, naming_frame
from gymfast.cli.options import EXISTING_FILE
from gymfast.cli.output import Output, format_size, format_table, with_output

if TYPE_CHECKING:
    from gymfast.delta.records import FrameInfo, TensorInfo

_EPILOG = """\b
Examples:
  gymfast delta inspect step.gfd
  gymfast delta inspect step.gfd --json
  gymfast delta inspect step.gfd --bytes
"""


@click.command("inspect", epilog=_EPILOG)
@click.argument("file", type=EXISTING_FILE)
@click.option("--bytes", "is_bytes", is_flag=True, help="Every field: offset, bytes, meaning.")
@with_output
def command(output: Output, file: Path, is_bytes: bool) -> None:
    """Show what the frame FILE holds.

    The columns are the tensor, its dtype and shape, its size, what the frame does
    with it, the bytes spent on it, and how many blocks use each mode.

    With --bytes a damaged frame is shown up to the place where it stops making
    sense, and then the error.
    """
    check_frame(file)
    with naming_frame(file):
        if is_bytes:
            _show_bytes(output, file)
            return
        from gymfast.delta.frame_file import inspect_file

        info = inspect_file(file)
    output.result(describe(info), _to_text(info))


def describe(info: FrameInfo) -> dict[str, object]:
    """A frame as JSON."""
    return {
        "profile": info.profile,
        "frame_bytes": info.frame_bytes,
        "base_root": info.base_root.hex(),
        "new_root": info.new_root.hex(),
        "authentication": info.authentication or None,
        "tensors": [_describe_tensor(tensor) for tensor in info.tensors],
    }


def _describe_tensor(tensor: TensorInfo) -> dict[str, object]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "num_bytes": tensor.num_bytes,
        "status": tensor.status,
        "num_blocks": tensor.num_blocks,
        "modes": dict(tensor.modes),
        "payload_bytes": tensor.payload_bytes,
    }


def _to_text(info: FrameInfo) -> list[str]:
    raw_bytes = sum(tensor.num_bytes for tensor in info.tensors)
    rows = [
        (
            tensor.name,
            tensor.dtype,
            "x".join(map(str, tensor.shape)) or "scalar",
            format_size(tensor.num_bytes),
            tensor.status,
            format_size(tensor.payload_bytes),
            " ".join(f"{mode}:{count}" for mode, count in tensor.modes.items() if count) or "-",
        )
        for tensor in info.tensors
    ]
    header = ("tensor", "dtype", "shape", "size", "status", "payload", "blocks")
    frame = f"a frame of {format_size(info.frame_bytes)}, profile {info.profile}"
    tag = [f"tag  {info.authentication}, checked only with a key"] if info.authentication else []
    return [
        *format_table(header, rows),
        "",
        f"{len(rows)} tensors, {format_size(raw_bytes)} of weights in {frame}",
        f"base {info.base_root.hex()}",
        f"new  {info.new_root.hex()}",
        *tag,
    ]


def _show_bytes(output: Output, file: Path) -> None:
    from gymfast.cli.delta.frame_bytes import format_field, walk
    from gymfast.delta.parse import open_source

    with open_source(file) as (source, _):
        for row in walk(source):
            where = {"offset": row.offset, "size": len(row.data)}
            output.result({**where, "name": row.name, "value": row.value}, format_field(row))
