"""The files that people name: refused unread, with a reason, if they are of another sort."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gymfast.errors import FormatError, NotFoundError

_BAD_MAGIC = 10
_BAD_AUTHENTICATION = 64
_ABOUT_FRAME = {*range(10, 60), _BAD_AUTHENTICATION}  # docs/wire-format.md section 8
_FRAME_START = b"GFDF\r\n\x1a"  # without the format version, which the parser judges
_TORCH = "as torch.save writes it; gymfast never unpickles: save the weights as safetensors"
_FOREIGN = (
    (b"PK\x03\x04", f"a zip archive, {_TORCH}"),
    (b"\x80", f"a pickle, {_TORCH}"),
    (b"\x28\xb5\x2f\xfd", "zstd data: decompress it first"),
    (b"GFDF", "a frame that a text-mode transfer has damaged: copy it again, as binary"),
)


@contextmanager
def naming_frame(path: Path) -> Iterator[None]:
    """Inside the block, an error about the bytes of a frame also says which file and what to do."""
    try:
        yield
    except FormatError as error:
        if error.number not in _ABOUT_FRAME or str(path) in str(error):
            raise
        text = f"{path}: {error}"
        if error.number != _BAD_AUTHENTICATION:
            text += "; copy the frame again, or encode it again"
        raise type(error)(text, error.number) from error


def check_frame(path: Path) -> None:
    """Refuse a file that does not begin like a frame, with the rest unread.

    Raises FormatError that says what the file looks like.
    """
    start = _read_start(path)
    if not start.startswith(_FRAME_START):
        found = "a safetensors file" if start[8:9] == b"{" else _describe(start)
        looks = f" (it looks like {found})" if found else ""
        text = f"{path} is no frame: it begins with {start[:8].hex(' ') or 'nothing'}, expected"
        raise FormatError(f"{text} {_FRAME_START.hex(' ')}{looks}", _BAD_MAGIC)


def check_checkpoint(path: Path) -> None:
    """Refuse a file that is plainly no safetensors file, or a directory without one, unread.

    Raises FormatError or NotFoundError that says what is there.
    """
    if path.is_dir():
        _check_directory(path)
        return
    start = _read_start(path)
    found = ""
    if start[8:9] != b"{":  # the size before the header may look like anything
        found = "a frame" if start.startswith(_FRAME_START) else _describe(start)
    if found:
        raise FormatError(f"{path} is no safetensors file: it looks like {found}")
    if path.suffix != ".safetensors":
        raise FormatError(f"{path} is no checkpoint: expected NAME.safetensors or a directory")


def _check_directory(path: Path) -> None:
    names = sorted(p.name for p in path.iterdir())
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return
    found = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise NotFoundError(
        f"{path} is no checkpoint: it holds {found or 'nothing'}, expected "
        "model.safetensors.index.json with its shards, or one safetensors file"
    )


def _read_start(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(16)


def _describe(start: bytes) -> str:
    return next((what for first, what in _FOREIGN if start.startswith(first)), "")
