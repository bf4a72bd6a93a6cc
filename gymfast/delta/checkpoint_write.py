"""New checkpoints: written under temporary names, synced, then renamed, so whole or absent."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gymfast.delta.apply_plan import Step
from gymfast.delta.checkpoint_replace import files_to_replace, put_back, replace_directory
from gymfast.delta.files import read_into, read_whole, sync_directory, write_all
from gymfast.delta.frame import Kind
from gymfast.delta.journal import journal_path, recover
from gymfast.delta.memory import U8
from gymfast.delta.safetensors_files import (
    DEFAULT_NAME,
    INDEX_SUFFIX,
    SUFFIX,
    Checkpoint,
    resolve_shard,
)
from gymfast.delta.safetensors_header import Header, HeaderEntry, build_header
from gymfast.delta.temporary import make_temporary, remove, sweep
from gymfast.errors import BudgetError, FormatError, GymfastError, NotFoundError

_SIDE_FILE_BYTES = 2**25  # configuration and tokenizer go along, other weights do not
_log = logging.getLogger(__name__)
Entry = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class ShardPlan:
    """One file to write: its first bytes and where its tensors go."""

    name: str
    start: bytes
    header: Header

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        tensors = self.header.tensors
        return tensors[-1].start + tensors[-1].num_bytes if tensors else len(self.start)


def plan_shards(source: Checkpoint | None, steps: list[Step], file_name: str) -> list[ShardPlan]:
    """The files of the new checkpoint: tensors stay in their shard, new ones go to the last.

    file_name is the name of the only file if there is no source, or it is a single file.
    """
    live = (step for step in steps if step.record.kind is not Kind.REMOVED)
    new = {step.name: (step.name, *step.spec) for step in live}
    if source is None:
        return [_shard(file_name, new.values(), {"format": "pt"})]
    layout: list[tuple[str, list[Entry], dict[str, str]]] = []
    for shard in source.shards:
        kept = [new.pop(t.name) for t in shard.header.tensors if t.name in new]
        name = shard.name if source.is_directory else file_name
        layout.append((name, kept, shard.header.metadata))
    layout[-1][1].extend(new.values())
    kept_layout = [item for item in layout if item[1]] or layout[:1]
    return [_shard(*item) for item in kept_layout]


def _shard(name: str, entries: Iterable[Entry], metadata: dict[str, str]) -> ShardPlan:
    start, header = build_header(entries, metadata)
    return ShardPlan(name, start, header)


class CheckpointWriter:
    """Writes the files of a checkpoint; they appear at `out` when it is committed."""

    def __init__(
        self,
        out: Path,
        shards: list[ShardPlan],
        source: Checkpoint | None,
        *,
        replace: bool = False,
    ) -> None:
        """A writer of a directory if out is to be one, else of a single file.

        A file is replaced if it is there, a directory of a checkpoint only with `replace`.

        Raises GymfastError if out is there and cannot be replaced, ConflictError if another
        process updates it in place, BudgetError if the disk is too small, OSError.
        """
        self._out = out
        self._is_directory = writes_directory(out, source)
        self._shards = shards
        self._source = source
        self._places: dict[str, tuple[int, HeaderEntry]] = {}
        self._fds: list[int] = []
        self._replaced = check_out(out, source, replace=replace)
        if not self._is_directory:
            _settle_journal(out)
        sweep(out)
        _check_space(out, sum(shard.num_bytes for shard in shards))
        self._temporary: Path  # from __enter__ on

    def __enter__(self) -> CheckpointWriter:
        self._temporary, fd = make_temporary(self._out, is_directory=self._is_directory)
        self._fds.append(fd)
        try:
            for shard in self._shards:
                self._create(shard)
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abort()

    def write(self, name: str, start: int, data: U8) -> None:
        """Writes bytes of a tensor at a byte offset in it."""
        fd, entry = self._places[name]
        write_all(fd, data.data, entry.start + start)

    def read_into(self, name: str, start: int, out: U8) -> None:
        """Reads bytes of a tensor that were written."""
        fd, entry = self._places[name]
        if out.size:
            read_into(fd, out.data, entry.start + start, self._temporary)

    def commit(self) -> None:
        """Makes everything durable and visible: the index last, then one rename."""
        if self._is_directory:
            self._write_side_files()
        for fd in self._fds:
            os.fsync(fd)
        if self._is_directory and self._source is not None and self._source.index is not None:
            self._write_new(self._source.index.name, self._index_text())
        if self._is_directory:
            sync_directory(self._temporary)
        if self._replaced:
            replace_directory(self._temporary, self._out, self._replaced)
        else:
            self._temporary.rename(self._out)
        sync_directory(self._out.parent)

    def _create(self, shard: ShardPlan) -> None:
        if self._is_directory:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fds.append(os.open(self._temporary / shard.name, flags, 0o666))
        fd = self._fds[-1]
        write_all(fd, shard.start, 0)
        os.ftruncate(fd, shard.num_bytes)
        for entry in shard.header.tensors:
            self._places[entry.name] = (fd, entry)

    def _abort(self) -> None:
        """Removes what was not committed."""
        while len(self._fds) > 1:
            os.close(self._fds.pop())
        try:
            remove(self._temporary)
        finally:
            os.close(self._fds.pop())  # the lock, last

    def _index_text(self) -> bytes:
        assert self._source is not None
        assert self._source.index is not None
        total = sum(t.num_bytes for shard in self._shards for t in shard.header.tensors)
        weight_map = {t.name: shard.name for shard in self._shards for t in shard.header.tensors}
        metadata = {**self._source.index.metadata, "total_size": total}
        table = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        return json.dumps(table, indent=2, ensure_ascii=False).encode() + b"\n"

    def _write_side_files(self) -> None:
        for path in _side_files(self._source):
            self._write_new(path.name, read_whole(path))

    def _write_new(self, name: str, data: bytes | memoryview) -> None:
        fd = os.open(self._temporary / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            write_all(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)


def writes_directory(out: Path, source: Checkpoint | None) -> bool:
    """Whether out becomes a directory: as the source is, or by its name if there is none."""
    return not out.name.endswith(SUFFIX) if source is None else source.is_directory


def single_name(out: Path, source: Checkpoint | None) -> str:
    """The name of the file if there is only one."""
    return DEFAULT_NAME if writes_directory(out, source) else out.name


def check_out(out: Path, source: Checkpoint | None, *, replace: bool) -> set[str]:
    """The names of the files at out that are to be replaced; none if out is a file or not there.

    Raises GymfastError if out is there and cannot be replaced.
    """
    if not writes_directory(out, source):
        if out.is_dir():
            raise GymfastError(f"{out} is a directory, the base is a file: name a file")
        return set()
    put_back(out)
    if not os.path.lexists(out) or ((is_plain := _is_directory(out)) and not any(out.iterdir())):
        return set()
    if not replace or not is_plain:
        raise GymfastError(
            f"{out} is there already: expected a new name for the directory, or an empty one"
        )
    return files_to_replace(out, (path.name for path in _side_files(source)))


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _side_files(source: Checkpoint | None) -> list[Path]:
    """The files of a checkpoint directory that go along to a new one: small, and no weights."""
    if source is None or not source.is_directory:
        return []
    found = []
    for path in sorted(source.path.iterdir()):
        if path.name.endswith((SUFFIX, INDEX_SUFFIX)) or path.name.startswith("."):
            continue
        with contextlib.suppress(FormatError):
            whole = resolve_shard(source.path, path.name, suffix="")
            if whole.is_file() and whole.stat().st_size <= _SIDE_FILE_BYTES:
                found.append(whole)
                continue
        _log.info("%s does not go along", path)
    return found


def _settle_journal(out: Path) -> None:
    """Completes an update of the file that is to be replaced: its journal would play on the new."""
    try:
        recover(out)
    except NotFoundError as error:
        raise GymfastError(
            f"{journal_path(out)} is the journal of a file that is gone, and would change a new "
            "one of that name: delete it, or put the file back"
        ) from error


def _check_space(out: Path, num_bytes: int) -> None:
    disk = os.statvfs(out.parent)
    free = disk.f_bavail * disk.f_frsize
    if free < num_bytes:
        raise BudgetError(
            f"{out} needs {num_bytes} bytes, {out.parent} has {free} free: make room, or update in "
            "place (--in-place)"
        )
