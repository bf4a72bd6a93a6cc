"""The files that people name: refused unread, with a reason, if they are of another sort."""

from __future__ import annotations

from pathlib import Path

from gymfast.delta.records import MAGIC
from gymfast.errors import FormatError

_BAD_MAGIC = 10
_FRAME_START = MAGIC[:-1]  # without the format version, which the parser judges
_TORCH = "as torch.save writes it; gymfast never unpickles: save the weights as safetensors"
_FOREIGN = (
    (b"PK\x03\x04", f"a zip archive, {_TORCH}"),
    (b"\x80", f"a pickle, {_TORCH}"),
    (b"\x28\xb5\x2f\xfd", "zstd data: decompress it first"),
    (b"GFDF", "a frame that a text-mode transfer has damaged: copy it again, as binary"),
)
_INDEX = "model.safetensors.index.json"


def read_frame(path: Path) -> bytes:
    """The bytes of a file that begins like a frame; FormatError, with the rest unread, else."""
    check_frame(path)
    return path.read_bytes()


def check_frame(path: Path) -> None:
    """Refuse a file that does not begin like a frame, with the rest unread.

    Raises FormatError that says what the file looks like.
    """
    start = _read_start(path)
    if not start.startswith(_FRAME_START):
        found = _describe(start) or ("a safetensors file" if start[8:9] == b"{" else "")
        looks = f" (it looks like {found})" if found else ""
        text = f"{path} is no frame: it begins with {start[:8].hex(' ') or 'nothing'}, expected"
        raise FormatError(f"{text} {_FRAME_START.hex(' ')}{looks}", _BAD_MAGIC)


def check_checkpoint(path: Path) -> None:
    """Refuse a file that is plainly no safetensors file, or a directory without one, unread.

    Raises FormatError that says what the file looks like.
    """
    if path.is_dir():
        _check_directory(path)
        return
    start = _read_start(path)
    found = "a frame" if start.startswith(_FRAME_START) else _describe(start)
    if found:
        raise FormatError(f"{path} is no safetensors file: it looks like {found}")


def _check_directory(path: Path) -> None:
    if (path / _INDEX).exists() or (path / "model.safetensors").exists():
        return
    others = sorted(p.name for p in path.iterdir())
    found = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    raise FormatError(
        f"{path} is no checkpoint: it holds {found or 'nothing'}, expected {_INDEX} with the "
        "shards it names, or model.safetensors"
    )


def _read_start(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(16)


def _describe(start: bytes) -> str:
    return next((what for first, what in _FOREIGN if start.startswith(first)), "")
