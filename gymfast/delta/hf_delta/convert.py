"""Between version directories and gymfast frames: the same states, bit for bit, either way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gymfast.delta.checkpoint import apply_checkpoint, encode_checkpoint
from gymfast.delta.checkpoint_stream import Meter, Progress
from gymfast.delta.encode import EncodeStats, Profile
from gymfast.delta.files import os_errors
from gymfast.delta.hf_delta.apply import apply_version, require_tensors
from gymfast.delta.hf_delta.digests import DEFAULT_ALGORITHM
from gymfast.delta.hf_delta.publish import PublishReport, publish_delta, publish_full
from gymfast.delta.hf_delta.seed import open_seed, reset
from gymfast.delta.hf_delta.state import SyncFolder
from gymfast.delta.hf_delta.version import open_version, version_name
from gymfast.delta.state import num_threads
from gymfast.delta.temporary import make_temporary, remove, sweep


def frame_of_version(
    base: Path | str,
    version: Path | str,
    out: BinaryIO,
    work: Path | str,
    *,
    profile: Profile = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
    key: bytes | None = None,
) -> EncodeStats:
    """Writes the frame from base, the state before a version, to the state after it.

    The state after a delta version is made in a temporary directory beside `work`: a copy of base,
    removed at the end. Raises like pull and encode_checkpoint; nothing is written to `out` unless
    the version is sound and base is its base.
    """
    delta = open_version(version)
    if delta is None:
        return encode_checkpoint(
            base, version, out, profile=profile, threads=threads, progress=progress, key=key
        )
    with delta, open_seed(Path(base)) as seed, _scratch(Path(work)) as new:
        require_tensors(seed, delta)
        folder = SyncFolder(new)
        with folder.locked():
            reset(folder, seed, delta.base, delta.algorithm, Meter(None, 0))
            held = folder.read()
            assert held is not None
            apply_version(folder, held, delta, num_threads(threads), Meter(None, 0))
        return encode_checkpoint(
            base, new, out, profile=profile, threads=threads, progress=progress, key=key
        )


def version_of_frame(
    base: Path | str,
    frame: Path | str,
    source: Path | str,
    number: int,
    *,
    encoding: str = "xor",
    algorithm: str = DEFAULT_ALGORITHM,
    is_full: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    key: bytes | None = None,
) -> PublishReport:
    """Publishes what a frame makes of base as version `number` of `source`.

    The state after the frame is made in a temporary directory in `source`. Raises like
    apply_checkpoint, publish_delta and publish_full: a frame that adds, removes or reshapes
    tensors needs a full version.
    """
    with _scratch(Path(source) / f"{version_name(number)}.frame") as scratch:
        new = scratch / "new"
        apply_checkpoint(base, frame, new, threads=threads, progress=progress, key=key)
        if is_full:
            return publish_full(source, number, new)
        return publish_delta(
            source, number, base, new, encoding=encoding, algorithm=algorithm, threads=threads
        )


@contextmanager
def _scratch(beside: Path) -> Iterator[Path]:
    """A temporary directory; what a killed process left of an earlier one is removed."""
    with os_errors("make a temporary directory beside", beside):
        beside.parent.mkdir(parents=True, exist_ok=True)
        sweep(beside)
        path, fd = make_temporary(beside, is_directory=True)
    try:
        yield path
    finally:
        with os_errors("remove", path):
            try:
                remove(path)
            finally:
                os.close(fd)
