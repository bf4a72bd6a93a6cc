"""A store whose disk lies once: the object of one version is damaged right after it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from gymfast.stores import Blob, FileStore
from gymfast.testing.faults import PassThroughStore


class DamagingStore(PassThroughStore):
    """A file store that, once armed, flips a byte of the next object behind everybody's back.

    The flip happens before the commit record exists, so that no receiver can be faster.
    """

    def __init__(self, inner: FileStore, on_damage: Callable[[str, int], None]) -> None:
        super().__init__(inner)
        self._root = inner.root
        self._on_damage = on_damage
        self._is_armed = False

    def arm(self) -> None:
        """Damage the next object that is written."""
        self._is_armed = True

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        self.inner.put(key, data)
        self._damage(key)

    def create(self, key: str, data: Blob) -> None:
        self.inner.create(key, data)
        self._damage(key)

    def _damage(self, key: str) -> None:
        if self._is_armed and "/objects/" in key:
            self._is_armed = False
            path = self._root / key
            offset = path.stat().st_size // 2
            flip_byte(path, offset)
            self._on_damage(key, offset)


def flip_byte(path: Path, offset: int) -> None:
    """Invert all bits of one byte of a file; doing it twice restores the file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes((byte ^ 0xFF,)))
