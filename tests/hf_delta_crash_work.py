"""The functions that tests/delta/test_hf_delta_crash.py kills and fails at each system call."""

from __future__ import annotations

from pathlib import Path

from gymfast.delta.backends import select
from gymfast.delta.hf_delta.digests import HEX_DIGITS, new_hasher
from gymfast.delta.hf_delta.publish import publish_delta, publish_full
from gymfast.delta.hf_delta.pull import pull
from gymfast.delta.hf_delta.zstd_frame import load_zstd

# Now, so that the files of the modules are no points of the tests.
select("auto")
load_zstd()
for algorithm in HEX_DIGITS:
    new_hasher(algorithm)


def follow(folder: str) -> None:
    """A pull of version 3 into `local` of the folder."""
    pull(Path(folder, "local"), Path(folder, "base"), Path(folder, "versions"), 3, threads=1)


def publish(folder: str) -> None:
    """Version 4 of the folder, from `expected-3` to `base`."""
    versions, old, new = (Path(folder, name) for name in ("versions", "expected-3", "base"))
    publish_delta(versions, 4, old, new, threads=1)


def publish_whole(folder: str) -> None:
    """Version 4 of the folder, a copy of `base`."""
    publish_full(Path(folder, "versions"), 4, Path(folder, "base"))
