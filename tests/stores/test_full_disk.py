"""The file store on a small disk that runs full, loses write access or power (needs mount)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gymfast.errors import ConflictError, StoreError
from gymfast.stores import FileStore

KIB = 1024


@contextmanager
def _mounted(path: Path, *arguments: str) -> Iterator[Path]:
    path.mkdir(parents=True)
    mount = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"needs kernel feature mount: {mount.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with _mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,nr_inodes=32", "tmpfs") as path:
        yield path


def _leave_free(store: FileStore, free_bytes: int) -> None:
    """Fill the disk with a foreign file until that many bytes are free."""
    ballast = Path(store.root) / ".ballast"
    ballast.unlink(missing_ok=True)
    ballast.write_bytes(bytes(store.free_bytes() - free_bytes))
    assert store.free_bytes() == free_bytes


@pytest.mark.parametrize("operation", ["put", "create"])
def test_I25_R43_a_full_disk_is_a_clear_error_at_every_amount_of_space_left(
    operation: str, small_disk: Path
) -> None:
    store = FileStore(small_disk)
    store.put("a/kept", b"k" * 5000)
    blob = os.urandom(64 * KIB)
    for free_bytes in range(0, 72 * KIB, 4 * KIB):
        _leave_free(store, free_bytes)
        if free_bytes < len(blob):
            expected = rf"{operation} 'a/k' .*\[ENOSPC\], {free_bytes} bytes free"
            with pytest.raises(StoreError, match=expected):
                getattr(store, operation)("a/k", blob)
            assert list(store.list("")) == ["a/kept"]
        else:
            getattr(store, operation)("a/k", blob)
            assert store.get("a/k", max_bytes=1 << 20) == blob
            store.delete("a/k")
        assert store.get("a/kept", max_bytes=1 << 20) == b"k" * 5000
        assert store.free_bytes() == free_bytes, "a temporary was left behind"
    (small_disk / ".ballast").unlink()
    getattr(store, operation)("a/k", blob)


def test_I25_a_failed_replace_on_a_full_disk_keeps_the_old_object(small_disk: Path) -> None:
    store = FileStore(small_disk)
    store.put("k", b"o" * 64 * KIB)
    _leave_free(store, 32 * KIB)
    with pytest.raises(StoreError, match="ENOSPC"):
        store.put("k", (b"n" * KIB for _ in range(64)))
    assert store.get("k", max_bytes=1 << 20) == b"o" * 64 * KIB


def test_I25_a_disk_without_room_for_another_name_is_a_clear_error(small_disk: Path) -> None:
    store = FileStore(small_disk)

    def fill() -> None:
        for index in range(64):
            store.create(f"k{index}", b"1")

    with pytest.raises(StoreError, match=r"\[ENOSPC\].*one more file"):
        fill()
    keys = list(store.list(""))
    assert 10 < len(keys) < 32
    store.delete(keys[0])
    store.delete(keys[1])
    store.create(keys[0], b"2")


def test_I25_a_read_only_disk_is_a_clear_error_and_can_be_read(small_disk: Path) -> None:
    store = FileStore(small_disk)
    store.put("k", b"1")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    writes: list[Callable[[], None]] = [
        lambda: store.put("k", b"2"),
        lambda: store.create("new", b"2"),
        lambda: store.delete("k"),
        lambda: FileStore(small_disk / "not" / "yet").put("k", b"2"),
    ]
    for write in writes:
        with pytest.raises(StoreError, match=r"\[EROFS\].*mounted read-only"):
            write()
    assert store.get("k", max_bytes=1) == b"1"
    assert list(store.list("")) == ["k"]


def _image(path: Path) -> Path:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs kernel feature ext4 (mkfs.ext4)")
    with path.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(path)], check=True)
    return path


def _after_power_loss(image: Path, folder: Path) -> dict[str, bytes]:
    """What a host finds that mounts what has reached the device by now."""
    copy = folder.with_suffix(".img")
    shutil.copyfile(image, copy)
    with _mounted(folder, "-o", "loop", str(copy)) as path:
        store = FileStore(path / "store")
        return {key: store.get(key, max_bytes=1 << 20) for key in store.list("")}


def test_I28_what_put_create_and_delete_promised_survives_the_host(tmp_path: Path) -> None:
    image = _image(tmp_path / "disk.img")
    with _mounted(tmp_path / "disk", "-o", "loop,commit=300", str(image)) as path:
        store = FileStore(path / "store")
        expected: dict[str, bytes] = {}
        for index in range(4):
            blob = os.urandom(20_000)
            store.put(f"objects/{index}", blob)
            store.create(f"log/{index}", blob[:100])
            store.put("hint", b"%d" % index)
            expected |= {
                f"objects/{index}": blob,
                f"log/{index}": blob[:100],
                "hint": b"%d" % index,
            }
            if index == 2:
                store.delete("log/0")
                del expected["log/0"]
            assert _after_power_loss(image, tmp_path / f"after{index}") == expected


def test_I28_the_power_loss_test_sees_a_store_that_does_not_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = _image(tmp_path / "disk.img")
    with _mounted(tmp_path / "disk", "-o", "loop,commit=300", str(image)) as path:
        store = FileStore(path / "store")
        store.put("a/synced", b"1")
        monkeypatch.setattr(os, "fsync", lambda fd: None)
        store.put("a/lost", b"2")
        assert _after_power_loss(image, tmp_path / "after") == {"a/synced": b"1"}


def test_I22_a_conflict_is_reported_only_when_the_winner_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = _image(tmp_path / "disk.img")
    with _mounted(tmp_path / "disk", "-o", "loop,commit=300", str(image)) as path:
        store = FileStore(path / "store")
        store.put("log/0", b"")
        fsync, num_calls = os.fsync, 0

        def die_before_the_last(fd: int) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:
                raise KeyboardInterrupt
            fsync(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", die_before_the_last)
            with pytest.raises(KeyboardInterrupt):
                store.create("log/1", b"mine")
        with pytest.raises(ConflictError):
            store.create("log/1", b"mine")
        assert _after_power_loss(image, tmp_path / "after")["log/1"] == b"mine"
