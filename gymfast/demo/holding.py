"""Stops a receiver in the middle of writing its checkpoint, so that it can be killed there."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from gymfast.demo import events

NUM_WRITES = 5
"""Writes to the checkpoint that go through before the process stops."""


class HoldPoint:
    """Counts the writes to one file while one version is applied, and stops for good in between.

    It takes the place of os.pwrite in this process: no code of gymfast knows of it.
    """

    def __init__(self, path: Path, version: int) -> None:
        self._path = path
        self._hold_version = version
        self._version = 0
        self._num_left = 0
        if version:
            self._pwrite = os.pwrite
            os.pwrite = self._write

    def arm(self, version: int) -> None:
        """The apply of `version` begins."""
        if self._hold_version and version >= self._hold_version:
            self._version = version
            self._num_left = NUM_WRITES

    def _write(self, fd: int, data: Any, offset: int, /) -> int:
        if self._num_left and self._is_checkpoint(fd):
            self._num_left -= 1
            if not self._num_left:
                name = self._path.name
                events.tell(events.Holding(version=self._version, at_file=name))
                threading.Event().wait()  # until SIGKILL
        return self._pwrite(fd, data, offset)

    def _is_checkpoint(self, fd: int) -> bool:
        return self._path.exists() and os.path.samestat(os.fstat(fd), self._path.stat())
