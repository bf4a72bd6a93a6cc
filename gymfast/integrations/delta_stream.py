"""The version directories that the ranks of one trainer write together."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from gymfast.delta.hf_delta.publish import write_new
from gymfast.delta.hf_delta.stored import Stored, file_name, file_pieces, index_text
from gymfast.delta.hf_delta.version import INDEX_NAME, version_name
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.integrations.host_budget import HostBudget
from gymfast.integrations.rank_encoder import RankEncoder, Walk, walk_all
from gymfast.integrations.rank_snapshot import RankSnapshot
from gymfast.integrations.ranks import Ranks, names_to_leave_out


@dataclass(frozen=True)
class StreamSettings:
    """Where the versions go, what engines start from, and how changes are stored."""

    directory: Path
    base: Path
    encoding: str
    algorithm: str
    threads: int
    host_memory_bytes: int | None
    snapshot: str = "auto"


@dataclass(frozen=True)
class Written:
    """Bytes of one version on this rank: of all tensors, changed ones, and its file."""

    total_bytes: int
    changed_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class OpenVersion:
    """A version that is written and not promoted."""

    number: int
    path: Path
    changes: dict[str, Stored]
    frame_bytes: int


class DeltaStream:
    """Encodes and writes versions; all ranks call every method, and all of them see its error.

    A version that could not be written leaves nothing but a directory, which the next attempt
    removes. One that was written stays open until it is promoted (every engine has it) or
    abandoned (no engine was told of it).
    """

    def __init__(self, settings: StreamSettings, ranks: Ranks) -> None:
        self.settings = settings
        self._ranks = ranks
        self._budget = HostBudget(settings.host_memory_bytes)
        self._snapshot = RankSnapshot(
            settings.encoding, settings.algorithm, self._budget, settings.snapshot
        )
        self._shared: set[str] = set()
        self.open: OpenVersion | None = None

    def wipe(self) -> None:
        """Removes the versions of an earlier run, which start from another base."""
        directory = self.settings.directory
        with self._ranks.together("removing the versions of an earlier run"):
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob("weight_v*"):
                _remove(path)

    def seed(self, walk: Walk) -> None:
        """Fills the snapshot with what engines start from."""
        snapshot = self._snapshot
        snapshot.clear()
        with self._ranks.together("opening the base"):
            base = Checkpoint.open(self.settings.base)
        with base, self._ranks.together("reading the base"):
            walk_all(walk, lambda name, value: snapshot.seed(name, value, base))
            snapshot.seeded()
        names = self._ranks.gather(snapshot.names)
        others = (them for rank, them in enumerate(names) if rank != self._ranks.rank)
        self._shared = set(snapshot.names).intersection(chain.from_iterable(others))
        self._shared |= snapshot.repeated

    def write(self, number: int, walk: Walk) -> Written:
        """Writes what changed since the last promoted version as version `number`."""
        assert self.open is None, "the version before is neither promoted nor abandoned"
        path = self.settings.directory / version_name(number)
        held_bytes = self._budget.held_bytes
        try:
            with self._ranks.together("removing what is left of an earlier attempt"):
                _remove(path)
            with self._ranks.together("encoding"):
                encoder = RankEncoder(
                    self._snapshot, self._shared, self.settings.threads, self._budget
                )
                encoded = encoder.run(walk)
            left_out = names_to_leave_out(self._ranks.gather(encoded.shared), self._ranks.rank)
            stored = {n: change for n, change in encoded.changes.items() if n not in left_out}
            file_bytes = self._write_files(number, path, stored)
        except BaseException:
            self._budget.held_bytes = held_bytes
            self._snapshot.abandon()
            raise
        frame_bytes = self._budget.held_bytes - held_bytes
        self.open = OpenVersion(number, path, encoded.changes, frame_bytes)
        total = sum(size for name, size in encoded.sizes.items() if name not in left_out)
        return Written(total, sum(change.changed_bytes for change in stored.values()), file_bytes)

    def promote(self) -> None:
        """The open version is what engines hold from now on."""
        assert self.open is not None, "no version is open"
        with self._ranks.together("promoting"):
            self._snapshot.promote(self.open.changes, self.settings.threads)
        self.abandon()

    def abandon(self) -> None:
        """Forgets the open version: the next one is against what was promoted last."""
        assert self.open is not None, "no version is open"
        self._budget.give(self.open.frame_bytes)
        self._snapshot.abandon()
        self.open = None

    def _write_files(self, number: int, path: Path, stored: dict[str, Stored]) -> int:
        """The bytes of the file of this rank; a rank without changes has none."""
        has_file = self._ranks.gather(bool(stored))
        first, count = sum(has_file[: self._ranks.rank]), sum(has_file)
        name = file_name(first, count)
        file_bytes = 0
        with self._ranks.together("writing"):
            if stored or self._ranks.is_first:
                path.mkdir(parents=True, exist_ok=True)
            if stored:
                file_bytes = write_new(path / name, file_pieces(stored))
        maps = self._ranks.gather(dict.fromkeys(stored, name))
        with self._ranks.together("writing the index"):
            if self._ranks.is_first:
                weight_map = {n: file for one in maps for n, file in one.items()}
                s = self.settings
                index = index_text(number, s.encoding, s.algorithm, weight_map)
                write_new(path / INDEX_NAME, [index])
        return file_bytes


def _remove(path: Path) -> None:
    """Removes a directory as this rank sees it; ranks of one host do so at the same time."""
    while path.exists():
        with suppress(FileNotFoundError):  # the others were faster
            shutil.rmtree(path)
