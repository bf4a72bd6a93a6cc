"""What tests/sync/test_crash_points.py runs in processes that die or fail at each system call."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sync.harness import RUN, history

from gymfast.stores import FileStore
from gymfast.sync import CheckpointTarget, Publisher, Subscriber

STATES = history(4, num_tensors=2, size=100)


def publish(root: str) -> str:
    """Takes the run over at version 1, then publishes version 2, an anchor, and cleans up."""
    source = Publisher(
        FileStore(root),
        RUN,
        anchor_ratio=100.0,
        anchor_every=2,
        keep=1,
        threads=1,
        single_writer=True,
        timeout_s=0.2,
    )
    source.adopt(STATES[1])
    return str(source.publish(STATES[2]).version)


def pull(root: str, path: str, in_place: str) -> str:
    """Brings a checkpoint at version 0 to version 2."""
    target = CheckpointTarget(path, in_place=in_place == "True", threads=1)
    with Subscriber(FileStore(root), RUN, target, timeout_s=0.2, reader_id="r") as follower:
        return str(follower.pull().version)


def _load_everything() -> None:
    """Runs both once, so that imports and tables are no part of what is traced."""
    with tempfile.TemporaryDirectory() as folder:
        source = Publisher(FileStore(f"{folder}/s"), RUN, threads=1)
        source.publish(STATES[0])
        source.publish(STATES[1])
        for in_place in ("True", "False"):
            publish(f"{folder}/s")
            pull(f"{folder}/s", str(Path(folder, "c.safetensors")), in_place)


_load_everything()
