"""The function that tests/delta/test_hf_delta_crash.py kills and fails at each system call."""

from __future__ import annotations

from pathlib import Path

from gymfast.delta.hf_delta.digests import HEX_DIGITS, new_hasher
from gymfast.delta.hf_delta.pull import pull
from gymfast.delta.hf_delta.zstd_frame import load_zstd

load_zstd()  # now, so that the files of the modules are no points of the tests
for algorithm in HEX_DIGITS:
    new_hasher(algorithm)


def follow(folder: str) -> None:
    """A pull of version 3 into `local` of the folder."""
    pull(Path(folder, "local"), Path(folder, "base"), Path(folder, "versions"), 3)
