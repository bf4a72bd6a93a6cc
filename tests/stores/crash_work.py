"""What test_filesystem_crash.py runs in processes that die or fail at each system call."""

from __future__ import annotations

from pathlib import Path

from gymfast.stores import FileStore

KEY = "run/log/k"
OLD = b"old" * 100
NEW = b"new!" * 1000


def put(root: str) -> None:
    FileStore(root).put(KEY, [NEW[:1000], NEW[1000:1001], NEW[1001:]])


def create(root: str) -> None:
    FileStore(root).create(KEY, NEW)


def delete(root: str) -> None:
    FileStore(root).delete(KEY)


def put_in_place(root: str) -> None:
    """What a naive store does; the enumeration must catch it."""
    with Path(root, KEY).open("wb", buffering=0) as file:
        file.write(NEW[:1000])
        file.write(NEW[1000:])
