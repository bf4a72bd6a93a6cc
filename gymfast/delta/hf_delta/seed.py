"""A local checkpoint made an exact copy of a full one; killed at any point, it is begun again."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gymfast.delta.checkpoint_stream import Meter
from gymfast.delta.files import os_errors, sync_directory
from gymfast.delta.hf_delta.check import digest_all
from gymfast.delta.hf_delta.copying import copy_file, files_of
from gymfast.delta.hf_delta.state import LocalState, SyncFolder
from gymfast.delta.hf_delta.version import INDEX_NAME, is_delta_file
from gymfast.delta.safetensors_files import Checkpoint, Shard
from gymfast.errors import BudgetError, FormatError, GymfastError

_NUMBERED = re.compile(r"-of-([0-9]{1,9})\.safetensors$")


def open_seed(path: Path) -> Checkpoint:
    """A full version or base checkpoint, checked before anything is made of it.

    Raises FormatError if it is none, also if it is a delta version whose index is missing.
    """
    seed = Checkpoint.open(path)
    if not seed.is_directory:
        seed.close()
        raise FormatError(f"{path} is a file, expected the directory of a checkpoint")
    if seed.index is None and (what := _part_of(seed.shards[0])):
        seed.close()
        raise FormatError(
            f"{path} has {what} but no {INDEX_NAME}: it is incomplete; wait for it, or copy it "
            "again"
        )
    return seed


def _part_of(shard: Shard) -> str | None:
    """What the only file of a directory is a part of, if it cannot be a whole checkpoint."""
    if is_delta_file(shard):
        return "the files of a delta version"
    numbered = _NUMBERED.search(shard.name)
    return f"one file of {int(numbered[1])}" if numbered and int(numbered[1]) > 1 else None


def check_local(folder: SyncFolder, seed: Path) -> None:
    """Raises GymfastError if the files in the local directory are not those of a receiver.

    They would be removed: a receiver's directory has a folder `.weight_sync`, or nothing in it.
    """
    local = folder.local
    if local.resolve() == seed.resolve():
        raise GymfastError(f"{local} is the full version itself: choose another local directory")
    with os_errors("read", local):
        found = min((p.name for p in local.iterdir() if p.is_file()), default=None)
    if found is not None and not folder.path.is_dir():
        raise GymfastError(
            f"{local} holds {found!r} and no {folder.path.name}: no receiver made it, and its "
            "files would be removed; choose an empty or a new directory"
        )


def reset(folder: SyncFolder, seed: Checkpoint, version: int, algorithm: str, meter: Meter) -> None:
    """Makes the local checkpoint a copy of the seed, whose other files go along; durable.

    The state is removed first and written last, so that a killed reset is begun again. Every file
    is replaced by rename: whoever has mapped the old one keeps it. Files that the seed does not
    have are removed.
    Raises BudgetError if the disk is too small, GymfastError for what the system says.
    """
    local = folder.local
    with os_errors("copy the full version to", local):
        files = files_of(seed.path)
        _check_space(local, files)
        folder.forget()
        for path in local.iterdir():
            if path.is_file() and path.name not in files:
                path.unlink()
        for name, path in files.items():
            copy_file(path, local / name, meter)
        sync_directory(local)
    with Checkpoint.open(local) as copy:
        digests = digest_all(copy, algorithm, meter)
    folder.stage(LocalState(version, digests))
    folder.commit(version)


def num_bytes_to_copy(seed: Checkpoint) -> int:
    """Bytes of all files that a reset copies."""
    return sum(path.stat().st_size for path in files_of(seed.path).values())


def _check_space(local: Path, files: dict[str, Path]) -> None:
    disk = os.statvfs(local)
    free = disk.f_bavail * disk.f_frsize
    freed = sum(path.stat().st_size for path in local.iterdir() if path.is_file())
    needed = sum(path.stat().st_size for path in files.values())
    if free + freed < needed:
        raise BudgetError(
            f"{local} needs {needed} bytes, its disk has {free} free and {freed} in files that "
            "would be replaced: make room"
        )
