"""Keeps the newest versions of an adapter on a server, and takes older ones away.

See docs/adapters.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gymfast.errors import ChainError, ChannelError, ConflictError, DeadlineError, GymfastError
from gymfast.integrations.lora_files import LoraFolder
from gymfast.integrations.lora_server import LoraServer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoraReport:
    """What a server serves now. `left` are versions that it could not unload, and why.

    They are tried again before the next version is loaded.
    """

    name: str
    version: int
    path: Path
    resident: tuple[int, ...]
    left: dict[int, str]


class LoraVersions:
    """One adapter on one server: `keep` versions stay resident, one more while one is replaced.

    Which ones are resident the server itself says, so either side may restart. Not thread-safe.
    """

    def __init__(
        self,
        server: LoraServer,
        folder: LoraFolder,
        *,
        keep: int = 2,
        keep_files: int = 4,
        same_name: bool = False,
    ) -> None:
        """Asks the server nothing yet.

        `keep_files` versions stay on disk: an engine may read the files of one that it no longer
        lists as long as requests use it. With `same_name` all versions have the name of the
        adapter, and requests that run go on with other weights; only vLLM can do that.
        Raises ValueError for settings that cannot be.
        """
        if keep < 1 or keep_files <= keep:
            raise ValueError(
                f"keep is {keep} and keep_files {keep_files}, expected 1 <= keep < keep_files"
            )
        if same_name and not server.can_replace:
            raise ValueError(f"{server.url} cannot load an adapter again under the same name")
        self._server, self._folder = server, folder
        self._keep, self._keep_files, self._same_name = keep, keep_files, same_name
        # SGLang no longer lists what it is unloading. What lies on disk may have been loaded.
        self._unsure = set(folder.versions())
        folder.retain(server.url, self._unsure, newest=keep_files)

    def serve(self, version: int) -> LoraReport:
        """Fetches a version and has the server serve it; then the oldest one goes.

        Raises what `LoraFolder.pull` raises; DeadlineError if an old version does not go and the
        server has no room or does nothing else meanwhile, ChainError if it refuses the version: it
        serves what it served. Raises ChannelError if it does not answer. The same call may be
        repeated.
        """
        path = self._folder.pull(version)
        if self._same_name:
            return self._replace(version, path)
        self._make_room(version)
        name = self._folder.name_of(version)
        held = self._server.resident().get(name)
        if held is None:
            self._load(name, path)
        elif held != str(path):
            raise ConflictError(
                f"{self._server.url} serves {name!r} from {held}, not from {path}: somebody else "
                "uses that name, so choose another one"
            )
        self._unsure.add(version)
        left = self._unload(self._oldest(self._keep, version))
        self._prune()
        resident = tuple(sorted(self._listed()))
        return LoraReport(name, version, path, resident, left)

    def _make_room(self, version: int) -> None:
        """Unloads until there is room for one more."""
        gone = self._unsure - self._listed() - {version}
        if self._server.can_replace:  # vLLM lists all it has
            self._unsure -= gone
            gone = set()
        room = self._keep if version not in self._listed() else self._keep + 1
        left = self._unload([*sorted(gone), *self._oldest(room, version)])
        held = self._listed() | left.keys()
        is_blocked = bool(left) and self._server.waits_in_unload
        if is_blocked or len(held - {version}) > self._keep:
            raise DeadlineError(
                f"{self._server.url} still holds versions {sorted(held)} of "
                f"{self._folder.name!r}: version {version} is not loaded, the others are served as "
                f"before; abort the requests on the oldest one, or repeat this call later. "
                f"{' '.join(left.values())}"
            )

    def _load(self, name: str, path: Path) -> None:
        try:
            self._server.load(name, str(path))
        except ChannelError:
            if self._server.resident().get(name) != str(path):
                raise
            _log.info("%s: the answer was lost, %s is loaded", self._server.url, name)

    def _replace(self, version: int, path: Path) -> LoraReport:
        name = self._folder.name
        self._server.load(name, str(path), replaces=True)
        if self._server.resident().get(name) != str(path):
            raise ChainError(f"{self._server.url} does not serve {name!r} from {path} after a load")
        self._unsure = {version}
        self._prune()
        return LoraReport(name, version, path, (version,), {})

    def _listed(self) -> set[int]:
        found = (self._folder.version_of(name) for name in self._server.resident())
        return {version for version in found if version is not None}

    def _oldest(self, keep: int, version: int) -> list[int]:
        """The versions to unload so that `keep` stay, `version` among them."""
        others = sorted(self._listed() - {version})
        num_others = keep - (version in self._listed())
        return others[: max(0, len(others) - num_others)]

    def _unload(self, versions: Iterable[int]) -> dict[int, str]:
        """Those that did not go, and why; after the first one the rest is not tried.

        A server that waits for the requests of one adapter does nothing else.
        """
        left: dict[int, str] = {}
        for version in dict.fromkeys(versions):
            name = self._folder.name_of(version)
            if left:
                left[version] = f"{name} was not tried."
                continue
            try:
                self._server.unload(name)
                self._unsure.discard(version)
            except GymfastError as error:
                left[version] = f"{name} was not unloaded: {error}."
                self._unsure.add(version)
                _log.warning("%s", left[version])
        return left

    def _prune(self) -> None:
        needed = {*self._unsure, *self._listed()}
        self._folder.retain(self._server.url, needed, newest=self._keep_files)
