"""Files of a checkpoint copied one by one, each whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

from gymfast.delta.checkpoint_stream import Meter
from gymfast.delta.files import open_regular, read_into, write_all
from gymfast.delta.journal import journal_path
from gymfast.delta.temporary import make_temporary, sweep

_COPY_BYTES = 2**23


def files_of(seed: Path) -> dict[str, Path]:
    """The files of a checkpoint directory that go along to a copy of it, by name."""
    journal = journal_path(seed).name
    return {p.name: p for p in sorted(seed.iterdir()) if p.is_file() and p.name != journal}


def copy_file(source: Path, out: Path, meter: Meter) -> None:
    """Copies a file to `out`, durably; what was there is replaced by rename. Raises OSError."""
    sweep(out)
    fd = open_regular(source)
    try:
        temporary, out_fd = make_temporary(out)
        try:
            num_bytes = os.fstat(fd).st_size
            buffer = memoryview(bytearray(min(_COPY_BYTES, num_bytes)))
            for start in range(0, num_bytes, _COPY_BYTES):
                piece = buffer[: num_bytes - start]
                read_into(fd, piece, start, source)
                write_all(out_fd, piece, start)
                meter.add(len(piece))
            os.fsync(out_fd)
            temporary.replace(out)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(out_fd)
    finally:
        os.close(fd)
