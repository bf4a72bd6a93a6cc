"""What a host finds after it lost power at any fsync of a publisher (I28; needs mount and ext4).

The store lies on an image of ext4 that writes its journal on request only. After each fsync a copy
of the image is what has reached the device: mounted, it must have every version that was reported
as committed, and nothing torn.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sync.harness import RUN, assert_same, history, publisher, reader, zeros_like

from gymfast.errors import NotFoundError
from gymfast.stores import FileStore
from gymfast.sync.fsck import fsck


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-o", "loop,commit=300", str(image), str(folder)]
    mount = subprocess.run(command, capture_output=True, text=True, check=False)
    if mount.returncode:
        pytest.skip(f"needs kernel feature mount: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs kernel feature ext4 (mkfs.ext4)")
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(path)], check=True)
    return path


def snapshot(image: Path, copy: Path) -> None:
    """What is on the device at one moment: the kernel may write while it is copied, then again."""
    for _ in range(100):
        shutil.copyfile(image, copy)
        if filecmp.cmp(image, copy, shallow=False):
            return
    raise AssertionError("the image never stands still")


def check_every_fsync(
    image: Path, folder: Path, num_versions: int, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Publishes with anchors and retention; returns how often power was lost."""
    states = history(num_versions, num_tensors=2, size=200)
    committed, num_losses, is_looking = -1, 0, False
    fsync = os.fsync

    def lose_power(fd: int) -> None:
        nonlocal num_losses, is_looking
        fsync(fd)
        if is_looking:  # the reader that looks what is left
            return
        is_looking = True
        num_losses += 1
        # A file of its own each time: the last mount may write to its file until it is all gone.
        copy = folder / f"copy{num_losses}.img"
        snapshot(image, copy)
        with mounted(copy, folder / f"after{num_losses}") as found:
            require_whole(found / "store")
        copy.unlink()
        is_looking = False

    def require_whole(root: Path) -> None:
        store, live = FileStore(root), zeros_like(states[0])
        try:
            version = reader(store, live, timeout_s=0.1).pull().version
        except NotFoundError:
            assert committed < 0, f"version {committed} was reported and is lost"
            return
        assert version in (committed, committed + 1)
        assert_same(live, states[version])
        assert not fsck(store, RUN).damage

    with mounted(image, folder / "disk") as disk:
        source = publisher(FileStore(disk / "store"), anchor_every=2, keep=2, object_bytes=1000)
        monkeypatch.setattr(os, "fsync", lose_power)
        for state in states:
            committed = source.publish(state).version
        monkeypatch.undo()
    return num_losses


@pytest.mark.ci
def test_I28_no_committed_version_is_lost_with_power_at_any_fsync(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_every_fsync(image, tmp_path, 1, monkeypatch) > 10


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_I28_no_committed_version_of_many_is_lost_with_power_at_any_fsync(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_losses = check_every_fsync(image, tmp_path, 12, monkeypatch)
    print(f"power was lost {num_losses} times")
    assert num_losses > 150


def test_I28_a_publisher_that_does_not_sync_is_found_out(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image really shows only what was synced."""
    with mounted(image, tmp_path / "disk") as disk:
        source = publisher(FileStore(disk / "store"))
        source.publish(history(0)[0])
        monkeypatch.setattr(os, "fsync", lambda fd: None)
        source.publish(history(1)[1])
        snapshot(image, tmp_path / "copy.img")
        with mounted(tmp_path / "copy.img", tmp_path / "after") as found:
            live = zeros_like(history(0)[0])
            store = FileStore(found / "store")
            assert reader(store, live, timeout_s=0.1).pull().version == 0
