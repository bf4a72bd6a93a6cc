"""The checkpoint on the disk of an engine's host: of what a pull left there, what is to be loaded.

Nothing of it stays in memory: tensors are read when the model loads them.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gymfast.delta.files import os_errors, wait_for_lock
from gymfast.delta.hf_delta.state import SyncFolder
from gymfast.delta.hf_delta.version import open_version, version_name
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.tensors import like
from gymfast.errors import ChainError, GymfastError
from gymfast.integrations.sglang_messages import LocalVersion

_NUM_READERS = 2
_NUM_AHEAD = 4  # tensors in memory that wait for the model
_log = logging.getLogger(__name__)


class LocalCheckpoint:
    """Versions of a local checkpoint, one open at a time, and which one the model holds.

    While one is open, no pull changes the files: this holds the lock that pulls take, shared with
    the other ranks of the host. Not thread-safe.
    """

    def __init__(self) -> None:
        """Nothing is open, and nothing known of the model."""
        self._open: tuple[LocalVersion, Checkpoint, int] | None = None
        self._loaded: LocalVersion | None = None

    def open(self, version: LocalVersion) -> None:
        """Opens what the host has pulled.

        Raises ChainError if that is another version, FormatError for a damaged checkpoint,
        NotFoundError if there is none, GymfastError for what the system says.
        """
        self.close()
        folder = SyncFolder(Path(version.checkpoint))
        lock = _share_lock(folder.path)
        try:
            held = folder.read()
            if held is None or held.version != version.number:
                found = "no version" if held is None else f"version {held.version}"
                raise ChainError(
                    f"{version.checkpoint} holds {found}, version {version.number} is to be "
                    "loaded: pull it first"
                )
            checkpoint = Checkpoint.open(version.checkpoint, needs_recovery=False)
        except BaseException:
            os.close(lock)
            raise
        self._open = version, checkpoint, lock

    def close(self) -> None:
        """Closes files and lock, if any are open."""
        if self._open is not None:
            _, checkpoint, lock = self._open
            self._open = None
            os.close(lock)
            checkpoint.close()

    def forget(self) -> None:
        """The model holds something else."""
        self._loaded = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of the files."""
        return self._checkpoint.names

    @property
    def root(self) -> str:
        """The version that is open; empty if none is."""
        return version_name(self._version.number) if self._open is not None else ""

    def changed(self) -> list[str]:
        """Names that versions after the loaded one mention; all where that is not known."""
        wanted, loaded = self._version, self._loaded
        if loaded is None or not _follows(loaded, wanted):
            return list(self.names)
        changed: set[str] = set()
        for number in range(loaded.number + 1, wanted.number + 1):
            try:
                version = open_version(Path(wanted.source) / version_name(number))
            except GymfastError as error:
                _log.warning("all tensors are loaded: what version %d changed: %s", number, error)
                return list(self.names)
            if version is None:
                return list(self.names)
            with version:
                changed |= version.tensors.keys()
        return [name for name in self.names if name in changed]

    def tensors(self, names: Iterable[str], sample: Any) -> Iterator[tuple[str, Any]]:
        """Pairs of name and tensor of the sort of `sample`, each in memory of its own.

        Raises what reading raises.
        """
        checkpoint = self._checkpoint
        with ThreadPoolExecutor(_NUM_READERS, "gymfast-read") as pool:
            waiting = deque[Any]()
            for name in names:
                waiting.append((name, pool.submit(checkpoint.read, name)))
                if len(waiting) > _NUM_AHEAD:
                    first, read = waiting.popleft()
                    yield first, like(read.result(), sample)
            for last, read in waiting:
                yield last, like(read.result(), sample)

    def mark_loaded(self) -> None:
        """The model holds the version that is open."""
        self._loaded = self._version

    @property
    def _version(self) -> LocalVersion:
        assert self._open is not None, "no version is open"
        return self._open[0]

    @property
    def _checkpoint(self) -> Checkpoint:
        assert self._open is not None, "no version is open"
        return self._open[1]


def _follows(loaded: LocalVersion, wanted: LocalVersion) -> bool:
    """Whether numbers of both mean states of one history, in this order."""
    places = [(one.checkpoint, one.source, one.run) for one in (loaded, wanted)]
    return places[0] == places[1] and loaded.number <= wanted.number


def _share_lock(folder: Path) -> int:
    """The lock of pulls, open and shared; it is free when the file is closed."""
    with os_errors("lock", folder):
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            wait_for_lock(fd, folder / "lock", is_shared=True)
        except BaseException:
            os.close(fd)
            raise
    return fd
