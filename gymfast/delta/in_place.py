"""Frames applied to the files of a checkpoint themselves, crash-safe by a redo journal."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gymfast.delta.apply import ApplyReport, report_of
from gymfast.delta.apply_plan import Action, Step, plan_steps
from gymfast.delta.checkpoint_stream import (
    CheckpointReceiver,
    Codec,
    Meter,
    Progress,
    most_bytes,
    reader,
)
from gymfast.delta.files import os_errors
from gymfast.delta.journal import Journal
from gymfast.delta.memory import U8
from gymfast.delta.parse import Frame, open_frame
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.window import Window
from gymfast.errors import GymfastError

_IN_PLACE = (Action.KEEP, Action.SKIP, Action.PATCH, Action.COPY)


def apply_checkpoint_in_place(
    base: Path | str,
    frame: Path | str | Frame,
    *,
    backend: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
    key: bytes | None = None,
) -> ApplyReport:
    """Turns the files of base into the state of a frame; a crash leaves the old or the new state.

    A journal beside the checkpoint gets the new bytes first (at most the bytes of the changed
    windows); after a crash gymfast.delta.checkpoint.recover, which every open calls, completes
    it. Tensors cannot be added, replaced or removed in place. One process at a time; a reader of
    the same files meanwhile may see a mixture. With a key a frame that the holder of the key did
    not encode is refused, unread.
    Raises FormatError (also as ChecksumError, CoverageError) for damaged input or another base,
    ConflictError if another process updates it, GymfastError for what the system says.
    """
    codec = Codec.of(backend, threads)
    with os_errors("update checkpoint", base):
        base = Path(base).resolve(strict=True)
    with (
        open_frame(frame, backend, key) as parsed,
        os_errors("update checkpoint", base),
        Journal(base) as journal,
        Checkpoint.open(base, needs_recovery=False) as source,
    ):
        meter = Meter(progress, 2 * sum(source.spec(name).num_bytes for name in source.names))
        window = Window(most_bytes(parsed, source))
        receiver = CheckpointReceiver(source, codec, window, meter)
        steps = plan_steps(parsed, receiver)
        _require_in_place(base, source, steps)
        journal.begin([shard.path for shard in source.shards])
        num_changed = _Recorder(receiver, source, journal, steps).run()
        if num_changed:
            journal.commit()
            with os_errors("write (its journal completes it at the next open) to", base):
                journal.play()
    return report_of(parsed, steps, set(receiver.specs()), num_changed)


def _require_in_place(base: Path, source: Checkpoint, steps: list[Step]) -> None:
    wrong = next((step for step in steps if step.action not in _IN_PLACE), None)
    if wrong is not None:
        raise GymfastError(
            f"tensor {wrong.name!r} is {wrong.record.kind.name.lower()} by this frame: {base} "
            "cannot be updated in place; nothing was written; write a new checkpoint (-o OUT)"
        )
    link = next((shard.path for shard in source.shards if shard.path.is_symlink()), None)
    if link is not None and source.is_directory:
        raise GymfastError(
            f"{link} is a symbolic link, as in a download cache: its file is not changed in "
            "place; nothing was written; write a new checkpoint (-o OUT)"
        )


class _Recorder:
    """Notes in a journal what the steps change; the checkpoint itself is only read."""

    def __init__(
        self, receiver: CheckpointReceiver, source: Checkpoint, journal: Journal, steps: list[Step]
    ) -> None:
        self._receiver = receiver
        self._source = source
        self._journal = journal
        self._steps = steps
        self._followers: dict[str, list[str]] = {}
        for step in steps:
            if step.action is Action.COPY:
                self._followers.setdefault(step.record.target, []).append(step.name)

    def run(self) -> int:
        """Units changed."""
        return sum(self._record(step) for step in self._steps)

    def _record(self, step: Step) -> int:
        names = [step.name] if step.action is Action.PATCH else []
        names += self._followers.get(step.name, [])
        if not names:
            return 0
        window, unit_bytes = self._receiver.window, step.record.geometry.unit_bytes
        window.begin(step.record.num_bytes, reader(self._source, step.name))
        num_changed = 0

        def flush(start: int, data: U8) -> None:
            nonlocal num_changed
            self._receiver.meter.add(data.size)
            for name in names:
                spec = self._source.spec(name)
                before = np.empty_like(data)
                self._source.read_into(name, start, before)
                offset = spec.start + start
                num_changed += self._journal.add(spec.shard, offset, unit_bytes, before, data)

        if step.action is Action.PATCH:
            rows = self._receiver.rows[step.name]
            self._receiver.codec.apply(window, step, rows, flush)
        else:
            window.pass_to(step.record.num_bytes, flush)
        return num_changed
