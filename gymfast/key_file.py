"""Files that hold a key."""

from __future__ import annotations

from pathlib import Path


def read_key_file(path: Path | str) -> bytes:
    """The key in a file: its bytes, without one line end (LF or CRLF) if it ends with one.

    Nothing else is left out: any key can be written exactly, with CRLF behind it.
    Raises OSError. How long a key has to be is for whoever uses it to say.
    """
    key = Path(path).read_bytes()
    return key.removesuffix(b"\r\n" if key.endswith(b"\r\n") else b"\n")
