"""A rewrite of a checkpoint directory replaces its weights and nothing else of the user's."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gymfast.errors import GymfastError
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


def test_weights_that_are_not_of_the_checkpoint_are_never_removed(
    replica: tuple[MemoryStore, Path],
) -> None:
    """Without an index nobody knows which of several files are the checkpoint (also with force)."""
    store, path = replica
    save_file({"v": np.ones(3, np.float32)}, path / "adapter.safetensors")
    before = sorted(path.rglob("*"))
    target = CheckpointTarget(path, allow_new_names=True)
    refused = pytest.raises(GymfastError, match=r"adapter\.safetensors")
    with Subscriber(store, "run", target) as subscriber, refused:
        subscriber.pull()
    assert sorted(path.rglob("*")) == before


def test_a_shard_that_the_index_does_not_name_is_never_removed(tmp_path: Path) -> None:
    path, store = tmp_path / "replica", MemoryStore()
    path.mkdir()
    save_file({"w": np.zeros(1000, np.uint16)}, path / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"w": "model-1.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"v": np.ones(3, np.float32)}, path / "adapter.safetensors")
    publish(store, 1, 2)
    with pytest.raises(GymfastError, match=r"adapter\.safetensors"):
        pull(store, path)
    assert load_file(path / "adapter.safetensors")["v"][0] == 1
    (path / "adapter.safetensors").rename(tmp_path / "adapter.safetensors")
    pull(store, path)
    assert load_file(path / "model.safetensors")["w"][0] == 2
