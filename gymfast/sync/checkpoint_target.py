"""A local safetensors checkpoint as a target, safe against a crash at any point.

Beside the checkpoint NAME lie `.gymfast.position.NAME` (what it holds), `.gymfast.lock.NAME`, and
during a rewrite `.gymfast.next0.NAME`, `.next1.NAME` (the new checkpoint) and `.old.NAME`.
"""

from __future__ import annotations

import difflib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gymfast.delta.apply import ApplyReport
from gymfast.delta.checkpoint import (
    Checkpoint,
    apply_checkpoint,
    apply_checkpoint_in_place,
    digest_checkpoint,
    recover,
)
from gymfast.delta.files import os_errors, sync_directory, write_all
from gymfast.delta.frame import root_of
from gymfast.delta.safetensors_files import SUFFIX, read_index
from gymfast.errors import ConflictError, CoverageError, FormatError, GymfastError
from gymfast.sync.manifest import PositionRecord, encode, parse_position
from gymfast.sync.staging import StagedFrame
from gymfast.sync.targets import Installed

_SIDE_FILE_BYTES = 32 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")
_JOURNAL_PREFIX = ".gymfast-"  # of the weights that go: it must not be played on the new ones
_IN_PLACE_KINDS = {"delta", "alias"}
_log = logging.getLogger(__name__)


class CheckpointTarget:
    """A safetensors file or a directory of them, kept at exactly one version.

    Deltas are applied in place with a journal, or (`in_place` False, or for tensors that come, go
    or change shape) by writing a new checkpoint that takes the name of the old one.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        in_place: bool = True,
        allow_new_names: bool = False,
        backend: str = "auto",
        threads: int | None = None,
    ) -> None:
        """Opens the target and completes what a crash interrupted; `path` may not exist yet.

        A checkpoint that is there, but whose names are others than those of the run, is not
        overwritten unless `allow_new_names`.
        Raises ConflictError if another process has it open, GymfastError for what the system says.
        """
        self.path = Path(path).absolute()
        self._in_place = in_place
        self._allow_new_names = allow_new_names
        self._backend = backend
        self._threads = threads
        with os_errors("open checkpoint", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = self._lock()
            try:
                self._finish_swap()
            except BaseException:
                self.close()
                raise

    def root(self) -> str | None:
        with os_errors("read checkpoint", self.path):
            if not self.path.exists():
                return None
            recover(self.path)
            entries = digest_checkpoint(self.path, backend=self._backend, threads=self._threads)
        return root_of(entries).hex()

    def load(self) -> PositionRecord | None:
        path = self._beside("position")
        with os_errors("read", path):
            try:
                blob = path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            return parse_position(blob, str(path))
        except FormatError as error:
            _log.warning("%s; the checkpoint itself will tell its version", error)
            return None

    def save(self, position: PositionRecord) -> None:
        path, temporary = self._beside("position"), self._beside("position.new")
        with os_errors("write", path):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                write_all(fd, encode(position), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.rename(path)
            sync_directory(path.parent)

    def write(self, frames: Sequence[StagedFrame], *, is_known: bool) -> Installed:
        with os_errors("update checkpoint", self.path):
            if frames and frames[0].step.kind == "anchor" and not is_known:
                self._require_same_names(frames[0])
            return Installed.of(self._write(frames))

    def _write(self, frames: Sequence[StagedFrame]) -> list[ApplyReport]:
        current = self.path
        reports: list[ApplyReport] = []
        try:
            for frame in frames:
                if self._can_patch(current, frame):
                    reports.append(self._patch(current, frame))
                    continue
                out = next(path for path in self._nexts if path != current)
                reports.append(self._rewrite(current, frame, out))
                if current != self.path:
                    _remove(current)
                current = out
            if current != self.path:
                self._swap(current)
        except BaseException:
            if current != self.path:
                with suppress(OSError):
                    _remove(current)
            raise
        return reports

    def close(self) -> None:
        if self._lock_fd >= 0:
            with suppress(OSError):  # the lock is given back whatever close says
                os.close(self._lock_fd)
            self._lock_fd = -1

    def _require_same_names(self, frame: StagedFrame) -> None:
        """Raises CoverageError rather than replace a checkpoint of something else."""
        if self._allow_new_names or not self.path.exists():
            return
        try:
            with Checkpoint.open(self.path) as checkpoint:
                held = set(checkpoint.names)
        except FormatError:
            return
        wanted = {tensor.name for tensor in frame.info.tensors if tensor.kind != "removed"}
        for name in sorted(wanted ^ held):
            side, others = ("the run", held) if name in wanted else (str(self.path), wanted)
            near = ", ".join(repr(n) for n in difflib.get_close_matches(name, sorted(others), 3))
            raise CoverageError(
                f"tensor {name!r} is only in {side} ({len(wanted ^ held)} such names; nearest on "
                f"the other side: {near or 'none'}): nothing was written; name another path, or "
                "allow new names"
            )

    def _require_no_strangers(self) -> None:
        """Raises GymfastError rather than remove weights that are not of this checkpoint.

        A damaged index is a FormatError: nobody knows then which weights are its own.
        """
        if not self.path.is_dir():
            return
        found = {path.name for path in self.path.iterdir() if path.name.endswith(SUFFIX)}
        index = read_index(self.path)
        own = set(index.files) if index else found if len(found) == 1 else set()
        if strangers := sorted(found - own):
            raise GymfastError(
                f"{self.path} would be replaced, but {', '.join(strangers[:3])} "
                f"({len(strangers)} in all) may not be of its checkpoint: nothing was written; "
                "name another path, or move them away"
            )

    def _can_patch(self, current: Path, frame: StagedFrame) -> bool:
        if frame.step.kind == "anchor" or (current == self.path and not self._in_place):
            return False
        has_links = current.is_dir() and any(p.is_symlink() for p in current.iterdir())
        return not has_links and all(t.kind in _IN_PLACE_KINDS for t in frame.info.tensors)

    def _patch(self, current: Path, frame: StagedFrame) -> ApplyReport:
        return apply_checkpoint_in_place(
            current, frame.read(), backend=self._backend, threads=self._threads
        )

    def _rewrite(self, current: Path, frame: StagedFrame, out: Path) -> ApplyReport:
        self._require_no_strangers()
        _remove(out)
        base = None if frame.step.kind == "anchor" else current
        return apply_checkpoint(
            base, frame.read(), out, backend=self._backend, threads=self._threads
        )

    def _swap(self, new: Path) -> None:
        """Gives the new checkpoint the name of the old one; `_finish_swap` completes it."""
        if self.path.is_dir() and not self.path.is_symlink():
            _copy_side_files(self.path, new)
            sync_directory(new)
            old = self._beside("old")
            _remove(old)
            self.path.rename(old)
            try:
                new.rename(self.path)
            except BaseException:
                old.rename(self.path)
                raise
            sync_directory(self.path.parent)
            _move_others(old, self.path)
            _remove(old)
        else:
            new.rename(self.path)
            sync_directory(self.path.parent)

    def _finish_swap(self) -> None:
        """Completes a swap that a crash interrupted, and removes what else it left.

        Between the two renames there is no checkpoint, but the complete new one.
        """
        old = self._beside("old")
        nexts = self._nexts
        if not self.path.exists() and old.exists():
            whole = [path for path in nexts if path.exists()]
            (whole[0] if len(whole) == 1 else old).rename(self.path)
            sync_directory(self.path.parent)
        if old.is_dir() and self.path.is_dir():
            _move_others(old, self.path)
        for path in (old, *nexts, self._beside("position.new")):
            _remove(path)
        unfinished = tuple(f".{path.name}.gymfast-" for path in nexts)
        for path in self.path.parent.iterdir():
            if path.name.startswith(unfinished):
                _remove(path)

    @property
    def _nexts(self) -> list[Path]:
        """Two places for new checkpoints: one may be made from the other."""
        return [self._beside(f"next{number}") for number in range(2)]

    def _beside(self, what: str) -> Path:
        return self.path.parent / f".gymfast.{what}.{self.path.name}"

    def _lock(self) -> int:
        path = self._beside("lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise ConflictError(
                f"checkpoint {self.path} is followed by another process (lock {path}): give each "
                "subscriber its own"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        return fd


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _move_others(old: Path, new: Path) -> None:
    """Moves all that is no weight and not there yet: folders, hidden and large files stay."""
    for path in sorted(old.iterdir()):
        is_of_weights = path.name.endswith(_WEIGHT_SUFFIXES) or path.name.startswith(
            _JOURNAL_PREFIX
        )
        if not is_of_weights and not os.path.lexists(new / path.name):
            path.rename(new / path.name)
    sync_directory(new)


def _copy_side_files(old: Path, new: Path) -> None:
    """Configuration and tokenizer are there from the first moment of the new checkpoint on."""
    for path in _side_files(old):
        if not (new / path.name).exists():
            shutil.copyfile(path, new / path.name)
            fd = os.open(new / path.name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _side_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        is_weight = path.name.endswith(_WEIGHT_SUFFIXES) or path.name.startswith(".")
        if not is_weight and path.is_file() and path.stat().st_size <= _SIDE_FILE_BYTES:
            yield path
