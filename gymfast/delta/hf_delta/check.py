"""Digests of all tensors of a checkpoint, computed and compared with what was noted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gymfast.delta.checkpoint_stream import Meter
from gymfast.delta.hf_delta.digests import new_hasher
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.errors import ChecksumError, CoverageError

WINDOW_BYTES = 2**20  # old, new and difference stay in a second-level cache
RESEED = "pull with --reseed (reseed=True) to begin again from a full version"


def digest_of(checkpoint: Checkpoint, name: str, algorithm: str, meter: Meter) -> str:
    """`algorithm:digest` of a tensor, read window by window."""
    num_bytes, hasher = checkpoint.spec(name).num_bytes, new_hasher(algorithm)
    buffer = np.empty(min(num_bytes, WINDOW_BYTES), np.uint8)
    for start in range(0, num_bytes, WINDOW_BYTES):
        window = buffer[: num_bytes - start]
        checkpoint.read_into(name, start, window)
        hasher.update(window.data)
        meter.add(window.size)
    return f"{algorithm}:{hasher.hexdigest()}"


def digest_all(checkpoint: Checkpoint, algorithm: str, meter: Meter) -> dict[str, str]:
    """`algorithm:digest` of every tensor."""
    return {name: digest_of(checkpoint, name, algorithm, meter) for name in checkpoint.names}


def check_names(checkpoint: Checkpoint, digests: dict[str, str], path: Path) -> None:
    """Raises CoverageError if the checkpoint has other tensors than those whose digests are."""
    for what, names in (
        ("is new there", set(checkpoint.names) - digests.keys()),
        ("is not there any more", digests.keys() - set(checkpoint.names)),
    ):
        if names:
            raise CoverageError(
                f"{path}: tensor {min(names)!r} {what} since the last pull: somebody else changed "
                f"this checkpoint; {RESEED}"
            )


def check_tensors(
    checkpoint: Checkpoint, digests: dict[str, str], names: Iterable[str], path: Path, meter: Meter
) -> None:
    """Raises ChecksumError for the first tensor whose bytes are not those that were noted."""
    for name in names:
        algorithm, _, _ = digests[name].partition(":")
        found = digest_of(checkpoint, name, algorithm, meter)
        if found != digests[name]:
            raise ChecksumError(
                f"{path}: tensor {name!r} has digest {found}, noted was {digests[name]}: its bytes "
                f"changed on this disk since the last pull; {RESEED}"
            )
