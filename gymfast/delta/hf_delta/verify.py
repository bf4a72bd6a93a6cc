"""Versions and local checkpoints checked: every frame decoded, every digest compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gymfast.delta.checkpoint_stream import Meter, Progress
from gymfast.delta.hf_delta.apply import decode_tensor, require_tensors
from gymfast.delta.hf_delta.check import check_names, check_tensors
from gymfast.delta.hf_delta.seed import open_seed
from gymfast.delta.hf_delta.state import SyncFolder
from gymfast.delta.hf_delta.version import DeltaVersion, open_version
from gymfast.delta.hf_delta.zstd_frame import ZstdFrame
from gymfast.delta.memory import U8
from gymfast.delta.safetensors_files import Checkpoint, CheckpointTensor
from gymfast.errors import NotFoundError


@dataclass(frozen=True)
class Verified:
    """What was found sound: a version (of a local checkpoint, if it is one) and its tensors."""

    version: int | None
    is_full: bool
    num_tensors: int
    digests_compared: int


def verify_version(
    path: Path | str, base: Path | str | None = None, *, progress: Progress | None = None
) -> Verified:
    """Checks a published version; with the checkpoint it builds on, the digests of the result too.

    Raises NotFoundError, FormatError (also as ChecksumError, CoverageError), ChainError.
    """
    version = open_version(path)
    if version is None:
        with open_seed(Path(path)) as seed:
            return Verified(None, True, len(seed.names), 0)
    with version:
        num_tensors = len(version.tensors)
        if base is None:
            _drain(version, Meter(progress, version.stored_bytes))
            return Verified(version.number, False, num_tensors, 0)
        with Checkpoint.open(base) as source:
            require_tensors(source, version)
            total = sum(source.spec(name).num_bytes for name in version.tensors)
            meter = Meter(progress, total)

            def count(spec: CheckpointTensor, start: int, old: U8, new: U8) -> int:  # noqa: ARG001
                meter.add(new.size)
                return 0

            for stored in version.tensors.values():
                decode_tensor(source, version, stored, {}, count)
        return Verified(version.number, False, num_tensors, num_tensors)


def verify_local(local: Path | str, *, progress: Progress | None = None) -> Verified:
    """Compares every tensor of a receiver's directory with the digest that was noted.

    Waits for a pull that is at work. Nothing is changed, but for an interrupted pull, whose
    journal is completed. Raises NotFoundError if no version is held or no digests are noted,
    ChecksumError or CoverageError for the first tensor that is not as noted.
    """
    folder = SyncFolder(Path(local))
    if not folder.path.is_dir():
        raise NotFoundError(f"{local} has no {folder.path.name}: no receiver wrote it; pull first")
    with folder.locked(), Checkpoint.open(local) as checkpoint:
        held = folder.read()
        if held is None:
            raise NotFoundError(
                f"{local} holds no version: a pull was interrupted, or never made; pull again"
            )
        if held.digests is None:
            raise NotFoundError(
                f"{local} holds version {held.version}, pulled by other code: no digests are "
                "noted; the next pull of a newer version notes them"
            )
        meter = Meter(progress, sum(checkpoint.spec(n).num_bytes for n in checkpoint.names))
        check_names(checkpoint, held.digests, folder.local)
        check_tensors(checkpoint, held.digests, checkpoint.names, folder.local, meter)
        num_tensors = len(checkpoint.names)
        return Verified(held.version, False, num_tensors, num_tensors)


def _drain(version: DeltaVersion, meter: Meter) -> None:
    for stored in version.tensors.values():
        shard = version.shards[stored.shard]
        where = f"{shard.path}: tensor {stored.name!r}"
        ZstdFrame(shard.fd, stored.start, stored.num_bytes, shard.path, where).drain()
        meter.add(stored.num_bytes)
