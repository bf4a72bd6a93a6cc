"""Checkpoints as weights in memory: what a publisher takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gymfast.cli.output import Advance
    from gymfast.delta import Tensor


def check_weights(path: Path) -> None:
    """Refuse what is no checkpoint, from its headers; raises what `Checkpoint.open` raises."""
    from gymfast.cli.delta.source import check_checkpoint
    from gymfast.delta.safetensors_files import Checkpoint

    check_checkpoint(path)
    Checkpoint.open(path).close()


def read_weights(path: Path, advance: Advance) -> dict[str, Tensor]:
    """All tensors of a checkpoint, in memory; raises what `Checkpoint.open` and `read` raise."""
    from gymfast.delta.safetensors_files import Checkpoint

    weights = {}
    with Checkpoint.open(path) as checkpoint:
        total = sum(checkpoint.spec(name).num_bytes for name in checkpoint.names)
        done = 0
        for name in checkpoint.names:
            weights[name] = checkpoint.read(name)
            done += weights[name].num_bytes
            advance(done, total)
    return weights
