"""Folds many versions of a run into one frame each, and full states, beside the publisher.

Source: docs/sync-protocol.md section 15.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gymfast.delta.encode import Profile
from gymfast.errors import (
    BudgetError,
    ChainError,
    DeadlineError,
    GymfastError,
    NotFoundError,
    StoreError,
)
from gymfast.stores import open_store
from gymfast.stores.base import Store
from gymfast.sync.bandwidth import limited
from gymfast.sync.chain import is_full
from gymfast.sync.checkpoint_target import CheckpointTarget
from gymfast.sync.clock import Clock, SystemClock
from gymfast.sync.epoch import require_key
from gymfast.sync.fold_maker import FoldMaker, FoldReport, FoldSettings, Held
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log
from gymfast.sync.machine import State
from gymfast.sync.objects import DEFAULT_OBJECT_BYTES, check_object_bytes
from gymfast.sync.signatures import Key, check_signing_key, reading_key
from gymfast.sync.subscriber import Subscriber

DEFAULT_EVERY = 8
DEFAULT_LEVELS = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Skip:
    """Versions that no fold leads to or from, as the log leads past them only by a full state."""

    first: int
    last: int
    reason: str


class Compactor:
    """Keeps checkpoints of a run in a folder and offers the frames between them as folds.

    Every `every` versions one fold of that length, every `every`^2 one of that length, and so on
    for `levels` lengths: each takes a checkpoint on disk, and one more is the newest state. What it
    was at when it was killed it does again. `skipped` tells what it went past. Not thread-safe.
    """

    def __init__(
        self,
        store: Store | str,
        run: str,
        folder: Path | str,
        *,
        every: int = DEFAULT_EVERY,
        levels: int = DEFAULT_LEVELS,
        anchor_every: int | None = None,
        profile: Profile = "auto",
        backend: str = "auto",
        threads: int | None = None,
        object_bytes: int = DEFAULT_OBJECT_BYTES,
        timeout_s: float = 60.0,
        max_bytes_per_s: int | None = None,
        key: Key | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Opens the checkpoints in `folder`, which may not exist yet; nothing is read or written.

        With `anchor_every`, a multiple of `every`, a full state is offered every so many versions.
        `max_bytes_per_s` bounds what all replicas and folds transfer together.
        `key` is that of the records of the run, and signs the folds.
        Raises ValueError for settings out of range, ConflictError if another process has the
        folder, GymfastError if the checkpoints cannot be read.
        """
        if every < 2 or levels < 1:
            raise ValueError(f"every is {every} and levels {levels}, expected 2 and 1 or more")
        if anchor_every is not None and (anchor_every < 1 or anchor_every % every):
            raise ValueError(f"anchor_every is {anchor_every}, expected a multiple of {every}")
        self._clock = clock or SystemClock()
        opened = open_store(store) if isinstance(store, str) else store
        self._store = limited(opened, max_bytes_per_s, self._clock)
        self._every = every
        self._anchor_every = anchor_every
        self._log = Log(self._store, RunKeys(run), check_signing_key(key))
        self._folder = Path(folder).absolute()
        self._settings = FoldSettings(
            profile, backend, threads, check_object_bytes(object_bytes), timeout_s
        )
        self._maker = FoldMaker(self._log, self._folder, self._settings, self._clock)
        self.skipped: tuple[Skip, ...] = ()
        self._done: int | None = None
        self._unproven: dict[int, FoldReport] = {}
        self._replicas: list[Subscriber] = []
        try:
            self._head = self._replica(self._head_path)
            lengths = [every**level for level in range(1, levels + 1)]
            self._bases = {length: self._replica(self._base_path(length)) for length in lengths}
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int | None:
        """The newest version that was folded; None before the first."""
        return self._head.version

    def work(self) -> Iterator[FoldReport]:
        """Makes all folds that are due, one after the other.

        Raises NotFoundError for a run without versions, ConflictError without the key of one that
        is signed, ChainError and FormatError for a log that cannot be followed, StoreError and
        DeadlineError. What is not finished then is done by the next call.
        """
        newest = self._head.poll()
        if newest is None:
            raise NotFoundError(
                f"run '{self._log.keys.run}' in {self._store.url} has no version yet"
            )
        version = self._head.version
        is_due = version is not None and version % self._every == 0 and version != self._done
        if version is not None and is_due and self._is_kept():
            yield from self._fold_at(version)
        while (target := self._next(newest)) is not None:
            yield from self._fold_at(self._advance(target, newest))

    def close(self) -> None:
        """Gives the folder back."""
        for replica in self._replicas:
            replica.close()
        self._log.requests.close()

    def __enter__(self) -> Compactor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _head_path(self) -> Path:
        return self._folder / "head"

    def _base_path(self, length: int) -> Path:
        return self._folder / f"base-{length}"

    def _replica(self, path: Path) -> Subscriber:
        settings = self._settings
        target = CheckpointTarget(path, backend=settings.backend, threads=settings.threads)
        try:
            replica = Subscriber(
                self._store,
                self._log.keys.run,
                target,
                staging_dir=self._folder,
                timeout_s=settings.timeout_s,
                key=reading_key(self._log.key),
                clock=self._clock,
            )
        except BaseException:
            target.close()
            raise
        self._replicas.append(replica)
        return replica

    def _next(self, newest: int) -> int | None:
        """The version to fold next; None if it is not published yet."""
        version = self._head.version
        if version is not None:
            target = (version // self._every + 1) * self._every
        elif self._head.state is State.EMPTY:
            target = self._oldest()
        else:
            target = newest // self._every * self._every
        return target if target <= newest else None

    def _is_kept(self) -> bool:
        """True unless retention passed the place of the head: no fold to there is of use then."""
        tip = self._head.tip
        return tip is not None and self._log.floor(tip.seq) <= tip.seq

    def _oldest(self) -> int:
        """The first version that can be folded: at or after the oldest full state of the log."""
        return self._starts()[0]

    def _starts(self) -> list[int]:
        """Versions to be folded that the log's full states lead to, or its first one if none is."""
        entries = self._log.load(lambda _: False)
        if entries:
            require_key(self._log, entries[-1].record)
        full = [e for e in entries if is_full(e.record)] or entries[:1]
        versions = [e.tip.version or 0 for e in full] or [0]
        return [-(-version // self._every) * self._every for version in versions]

    def _advance(self, target: int, newest: int) -> int:
        """The version that the head is brought to.

        A later one, from the next full state on, if retention was faster or a frame is lost.
        """
        before = self._head.version
        try:
            return self._head.pull(target).version
        except ChainError as error:
            found = self._pull_later(target, newest)
            if found is None:
                raise
            first = target if before is None else before + 1
            skip = Skip(first, found - 1, str(error))
            _log.warning(
                "run '%s': versions %d to %d are not folded: %s",
                *(self._log.keys.run, skip.first, skip.last, skip.reason),
            )
            self.skipped += (skip,)
            return found

    def _pull_later(self, target: int, newest: int) -> int | None:
        """The version that the head is brought to by a later full state; None if by none yet."""
        for version in dict.fromkeys(self._starts()):
            if target < version <= newest:
                try:
                    return self._head.pull(version).version
                except ChainError as error:
                    _log.info("version %d cannot be reached either: %s", version, error)
        return None

    def _fold_at(self, version: int) -> Iterator[FoldReport]:
        """Makes the folds that end at the version of the head, and brings the bases there."""
        assert self._head.tip is not None
        head = Held(self._head_path, self._head.tip)
        for length, base in self._bases.items():
            if version % length or base.version == version:
                continue
            report = None
            if base.tip is not None and base.version == version - length:
                report = self._maker.make(Held(self._base_path(length), base.tip), head)
            if report is not None:
                self._unproven[length] = report
                yield report
            self._bring(base, version, self._unproven.get(length))
            self._unproven.pop(length, None)
        if self._anchor_every is not None and version % self._anchor_every == 0:
            report = self._maker.make(None, head)
            if report is not None:
                yield report
        self._done = version

    def _bring(self, base: Subscriber, version: int, report: FoldReport | None) -> None:
        """Brings a base to a version, as any reader: so the fold just made is proven."""
        if base.version is not None and base.version > version:
            return
        try:
            base.pull(version)
        except (StoreError, DeadlineError, BudgetError):
            raise  # none of them says anything of the fold
        except GymfastError:
            if report is not None:
                self._maker.withdraw(report)
            raise
