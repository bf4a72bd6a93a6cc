"""New version directories, whole or absent: a staging directory that is renamed at the end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gymfast.delta.checkpoint_stream import Meter, Progress
from gymfast.delta.files import Buffer, os_errors, sync_directory, write_all
from gymfast.delta.hf_delta.copying import copy_file, files_of
from gymfast.delta.hf_delta.digests import DEFAULT_ALGORITHM, HEX_DIGITS
from gymfast.delta.hf_delta.seed import open_seed
from gymfast.delta.hf_delta.stored import Stored, file_name, file_pieces, index_text, store
from gymfast.delta.hf_delta.version import ENCODINGS, INDEX_NAME, version_name
from gymfast.delta.memory import U8
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.state import num_threads
from gymfast.delta.temporary import make_temporary, remove, sweep
from gymfast.errors import ConflictError, FormatError

MAX_FILE_BYTES = 2**30  # frames that are in memory at a time, but for one larger tensor


@dataclass(frozen=True)
class PublishReport:
    """A published version: its directory, and what is in it."""

    path: Path
    version: int
    is_full: bool
    num_tensors: int
    num_changed: int
    stored_bytes: int


class StagedDirectory:
    """A directory that is given its name when it is complete, or removed."""

    def __init__(self, out: Path) -> None:
        """The directory that is to be at out.

        Raises ConflictError if something is there.
        """
        self.out = out
        self.path: Path  # from __enter__ on
        self._fd = -1
        if os.path.lexists(out):
            raise ConflictError(
                f"{out} is published already: a version is not changed; choose the next number, or "
                "remove it first"
            )

    def __enter__(self) -> StagedDirectory:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        sweep(self.out)
        self.path, self._fd = make_temporary(self.out, is_directory=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            remove(self.path)  # not there any more if it was committed
        finally:
            os.close(self._fd)

    def write(self, name: str, pieces: list[Buffer]) -> int:
        """Writes a new file, durably; its size."""
        return write_new(self.path / name, pieces)

    def commit(self) -> None:
        """Makes everything durable and visible with one rename."""
        sync_directory(self.path)
        self.path.rename(self.out)
        sync_directory(self.out.parent)


class VersionWriter:
    """Writes a delta version, a tensor at a time."""

    def __init__(
        self,
        staged: StagedDirectory,
        number: int,
        encoding: str,
        algorithm: str,
        *,
        threads: int = 1,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """A writer into an entered staged directory.

        Raises ValueError for an unknown encoding or digest, or a number below 1.
        """
        _check_options(number, encoding, algorithm)
        self._staged, self._number = staged, number
        self._encoding, self._algorithm = encoding, algorithm
        self._threads, self._max_file_bytes = threads, max_file_bytes
        self._stored: dict[str, Stored] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []  # names of tensors
        self.num_changed = 0
        self.stored_bytes = 0

    def add(self, name: str, old: U8, new: U8) -> bool:
        """Stores what turns old into new, if they differ; whether they do.

        Raises FormatError for an overwrite of 4 GiB or more.
        """
        stored = store(name, old, new, self._encoding, self._algorithm, threads=self._threads)
        if stored is None:
            return False
        self._stored[name] = stored
        self._pending_bytes += len(stored.frame)
        self.num_changed += 1
        if self._pending_bytes >= self._max_file_bytes:
            self._flush()
        return True

    def commit(self) -> None:
        """Gives the files their names, writes the index and publishes the version."""
        self._flush()
        weight_map = {}
        for number, names in enumerate(self._files):
            file = file_name(number, len(self._files))
            (self._staged.path / _part(number)).rename(self._staged.path / file)
            weight_map.update(dict.fromkeys(names, file))
        index = index_text(self._number, self._encoding, self._algorithm, weight_map)
        self._staged.write(INDEX_NAME, [index])
        self._staged.commit()

    def _flush(self) -> None:
        if not self._stored:
            return
        pieces = file_pieces(self._stored)
        self.stored_bytes += self._staged.write(_part(len(self._files)), pieces)
        self._files.append(list(self._stored))
        self._stored, self._pending_bytes = {}, 0


def publish_delta(
    source: Path | str,
    number: int,
    old: Path | str,
    new: Path | str,
    *,
    encoding: str = "xor",
    algorithm: str = DEFAULT_ALGORITHM,
    threads: int | None = None,
    progress: Progress | None = None,
) -> PublishReport:
    """Publishes the delta version that turns the checkpoint old (number - 1) into new.

    A tensor of each is in memory at a time, and frames up to MAX_FILE_BYTES.
    Raises ValueError for unusable options, ConflictError if the version is there, FormatError for
    damaged checkpoints, or such that have not the same tensors; GymfastError for what the system
    says. Whatever happens, the version is there completely or not at all.
    """
    _check_options(number, encoding, algorithm)
    out = Path(source) / version_name(number)
    with Checkpoint.open(old) as before, Checkpoint.open(new) as after:
        _require_same(before, after)
        meter = Meter(progress, 2 * sum(after.spec(name).num_bytes for name in after.names))
        with os_errors("publish", out), StagedDirectory(out) as staged:
            writer = VersionWriter(
                staged, number, encoding, algorithm, threads=num_threads(threads)
            )
            for name in after.names:
                writer.add(name, before.read(name).data, after.read(name).data)
                meter.add(2 * after.spec(name).num_bytes)
            writer.commit()
        num_tensors = len(after.names)
    return PublishReport(out, number, False, num_tensors, writer.num_changed, writer.stored_bytes)


def publish_full(
    source: Path | str, number: int, new: Path | str, *, progress: Progress | None = None
) -> PublishReport:
    """Publishes a copy of a checkpoint directory as a full version; raises like publish_delta."""
    _check_options(number, ENCODINGS[0], DEFAULT_ALGORITHM)
    out = Path(source) / version_name(number)
    with ExitStack() as stack:
        seed = stack.enter_context(open_seed(Path(new)))
        stack.enter_context(os_errors("publish", out))
        staged = stack.enter_context(StagedDirectory(out))
        files = files_of(seed.path)
        num_bytes = sum(path.stat().st_size for path in files.values())
        meter = Meter(progress, num_bytes)
        for name, path in files.items():
            copy_file(path, staged.path / name, meter)
        staged.commit()
        return PublishReport(out, number, True, len(seed.names), len(seed.names), num_bytes)


def write_new(path: Path, pieces: Iterable[Buffer]) -> int:
    """Writes a new file, durably; its size. Raises OSError, also if it is there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        at = 0
        for piece in pieces:
            write_all(fd, piece, at)
            at += len(piece)
        os.fsync(fd)
    finally:
        os.close(fd)
    return at


def _part(number: int) -> str:
    return f"part-{number:05d}"


def _check_options(number: int, encoding: str, algorithm: str) -> None:
    if number < 1:
        raise ValueError(f"version {number}, expected 1 or more: version 0 is the base checkpoint")
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r} is unknown, expected {' or '.join(ENCODINGS)}")
    if algorithm not in HEX_DIGITS:
        raise ValueError(f"digest {algorithm!r} is unknown, expected {', '.join(HEX_DIGITS)}")


def _require_same(old: Checkpoint, new: Checkpoint) -> None:
    for name in sorted({*old.names, *new.names}):
        specs = [
            (s.spec(name).dtype, s.spec(name).shape) if name in s.names else None
            for s in (old, new)
        ]
        if specs[0] != specs[1]:
            raise FormatError(
                f"tensor {name!r} is {_text(specs[0])} in {old.path} and {_text(specs[1])} in "
                f"{new.path}: a delta cannot say that; publish a full version"
            )


def _text(spec: tuple[str, tuple[int, ...]] | None) -> str:
    return "not there" if spec is None else f"{spec[0]} {list(spec[1])}"
