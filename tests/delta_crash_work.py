"""Functions that tests/delta/test_in_place_crash.py kills and fails at each system call."""

from __future__ import annotations

from pathlib import Path

from gymfast.delta.backends import select
from gymfast.delta.checkpoint import apply_checkpoint, apply_checkpoint_in_place, recover

select("auto")  # loads the extension module now, so that its files are no points of the tests


def update(folder: str) -> None:
    """An in-place update of `base` by `frame`."""
    apply_checkpoint_in_place(Path(folder, "base"), Path(folder, "frame"), threads=1)


def write_new(folder: str) -> None:
    """A new checkpoint `out` from `base` and `frame`."""
    apply_checkpoint(Path(folder, "base"), Path(folder, "frame"), Path(folder, "out"), threads=1)


def replace(folder: str) -> None:
    """A new checkpoint from `base` and `frame` in the place of the one at `out`."""
    base, frame, out = (Path(folder, name) for name in ("base", "frame", "out"))
    apply_checkpoint(base, frame, out, threads=1, replace=True)


def complete(folder: str) -> None:
    """The recovery of an update that was killed half way."""
    recover(Path(folder, "base"))
