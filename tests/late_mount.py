"""A FUSE mount that shows what is written late: `python late_mount.py FOLDER MOUNT LAG_S`.

Names appear in lists and can be opened LAG_S after they were taken; a replaced file is the old one
as long. Creating and linking stay exact, and temporaries are there at once.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import mfusepy


class Late(mfusepy.Operations):
    """The folder, late; paths begin with a slash."""

    def __init__(self, root: Path, lag_s: float) -> None:
        self.root, self.lag_s = root, lag_s
        self.taken_s: dict[str, float] = {}
        self.linked: set[str] = set()
        self.lock = threading.Lock()

    def _path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _old(self, path: str) -> Path:
        """The bytes that a replaced name had before; out of sight."""
        return self.root / f"{path.lstrip('/')}.old"

    def _take(self, path: str) -> None:
        """The name was just given to a file."""
        with self.lock:
            self.taken_s[path] = time.monotonic()

    def _is_late(self, path: str) -> bool:
        with self.lock:
            return time.monotonic() - self.taken_s.get(path, -self.lag_s) < self.lag_s

    def _seen(self, path: str) -> Path:
        """The file that is seen under that name now."""
        if path in self.linked or not self._is_late(path):
            self.linked.discard(path)  # libfuse itself looks once, and must find the new name
            return self._path(path)
        if not self._old(path).exists():
            raise OSError(errno.ENOENT, path)
        return self._old(path)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.fstat(fh) if fh is not None else os.lstat(self._seen(path))
        names = ("mode", "ino", "nlink", "uid", "gid", "size", "atime", "mtime", "ctime")
        return {f"st_{name}": getattr(status, f"st_{name}") for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        found = [file.name for file in self._path(path).iterdir()]
        names = [name for name in found if not name.endswith(".old")]
        return [".", "..", *(n for n in names if not self._is_hidden(f"{path.rstrip('/')}/{n}"))]

    def _is_hidden(self, path: str) -> bool:
        return self._is_late(path) and not self._old(path).exists()

    def create(self, path: str, mode: int, fi: object = None) -> int:
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._seen(path), os.O_RDWR if flags & os.O_ACCMODE else os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def link(self, target: str, source: str) -> int:
        os.link(self._path(source), self._path(target))
        self.linked.add(target)
        self._take(target)
        return 0

    def rename(self, old: str, new: str) -> int:
        with suppress(FileNotFoundError):
            if not self._is_late(new):
                shutil.copyfile(self._path(new), self._old(new))
        self._path(old).rename(self._path(new))
        self._take(new)
        return 0

    def unlink(self, path: str) -> int:
        self._path(path).unlink()
        self._old(path).unlink(missing_ok=True)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._path(path).mkdir(mode)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self.root)
        return {name: getattr(status, name) for name in ("f_bsize", "f_frsize", "f_bavail")}

    def flush(self, path: str, fh: int) -> int:
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0


if __name__ == "__main__":
    mfusepy.FUSE(
        Late(Path(sys.argv[1]), float(sys.argv[3])),
        sys.argv[2],
        foreground=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        direct_io=True,
    )
