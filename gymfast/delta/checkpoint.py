"""Frames from checkpoints and into new checkpoints, in bounded memory.

A tensor passes through windows of whole blocks (about 2^23 units), however large it is. Resident
are two windows of at most 32 MiB each (more only for a tiled tensor whose row of tiles is larger),
the section of the frame at hand and the headers. A frame that is in memory already stays there.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gymfast.delta.apply import ApplyReport, report_of
from gymfast.delta.apply_plan import Action, Step, plan_steps
from gymfast.delta.checkpoint_encode import CheckpointEncoder
from gymfast.delta.checkpoint_stream import (
    CheckpointReceiver,
    Codec,
    Meter,
    Progress,
    most_bytes,
    reader,
)
from gymfast.delta.checkpoint_write import CheckpointWriter, check_out, plan_shards, single_name
from gymfast.delta.encode import EncodeStats, Profile, profile_index
from gymfast.delta.files import os_errors
from gymfast.delta.frame import Kind, ParsedFrame
from gymfast.delta.in_place import apply_checkpoint_in_place
from gymfast.delta.journal import recover
from gymfast.delta.memory import U8
from gymfast.delta.parse import Frame, open_frame
from gymfast.delta.records import Digest
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.window import Transfer, Window

__all__ = [
    "Checkpoint",
    "apply_checkpoint",
    "apply_checkpoint_in_place",
    "digest_checkpoint",
    "encode_checkpoint",
    "recover",
]


def encode_checkpoint(
    old: Path | str | None,
    new: Path | str,
    out: BinaryIO,
    *,
    profile: Profile = "auto",
    backend: str = "auto",
    threads: int | None = None,
    tiled: bool = False,
    progress: Progress | None = None,
    key: bytes | None = None,
) -> EncodeStats:
    """Writes the frame that turns one checkpoint into another to `out`, section by section.

    old None gives an anchor. Tensors come in the order of Checkpoint.names. With a key (16 bytes
    or more) the frame is authenticated, for stores that are not trusted.
    Raises FormatError for damaged checkpoints, GymfastError for what the system says.
    """
    codec = Codec.of(backend, threads)
    number = profile_index(profile)
    with Checkpoint.open(new) as new_files:
        old_files = None if old is None else Checkpoint.open(old)
        try:
            encoder = CheckpointEncoder(old_files, new_files, codec, number, tiled=tiled, key=key)
            out.writelines(encoder.sections(progress))
        finally:
            if old_files is not None:
                old_files.close()
    return encoder.stats


def apply_checkpoint(
    base: Path | str | None,
    frame: Path | str | Frame,
    out: Path | str,
    *,
    backend: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
    key: bytes | None = None,
    replace: bool = False,
) -> ApplyReport:
    """Writes the checkpoint that a frame makes of base to `out`, whole or not at all.

    `out` is a file if base is one, else a directory (new or empty, or with `replace` one of
    nothing but a checkpoint, removed when the new one is there) with the same shards; tensors
    that are added go to the last. Small other files of the directory go along. base None is for
    anchors. The base is read twice: for its digests, before anything is written, and for the
    copy. With a key a frame that the holder of the key did not encode is refused, unread.
    Raises FormatError (also as ChecksumError, CoverageError) for damaged input or another base,
    BudgetError if the disk is too small, GymfastError for what the system says.
    """
    codec, out = Codec.of(backend, threads), Path(out)
    with open_frame(frame, backend, key) as parsed, ExitStack() as stack:
        source = None if base is None else stack.enter_context(Checkpoint.open(base))
        with os_errors("write checkpoint", out):
            check_out(out, source, replace=replace)
        window, meter = Window(most_bytes(parsed, source)), _meter(parsed, source, progress)
        receiver = CheckpointReceiver(source, codec, window, meter)
        steps = plan_steps(parsed, receiver)
        shards = plan_shards(source, steps, single_name(out, source))
        with (
            os_errors("write checkpoint", out),
            CheckpointWriter(out, shards, source, replace=replace) as writer,
        ):
            copier = _Copier(receiver, writer, meter)
            num_changed = copier.run(steps)
            writer.commit()
        return report_of(parsed, steps, set(receiver.specs()), num_changed)


def digest_checkpoint(
    path: Path | str,
    *,
    backend: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[tuple[str, str, tuple[int, ...], Digest]]:
    """Name, dtype, shape and digest of every tensor, as gymfast.delta.frame.root_of takes them.

    Raises FormatError for damaged checkpoints, GymfastError for what the system says.
    """
    codec = Codec.of(backend, threads)
    with Checkpoint.open(path) as source:
        specs = [source.spec(name) for name in source.names]
        meter = Meter(progress, sum(spec.num_bytes for spec in specs))
        window = Window(max((spec.num_bytes for spec in specs), default=0))
        receiver = CheckpointReceiver(source, codec, window, meter)
        return [(s.name, s.dtype, s.shape, receiver.digest(s.name, None)) for s in specs]


class _Copier:
    """Carries out steps from a base checkpoint to a new one."""

    def __init__(
        self, receiver: CheckpointReceiver, writer: CheckpointWriter, meter: Meter
    ) -> None:
        self._receiver = receiver
        self._writer = writer
        self._meter = meter

    def run(self, steps: list[Step]) -> int:
        """Units changed; tensors that take the bytes of another one come last."""
        num_changed = 0
        followers = []
        for step in steps:
            if step.action in (Action.COPY, Action.TIE):
                followers.append(step)
            elif step.record.kind is not Kind.REMOVED:
                num_changed += self._write(step)
        for step in followers:
            self._follow(step)
        return num_changed

    def _write(self, step: Step) -> int:
        receiver, window = self._receiver, self._receiver.window
        is_built = step.action is Action.BUILD
        source = receiver.source
        read = None if is_built or source is None else reader(source, step.name)
        window.begin(step.record.num_bytes, read)
        if step.action in (Action.KEEP, Action.SKIP):
            window.pass_to(step.record.num_bytes, self._flush(step.name))
            return 0
        num_blocks = step.record.geometry.num_blocks
        rows = np.zeros((num_blocks, 2), np.uint64) if is_built else receiver.rows[step.name]
        return receiver.codec.apply(window, step, rows, self._flush(step.name))

    def _follow(self, step: Step) -> None:
        window, target = self._receiver.window, step.record.target

        def read(start: int, out: U8) -> None:
            self._writer.read_into(target, start, out)

        window.begin(step.record.num_bytes, read)
        window.pass_to(step.record.num_bytes, self._flush(step.name))

    def _flush(self, name: str) -> Transfer:
        def flush(start: int, data: U8) -> None:
            self._writer.write(name, start, data)
            self._meter.add(data.size)

        return flush


def _meter(parsed: ParsedFrame, source: Checkpoint | None, progress: Progress | None) -> Meter:
    base = sum(source.spec(name).num_bytes for name in source.names) if source else 0
    new = sum(r.num_bytes for r in parsed.tensors if r.kind is not Kind.REMOVED)
    return Meter(progress, base + new)
