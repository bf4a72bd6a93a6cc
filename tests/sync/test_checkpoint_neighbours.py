"""A rewrite of a checkpoint directory replaces its weights and nothing else of the user's."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gymfast.stores import MemoryStore
from gymfast.sync import CheckpointTarget, Publisher, Subscriber

OTHERS = {
    "config.json": "{}",
    ".gitattributes": "*.safetensors filter=lfs",
    "original/params.json": "{}",
    "logs/deep/run.txt": "precious",
}


def publish(store: MemoryStore, *values: int) -> None:
    publisher = Publisher(store, "run")
    for value in values:
        publisher.publish({"w": np.full(1000, value, np.uint16)})


def pull(store: MemoryStore, path: Path) -> None:
    with Subscriber(store, "run", CheckpointTarget(path)) as subscriber:
        subscriber.pull()


def others_of(path: Path) -> dict[str, str]:
    files = (p for p in path.rglob("*") if p.is_file() and p.suffix != ".safetensors")
    return {str(p.relative_to(path)): p.read_text() for p in files}


@pytest.fixture
def replica(tmp_path: Path) -> tuple[MemoryStore, Path]:
    """A store with two versions, and a directory at the second that has other files too."""
    store, path = MemoryStore(), tmp_path / "replica"
    publish(store, 1, 2)
    pull(store, path)
    for name, text in OTHERS.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return store, path


def test_a_rewrite_keeps_hidden_files_and_folders(replica: tuple[MemoryStore, Path]) -> None:
    store, path = replica
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")  # damage: only an anchor heals it
    pull(store, path)
    assert load_file(weights)["w"][0] == 2
    assert others_of(path) == OTHERS


@pytest.mark.parametrize("num_moved", range(len(OTHERS) + 1))
def test_an_interrupted_swap_keeps_them_too(
    num_moved: int, replica: tuple[MemoryStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after any number of files went over: the next open moves the rest."""
    store, path = replica
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    rename, count = Path.rename, 0

    def dying(source: Path, target: Path) -> Path:
        nonlocal count
        if source.parent.name.startswith(".gymfast.old."):
            count += 1
            if count > num_moved:
                raise KeyboardInterrupt
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", dying)
    monkeypatch.setattr("gymfast.sync.checkpoint_target._remove", lambda path: None)
    with suppress(KeyboardInterrupt):
        pull(store, path)
    monkeypatch.undo()
    pull(store, path)
    assert load_file(weights)["w"][0] == 2
    assert others_of(path) == OTHERS
    assert sorted(p.name for p in path.parent.iterdir() if ".old" in p.name) == []
