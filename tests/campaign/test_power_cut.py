"""I28: what is committed outlives the machine: copies of a disk at every sync are mounted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sync.harness import RUN, assert_same, history, publisher, reader, zeros_like

from gymfast.stores import FileStore
from gymfast.sync.fsck import fsck

NUM_VERSIONS = 8


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """The filesystem in an image; its journal is played as after a power cut."""
    folder.mkdir()
    run("mount", "-o", "loop", image, folder)
    try:
        yield folder
    finally:
        run("umount", folder)
        folder.rmdir()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An empty ext4, 8 MiB, with a journal."""
    path = tmp_path / "disk.img"
    try:
        path.write_bytes(b"")
        os.truncate(path, 8 << 20)
        run("mkfs.ext4", "-q", "-F", "-J", "size=1", path)
        with mounted(path, tmp_path / "try"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs kernel feature loop devices with ext4: {error}")
    return path


@pytest.mark.long
@pytest.mark.timeout(900)
def test_I28_what_was_committed_is_there_after_a_power_cut_at_any_sync(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = history(NUM_VERSIONS, num_tensors=2, size=40)
    copies: list[tuple[Path, int]] = []
    newest = -1
    fsync = os.fsync

    def copying(descriptor: int) -> None:
        fsync(descriptor)
        copy = tmp_path / f"copy{len(copies)}.img"
        shutil.copyfile(image, copy)
        copies.append((copy, newest))

    with mounted(image, tmp_path / "disk") as disk:
        source = publisher(FileStore(disk / "store"), keep=2, anchor_every=3, object_bytes=400)
        monkeypatch.setattr(os, "fsync", copying)
        for weights in states:
            newest = source.publish(weights).version
        monkeypatch.undo()
    assert len(copies) > 10 * NUM_VERSIONS
    for copy, committed in copies:
        with mounted(copy, tmp_path / "after") as disk:
            store = FileStore(disk / "store")
            if committed < 0:
                continue
            assert not fsck(store, RUN).damage
            live = zeros_like(states[0])
            found = reader(store, live, timeout_s=0.2).pull().version
            assert found in (committed, committed + 1), copy
            assert_same(live, states[found])
            successor = publisher(store)
            assert successor.version == found
            successor.publish(states[0])
        copy.unlink()
