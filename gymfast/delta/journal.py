r"""Redo journals: in-place updates of checkpoint files that a crash cannot tear.

A journal is a file beside the checkpoint. It is written and synced first, with the new bytes of
every place that changes; then its header is set and synced (the commit); only then the checkpoint
is written. Playing it is idempotent, so that a crash at any point leaves the old state (no commit)
or one that `recover` completes. It is locked with flock while a process works on it.

    journal := header body
    header  := magic "GFJRNL1\n", u64 body_bytes, 32 bytes SHA-256 of the body, 16 zeros;
               64 zeros until the commit
    body    := u32 num_bytes, JSON list of [file name, file size]; records
    record  := u32 file, u8 unit_bytes, u8 is_dense, u64 file offset, u64 count,
               sparse: count u32 (units from the offset, ascending); count units
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import struct
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType

import numpy as np

from gymfast.delta.changes import list_changes
from gymfast.delta.files import (
    open_regular,
    os_errors,
    read_into,
    sync_directory,
    write_all,
)
from gymfast.delta.memory import U8
from gymfast.delta.workers import OrderedWorkers
from gymfast.errors import ChecksumError, ConflictError, GymfastError

_MAGIC = b"GFJRNL1\n"
_HEADER = struct.Struct("<8sQ32s16x")
_RECORD = struct.Struct("<IBBQQ")
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_READ_BYTES = 2**22
_RECORDS_BEHIND = 32


def journal_path(checkpoint: Path) -> Path:
    """Where the journal of a checkpoint is: beside the file itself, not beside a link to it."""
    checkpoint = checkpoint.resolve()
    if checkpoint.is_dir():
        return checkpoint / ".gymfast-journal"
    return checkpoint.parent / f".{checkpoint.name}.gymfast-journal"


def recover(checkpoint: Path | str) -> bool:
    """Completes an in-place update that was interrupted; True if there was one.

    Raises ConflictError if another process is in the middle of it, ChecksumError if the journal is
    damaged, GymfastError for what the system says.
    """
    with os_errors("recover checkpoint", checkpoint):
        path = journal_path(Path(checkpoint))
        if not path.exists():
            return False
        fd = open_regular(path, follow=False)
        try:
            is_committed = _read_header(fd, path) is not None
        finally:
            os.close(fd)
        try:
            with Journal(Path(checkpoint)) as journal:
                return journal.has_recovered
        except ConflictError:
            if is_committed:
                raise
        except OSError as error:
            if is_committed or error.errno not in _NOT_WRITABLE:
                raise
    return False  # not committed: the checkpoint is untouched, and its writer cleans up


class Journal:
    """The journal of one checkpoint, locked; what an earlier process left is completed first."""

    def __init__(self, checkpoint: Path) -> None:
        """Takes the lock.

        Raises ConflictError if another process holds it, ChecksumError if a journal that was left
        is damaged, OSError.
        """
        self.path = journal_path(checkpoint)
        self._directory = self.path.parent
        self._fd = _open_locked(self.path)
        self.has_recovered = False
        self._is_own = False  # committed by this process, not found
        self._lock = Lock()
        self._sha = hashlib.sha256()
        self._at = _HEADER.size
        try:
            if _read_header(self._fd, self.path) is not None:
                self.play()
                self.has_recovered = True
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes the journal unless a committed one could not be played to its end."""
        try:
            if _read_header(self._fd, self.path) is None:
                self.path.unlink(missing_ok=True)
        finally:
            os.close(self._fd)

    def begin(self, files: list[Path]) -> None:
        """Starts a new journal for these files, which are in the directory of the checkpoint."""
        os.ftruncate(self._fd, 0)
        write_all(self._fd, bytes(_HEADER.size), 0)
        self._sha = hashlib.sha256()
        self._at = _HEADER.size
        self._is_own = False
        table = json.dumps([[file.name, file.stat().st_size] for file in files]).encode()
        self._append(len(table).to_bytes(4, "little") + table)

    def add(self, file: int, offset: int, unit_bytes: int, before: U8, after: U8) -> int:
        """Notes what turns the bytes before into after, at an offset of a file; units changed.

        Several threads may add.
        """
        positions, values = list_changes(before, after, unit_bytes)
        num_changed = len(positions) // 4
        if num_changed == 0:
            return 0
        is_dense = num_changed * (4 + unit_bytes) >= after.size
        count = after.size // unit_bytes if is_dense else num_changed
        record = _RECORD.pack(file, unit_bytes, is_dense, offset, count)
        with self._lock:
            self._append(record + (after.tobytes() if is_dense else positions + values))
        return num_changed

    def commit(self) -> None:
        """Makes the journal durable: from here on the update happens, whatever happens."""
        os.fsync(self._fd)
        sync_directory(self._directory)
        header = _HEADER.pack(_MAGIC, self._at - _HEADER.size, self._sha.digest())
        write_all(self._fd, header, 0)
        os.fsync(self._fd)
        self._is_own = True

    def play(self, threads: int = 1) -> None:
        """Writes what a committed journal says, makes it durable and empties the journal.

        A thread has one file at a time: the system lets no two write to the same.
        Raises ChecksumError if it is damaged, GymfastError if it is not of these files.
        """
        body = _Body(self._fd, self.path)
        if not self._is_own:
            body.check()
        files = body.files()
        fds: list[int] = []
        try:
            for name, num_bytes in files:
                fds.append(_open_target(self._directory, name, num_bytes, self.path))
            records = body.records().items()
            with ThreadPoolExecutor(max(threads, 1), "gymfast-sync") as syncers:
                behind = syncers if threads > 1 else None
                jobs = ((n, partial(body.play_file, fds[n], ats, behind)) for n, ats in records)
                workers: OrderedWorkers[int, None] = OrderedWorkers(threads, 2 * threads)
                for _ in workers.run(jobs):
                    pass
        finally:
            for fd in fds:
                os.close(fd)
        os.ftruncate(self._fd, 0)
        os.fsync(self._fd)

    def _append(self, data: bytes) -> None:
        write_all(self._fd, data, self._at)
        self._sha.update(data)
        self._at += len(data)


class _Body:
    """The body of a committed journal."""

    def __init__(self, fd: int, path: Path) -> None:
        header = _read_header(fd, path)
        assert header is not None
        self._fd, self._path = fd, path
        self._end = _HEADER.size + header[0]
        self._digest = header[1]
        self._table_bytes = int.from_bytes(self._read(_HEADER.size, 4), "little")

    def check(self) -> None:
        """Raises ChecksumError if the body is damaged; nothing is to be taken from it then."""
        sha = hashlib.sha256()
        for at in range(_HEADER.size, self._end, _READ_BYTES):
            sha.update(self._read(at, min(_READ_BYTES, self._end - at)))
        if sha.digest() != self._digest:
            raise ChecksumError(
                f"{self._path}: SHA-256 of the journal is {sha.hexdigest()[:16]}…, its header says "
                f"{self._digest.hex()[:16]}…: it is damaged, and the checkpoint may be half "
                "updated; write the checkpoint again from an anchor and delete the journal"
            )

    def files(self) -> list[tuple[str, int]]:
        table = self._read(_HEADER.size + 4, self._table_bytes)
        return [(str(name), int(size)) for name, size in json.loads(bytes(table))]

    def records(self) -> dict[int, list[int]]:
        """Where the records of each file begin."""
        at = _HEADER.size + 4 + self._table_bytes
        starts: dict[int, list[int]] = {}
        while at < self._end:
            file, unit_bytes, is_dense, _, count = self._record(at)
            starts.setdefault(file, []).append(at)
            at += _RECORD.size + count * (unit_bytes if is_dense else unit_bytes + 4)
        return starts

    def play_file(self, fd: int, starts: list[int], behind: Executor | None) -> None:
        """Writes what the records of a file say, and makes it durable.

        With an executor, the disk works meanwhile on what was written before.
        """
        syncs = []
        for number, at in enumerate(starts, 1):
            self._play_record(fd, at)
            if behind and number % _RECORDS_BEHIND == 0:
                syncs.append(behind.submit(os.fdatasync, fd))
        for sync in syncs:
            sync.result()  # an error is told once
        os.fsync(fd)

    def _play_record(self, fd: int, at: int) -> None:
        _, unit_bytes, is_dense, offset, count = self._record(at)
        data = memoryview(self._read(at + _RECORD.size, count * (unit_bytes + 4 * (not is_dense))))
        if is_dense:
            write_all(fd, data, offset)
            return
        positions = np.frombuffer(data[: 4 * count], "<u4")
        values = np.frombuffer(data[4 * count :], f"<u{unit_bytes}")
        buffer = np.empty(unit_bytes * (int(positions[-1]) + 1), np.uint8)
        read_into(fd, buffer.data, offset, self._path)
        buffer.view(values.dtype)[positions] = values
        write_all(fd, buffer.data, offset)

    def _record(self, at: int) -> tuple[int, int, bool, int, int]:
        return _RECORD.unpack(self._read(at, _RECORD.size))

    def _read(self, at: int, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        read_into(self._fd, memoryview(data), at, self._path)
        return data


def _open_locked(path: Path) -> int:
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise ConflictError(
                f"{path} is locked: another process is updating this checkpoint in place; wait for "
                "it and try again"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # removed by its last owner in the meantime: take the new one


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _read_header(fd: int, path: Path) -> tuple[int, bytes] | None:
    """body_bytes and SHA-256 of a committed journal, None for one that is not committed."""
    if os.fstat(fd).st_size < _HEADER.size:
        return None
    raw = bytearray(_HEADER.size)
    read_into(fd, memoryview(raw), 0, path)
    if not any(raw):
        return None
    magic, body_bytes, digest = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise ChecksumError(
            f"{path} starts with {magic!r}, expected {_MAGIC!r}: no journal of this version of "
            "gymfast, or a damaged one; if nothing else explains it, write the checkpoint again "
            "from an anchor and delete this file"
        )
    return body_bytes, digest


def _open_target(directory: Path, name: str, num_bytes: int, journal: Path) -> int:
    if Path(name).name != name or name in ("", ".", ".."):
        raise GymfastError(f"{journal}: file name {name!r} leads out of the directory: refused")
    fd = open_regular(directory / name, writable=True, follow=False)
    found = os.fstat(fd).st_size
    if found != num_bytes:
        os.close(fd)
        raise GymfastError(
            f"{journal} is for {name} of {num_bytes} bytes, found {found}: the file was replaced; "
            "delete the journal if the replacement is meant to stay"
        )
    return fd
