"""`.weight_sync/` of a local checkpoint: the lock and state file of the stock code, and digests.

`state.json` holds {"version": "000003"}, as the stock code reads and writes it, and beside it the
SHA-256 of `digests-000003.json`, which has a digest of every tensor. Where the stock code wrote the
state in between, that hash is missing and the digests are not believed. While a checkpoint is
being changed there is no state.json: the stock code would begin again from a full version, and so
does this one, unless a digests file tells that all tensors are those of one version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymfast.delta.files import os_errors, read_whole, sync_directory, wait_for_lock, write_all
from gymfast.delta.safetensors_header import load_json
from gymfast.errors import FormatError, NotFoundError

SYNC_DIR = ".weight_sync"
_DIGESTS = re.compile(r"digests-([0-9]{6,18})\.json")


@dataclass(frozen=True)
class LocalState:
    """Which version a local checkpoint holds; `algorithm:digest` of every tensor, if known."""

    version: int
    digests: dict[str, str] | None


class SyncFolder:
    """The folder `.weight_sync` of one local checkpoint."""

    def __init__(self, local: Path) -> None:
        self.local = local
        self.path = local / SYNC_DIR
        self._state = self.path / "state.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Waits for the lock that the stock code takes too; makes the folder if it is missing."""
        with os_errors("lock", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self.path / "lock", flags, 0o666)
        try:
            with os_errors("lock", self.path):
                wait_for_lock(fd, self.path / "lock")
            yield
        finally:
            with os_errors("unlock", self.path):
                os.close(fd)

    def read(self) -> LocalState | None:
        """The state; None if there is none.

        Raises FormatError if the file is damaged.
        """
        try:
            table = load_json(bytes(read_whole(self._state)), str(self._state))
        except NotFoundError:
            return None
        text = table.get("version") if isinstance(table, dict) else None
        if not str(text).isdecimal():
            raise FormatError(
                f"{self._state}: version is {text!r}, expected digits such as '000012': damaged; "
                "pull with --reseed (reseed=True)"
            )
        version = int(str(text))
        path = self._digests_path(version)
        digests = None
        if path.exists() and table.get("digests") == _sha256(path):
            digests = _read_digests(path)
        return LocalState(version, digests)

    def stage(self, state: LocalState) -> None:
        """Writes the digests of a state that the checkpoint is about to get; durable."""
        text = json.dumps({"version": f"{state.version:06d}", "tensors": state.digests})
        _write_durably(self._digests_path(state.version), text.encode())

    def staged(self) -> list[LocalState]:
        """States whose digests are there, the newest first."""
        versions = sorted((int(m[1]) for m in self._digest_files()), reverse=True)
        return [LocalState(v, _read_digests(self._digests_path(v))) for v in versions]

    def clear(self) -> None:
        """Removes the state, durably: from here on the checkpoint may be changed."""
        with os_errors("clear state", self._state):
            self._state.unlink(missing_ok=True)
            sync_directory(self.path)

    def forget(self) -> None:
        """Removes the state and all digests."""
        self.clear()
        self._remove_digests(keep=None)

    def commit(self, version: int) -> None:
        """Makes a staged state the state, durably; the digests of other versions go."""
        digests = _sha256(self._digests_path(version))
        text = json.dumps({"version": f"{version:06d}", "digests": digests})
        _write_durably(self._state, text.encode())
        self._remove_digests(keep=version)

    def _remove_digests(self, *, keep: int | None) -> None:
        with os_errors("remove digests in", self.path):
            for match in self._digest_files():
                if int(match[1]) != keep:
                    (self.path / match[0]).unlink(missing_ok=True)

    def _digest_files(self) -> list[re.Match[str]]:
        with os_errors("list", self.path):
            names = [path.name for path in self.path.iterdir()]
        return [match for name in names if (match := _DIGESTS.fullmatch(name))]

    def _digests_path(self, version: int) -> Path:
        return self.path / f"digests-{version:06d}.json"


def _read_digests(path: Path) -> dict[str, str]:
    table: Any = load_json(bytes(read_whole(path)), str(path))
    tensors = table.get("tensors") if isinstance(table, dict) else None
    if not isinstance(tensors, dict) or not all(isinstance(v, str) for v in tensors.values()):
        raise FormatError(
            f"{path}: no table of digests: damaged; delete it, or pull with --reseed (reseed=True)"
        )
    return tensors


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_whole(path)).hexdigest()


def _write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with os_errors("write", path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o666)
        try:
            write_all(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        sync_directory(path.parent)
