"""A delta version applied to a local checkpoint through a redo journal: whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np

from gymfast.delta.checkpoint_stream import Meter
from gymfast.delta.files import os_errors
from gymfast.delta.geometry import unit_bytes_of
from gymfast.delta.hf_delta.check import RESEED, WINDOW_BYTES, digest_of
from gymfast.delta.hf_delta.digests import check_equal, new_hasher
from gymfast.delta.hf_delta.patch import open_patch
from gymfast.delta.hf_delta.state import LocalState, SyncFolder
from gymfast.delta.hf_delta.version import DeltaVersion, StoredTensor
from gymfast.delta.journal import Journal
from gymfast.delta.memory import U8
from gymfast.delta.safetensors_files import Checkpoint, CheckpointTensor
from gymfast.delta.workers import OrderedWorkers
from gymfast.errors import CoverageError, GymfastError

# Tensor, first byte, old, new: units changed. Both windows are used again afterwards.
Sink = Callable[[CheckpointTensor, int, U8, U8], int]


def apply_version(
    folder: SyncFolder, held: LocalState, version: DeltaVersion, threads: int, meter: Meter
) -> tuple[LocalState, int]:
    """Brings a local checkpoint from one version to the next; the new state and units changed.

    A thread has one tensor at a time, and of it a window of WINDOW_BYTES.

    All tensors are decoded, checked and noted in the journal before a byte is changed; digests of
    the result are staged and the state is removed before the journal is committed, so that at no
    time a state stands beside bytes that are not its own. The caller holds the lock.
    Raises FormatError (also as ChecksumError, CoverageError) with the checkpoint as it was.
    """
    assert held.digests is not None
    local = folder.local
    with (
        os_errors("update", local),
        Journal(local) as journal,
        Checkpoint.open(local, needs_recovery=False) as source,
    ):
        require_tensors(source, version)
        _require_own_files(source)
        journal.begin([shard.path for shard in source.shards])

        lock = Lock()  # of the meter

        def note(spec: CheckpointTensor, start: int, old: U8, new: U8) -> int:
            with lock:
                meter.add(new.size)
            return journal.add(spec.shard, spec.start + start, unit_bytes_of(spec.dtype), old, new)

        jobs = [
            (stored, partial(decode_tensor, source, version, stored, held.digests, note))
            for stored in version.tensors.values()
        ]
        workers: OrderedWorkers[StoredTensor, int] = OrderedWorkers(threads, len(jobs))
        num_changed = sum(count or 0 for _, count in workers.run(jobs))
        proved = {n: f"{version.algorithm}:{t.digest}" for n, t in version.tensors.items()}
        new = LocalState(version.number, held.digests | proved)
        folder.stage(new)
        if num_changed:
            folder.clear()
            journal.commit()
            with os_errors("write (the next pull completes it) to", local):
                journal.play(threads)
        folder.commit(version.number)
    return new, num_changed


def decode_tensor(
    source: Checkpoint,
    version: DeltaVersion,
    stored: StoredTensor,
    digests: dict[str, str],
    sink: Sink,
) -> int:
    """Passes the old and new bytes of a tensor to the sink, window by window; units changed.

    Raises FormatError for an unsound frame, ChecksumError if the result is not the one stated;
    digests, where they know the tensor, then tell which of the two sides is damaged.
    """
    spec = source.spec(stored.name)
    patch, hasher = open_patch(version, stored, spec.num_bytes), new_hasher(version.algorithm)
    num_changed, size = 0, min(WINDOW_BYTES, spec.num_bytes)
    buffers = np.empty((2, size), np.uint8)
    for start in range(0, spec.num_bytes, WINDOW_BYTES):
        old, new = buffers[:, : spec.num_bytes - start]
        source.read_into(stored.name, start, old)
        patch.apply(old, new, start)
        hasher.update(new.data)
        num_changed += sink(spec, start, old, new)
    patch.finish()
    found = hasher.hexdigest()
    if found != stored.digest:
        where = f"{version.file_of(stored)}: tensor {stored.name!r} of the result"
        check_equal(found, stored.digest, where, _whose_fault(source, stored.name, digests))
    return num_changed


def require_tensors(source: Checkpoint, version: DeltaVersion) -> None:
    """Raises CoverageError if a version names a tensor that a checkpoint does not have."""
    missing = sorted(version.tensors.keys() - set(source.names))
    if missing:
        raise CoverageError(
            f"{version.path}: tensor {missing[0]!r} (and {len(missing) - 1} more) is not in "
            f"{source.path}: the version is of another checkpoint; check the base directory, or "
            "publish a full version"
        )


def _whose_fault(source: Checkpoint, name: str, digests: dict[str, str]) -> str:
    noted = digests.get(name)
    if noted is None:
        return f"the version is damaged, or not of this base; publish it again, or {RESEED}"
    algorithm, _, _ = noted.partition(":")
    if digest_of(source, name, algorithm, Meter(None, 0)) == noted:
        return (
            "the old bytes are as noted, so the version is damaged or was made from another base; "
            "publish or copy it again"
        )
    return f"the old bytes changed on this disk since the last pull; {RESEED}"


def _require_own_files(source: Checkpoint) -> None:
    link: Path | None = next((s.path for s in source.shards if s.path.is_symlink()), None)
    if link is not None:
        raise GymfastError(
            f"{link} is a symbolic link: its file is not changed in place; nothing was written; "
            f"{RESEED}"
        )
