"""Publisher and reader on a disk that runs full at every amount of space left (needs mount)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from sync.harness import RUN, assert_same, history, publisher, reader, zeros_like

from gymfast.errors import GymfastError
from gymfast.stores import FileStore, MemoryStore
from gymfast.sync import CheckpointTarget, Subscriber
from gymfast.sync.fsck import fsck

KIB = 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    mount = subprocess.run(command, capture_output=True, text=True, check=False)
    if mount.returncode:
        pytest.skip(f"needs kernel feature mount: {mount.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def leave_free(disk: Path, free_bytes: int) -> None:
    """Fills the disk with a foreign file until that many bytes are free."""
    ballast = disk / ".ballast"
    ballast.unlink(missing_ok=True)
    free = FileStore(disk).free_bytes()
    assert free is not None
    ballast.write_bytes(bytes(free - free_bytes))


def test_i25_r43_a_publisher_on_a_full_disk_fails_clearly_and_goes_on_later(small_disk):
    states = history(60, num_tensors=3, size=2000)
    store = FileStore(small_disk / "store")
    source = publisher(store, anchor_every=1, keep=1, object_bytes=4 * KIB, timeout_s=0.2)
    source.publish(states[0])
    live = zeros_like(states[0])
    version = 0
    failures: list[str] = []
    for number, free_kib in enumerate(range(0, 120, 4)):
        leave_free(small_disk, free_kib * KIB)
        try:
            version = source.publish(states[number + 1]).version
            expected = states[number + 1]
        except GymfastError as error:
            failures.append(str(error))
            expected = None
        (small_disk / ".ballast").unlink()
        follower = reader(store, live)
        found = follower.pull()
        assert found.version in (version, version + 1)
        assert not fsck(store, RUN).damage
        if expected is None:
            version = source.publish(states[number + 1]).version
            follower.pull()
        assert_same(live, states[number + 1])
    assert len(failures) >= 2
    assert all("ENOSPC" in failure for failure in failures)
    stored = sum(store.size(key) for key in store.list(f"{RUN}/objects/"))
    assert stored < 300 * KIB, "nothing of the failures is left"


@pytest.mark.parametrize("in_place", [True, False])
def test_i25_a_reader_on_a_full_disk_holds_a_whole_version_and_goes_on_later(small_disk, in_place):
    states = history(40, num_tensors=3, size=2000)
    store = MemoryStore()
    source = publisher(store)
    path = small_disk / "c.safetensors"
    source.publish(states[0])
    failures = 0
    with Subscriber(store, RUN, CheckpointTarget(path, in_place=in_place)) as follower:
        follower.pull()
        for number, free_kib in enumerate(range(0, 60, 4)):
            source.publish(states[number + 1])
            leave_free(small_disk, free_kib * KIB)
            before = follower.version
            try:
                follower.pull()
            except GymfastError:
                failures += 1
            (small_disk / ".ballast").unlink()
            if follower.version is not None:
                assert follower.version in (before, number + 1)
                assert_same(load_file(path), states[follower.version])
            follower.pull()
            assert_same(load_file(path), states[number + 1])
    assert failures > 0
    leftovers = {p.name for p in small_disk.iterdir()}
    assert leftovers == {path.name, f".gymfast.position.{path.name}", f".gymfast.lock.{path.name}"}
