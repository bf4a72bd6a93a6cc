"""Publishes versions of a run: diff against the last committed state, put, commit, promote.

Source: docs/sync-protocol.md sections 5 and 6.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from gymfast.delta.encode import Profile
from gymfast.delta.state import SnapshotPlace
from gymfast.delta.tensors import Weights
from gymfast.errors import ConflictError, GymfastError, StoreError
from gymfast.stores import check_create_only, open_store
from gymfast.stores.base import Store
from gymfast.sync.ahead import Notes
from gymfast.sync.bandwidth import limited
from gymfast.sync.candidate import Advance, Candidate, Written
from gymfast.sync.clock import Clock, SystemClock
from gymfast.sync.commit import Answer, Step
from gymfast.sync.committer import Committer, Place
from gymfast.sync.epoch import claim_epoch, publisher_label
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log
from gymfast.sync.manifest import StateRecord
from gymfast.sync.objects import DEFAULT_OBJECT_BYTES, FrameWriter
from gymfast.sync.publish_report import (
    DEFAULT_ANCHOR_EVERY,
    DEFAULT_KEEP,
    PhaseSeconds,
    PublishReport,
    PublishSettings,
)
from gymfast.sync.signatures import Key, check_signing_key
from gymfast.sync.snapshot import EncodeSettings, Snapshot
from gymfast.sync.upkeep import Upkeep

_MAX_ROUNDS = 4
Produce = Callable[[], Written]
_log = logging.getLogger(__name__)


class Publisher:
    """The one writer of a run; a newer one of the same run fences it. Not thread-safe.

    Keeps a snapshot of the last committed state in memory. Whatever fails, the next `publish`
    diffs against that state, so a retry is exact.
    """

    def __init__(
        self,
        store: Store | str,
        run: str,
        *,
        profile: Profile = "auto",
        backend: str = "auto",
        threads: int | None = None,
        tiled: bool = False,
        snapshot: SnapshotPlace = "beside",
        anchor_every: int = DEFAULT_ANCHOR_EVERY,
        anchor_ratio: float = 0.5,
        keep: int = DEFAULT_KEEP,
        memory_budget_bytes: int | None = None,
        object_bytes: int = DEFAULT_OBJECT_BYTES,
        timeout_s: float = 60.0,
        resume: bool = True,
        single_writer: bool = False,
        max_bytes_per_s: int | None = None,
        key: Key | None = None,
        label: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Takes the run over: from here on every earlier publisher of it is fenced.

        The snapshot lies "beside" the weights, so on the GPU if they do, or in "pinned" CPU memory
        (see gymfast.delta.State.copy_of).
        An anchor follows every `anchor_every` deltas, and replaces a delta that would be larger
        than `anchor_ratio` of an anchor. The newest `keep` versions stay reachable. Memory is
        bounded by `memory_budget_bytes`, or by what there is; one object of `object_bytes` is held
        at a time. `timeout_s` bounds each wait for the store to answer or show what was written.
        `resume` False refuses a run that has records. `single_writer` promises that nobody else
        publishes, for a store without create-only writes. `max_bytes_per_s` bounds what goes to and
        comes from the store. `key` signs the records: a shared key, or
        PEM text with an Ed25519 private key.
        Raises ValueError for settings out of range, ConflictError for a run that may not be
        resumed, StoreError if the store fails or cannot be shared, DeadlineError.
        """
        self._settings = PublishSettings(
            anchor_every=anchor_every,
            anchor_ratio=anchor_ratio,
            keep=keep,
            memory_budget_bytes=memory_budget_bytes,
            object_bytes=object_bytes,
            timeout_s=timeout_s,
        )
        self._snapshot = Snapshot(EncodeSettings(profile, backend, threads, tiled, snapshot))
        self._is_single_writer = single_writer
        self._clock = clock or SystemClock()
        opened = open_store(store) if isinstance(store, str) else store
        self._store = limited(opened, max_bytes_per_s, self._clock)
        self._keys = RunKeys(run)
        self._log = Log(
            self._store, self._keys, check_signing_key(key), is_single_writer=single_writer
        )
        if not single_writer:
            now_us = self._clock.wall_us()
            check_create_only(self._store, f"{run}/probe", now_us=now_us, sleep=self._clock.sleep)
        if not resume and self._log.places():
            raise ConflictError(
                f"run '{run}' exists in {self._store.url}: choose another run, or resume it"
            )
        try:
            name = label or publisher_label()
            tip, entries = claim_epoch(self._log, self._clock, timeout_s, name)
        finally:
            self._log.requests.close()  # only a claim reads several records at a time
        self._committer = Committer(self._log, self._clock, timeout_s, tip, entries)
        self._upkeep = Upkeep(self._log, self._committer, self._clock, keep)
        _log.info("run '%s': epoch %d, version %s", run, tip.epoch, tip.version)

    @property
    def version(self) -> int | None:
        """The newest committed version; None before the first."""
        return self._committer.tip.version

    @property
    def epoch(self) -> int:
        """The number of this publisher's epoch."""
        return self._committer.tip.epoch

    @property
    def root(self) -> str | None:
        """The root of the newest committed version; None before the first."""
        return None if self.version is None else self._committer.tip.root

    def adopt(self, weights: Weights) -> bool:
        """True if the weights are the newest committed version: the next publish is a delta.

        For a trainer that restarts from a checkpoint; without it (or if False) the next version
        is an anchor. Raises what `publish` raises for weights and budget.
        """
        if self._snapshot.root is not None:
            return self._snapshot.root == self._committer.tip.root
        candidate = self._candidate(self._frame_writer())
        return candidate.adopt(weights)

    def publish(
        self,
        weights: Weights,
        *,
        version: int | None = None,
        anchor: bool = False,
        advance: Advance | None = None,
    ) -> PublishReport:
        """Commits the weights as the next version; they must not change meanwhile.

        `version` is checked, not chosen, once the run has a version. `anchor` asks for a full
        frame. `advance` is told bytes encoded and to encode.
        Raises ConflictError if a newer publisher is in charge, TypeError or ValueError for weights
        or a version that cannot be published, BudgetError, StoreError and DeadlineError. Then
        nothing is committed, or (if the answer of the store was lost) the next publish finds out.
        """
        if not isinstance(weights, Mapping):
            raise TypeError(
                f"weights are a {type(weights).__name__}, expected a mapping of names to tensors, "
                "as state_dict() of a torch module gives"
            )
        for _ in range(_MAX_ROUNDS):
            report = self._publish_once(weights, version, anchor, advance)
            if report is not None:
                return report
        raise StoreError(
            f"run '{self._keys.run}': version {self._next_version(None)} could not be committed: "
            f"{self._store.url} keeps showing earlier attempts; publish again"
        )

    def _publish_once(
        self, weights: Weights, version: int | None, anchor: bool, advance: Advance | None
    ) -> PublishReport | None:
        """The report; None if an earlier attempt turned up and the work has to start again."""
        committer = self._committer
        committer.require_in_charge()
        number = self._next_version(version)
        self._upkeep.clean_leftovers()
        writer = self._frame_writer()
        notes = Notes(self._store, self._keys, self.epoch, committer.tip.seq + 1)
        writer.tell = notes.add
        candidate = self._candidate(writer)

        def produce() -> Written:
            return candidate.write(weights, None if anchor else self._upkeep.anchor_bytes, advance)

        try:
            step, written = self._commit(
                writer, produce, lambda made, place: made.version_record(place, number)
            )
        except BaseException:
            self._snapshot.rollback()
            raise
        finally:
            notes.close()
        if step is Step.DONE or (step is Step.ADOPT and committer.tip.root == written.root):
            self._snapshot.promote()
            return self._after_commit(written, candidate.seconds)
        self._snapshot.rollback()
        return None

    def _commit(
        self, writer: FrameWriter, produce: Produce, make: Callable[[Written, Place], StateRecord]
    ) -> tuple[Step, Written]:
        """DONE or ADOPT, and the frame that was put.

        Raises if nothing was committed. The objects go then, unless the record may still appear.
        """
        committer = self._committer
        frames: list[Written] = []

        def put() -> Answer:
            frames.append(produce())
            return Answer.OK

        def confirm() -> Answer:
            return Answer.OK if writer.is_confirmed() else Answer.ABSENT

        try:
            step = committer.commit(lambda place: make(frames[0], place), put, confirm)
            if step is Step.FENCED:
                self._snapshot.drop()
                committer.require_in_charge()
            if step is Step.FAILED:
                committer.raise_failure("what was published")
        except BaseException:
            if committer.fence or not committer.was_created:
                writer.discard()
            raise
        return step, frames[0]

    def _after_commit(self, written: Written, seconds: PhaseSeconds) -> PublishReport:
        tip, record = self._committer.tip, self._upkeep.states[-1]
        seconds.commit = self._committer.seconds - seconds.diff - seconds.encode - seconds.put
        assert tip.version is not None
        self._upkeep.put_hint()
        anchor_bytes, seconds.anchor = self._add_anchor_if_due()
        cleaned, seconds.clean = self._upkeep.clean_if_due()
        _log.info(
            "run '%s' version %d: %s of %d bytes for %d, %d of %d units changed",
            *(self._keys.run, tip.version, written.kind, written.frame.num_bytes),
            *(written.raw_bytes, written.num_changed, written.num_units),
        )
        return PublishReport(
            version=tip.version,
            kind=written.kind,
            raw_bytes=written.raw_bytes,
            frame_bytes=written.frame.num_bytes,
            num_changed=written.num_changed,
            num_units=written.num_units,
            num_tensors=written.num_tensors,
            root=tip.root,
            seq=record.seq,
            epoch=tip.epoch,
            seconds=seconds,
            anchor_bytes=anchor_bytes,
            free_bytes=self._upkeep.free_bytes,
            cleaned=cleaned,
        )

    def _next_version(self, version: int | None) -> int:
        newest = self.version
        if newest is None:
            if version is not None and version < 0:
                raise ValueError(f"version is {version}, versions are not negative")
            return version or 0
        if version not in (None, newest + 1):
            raise ValueError(
                f"version is {version}, but run '{self._keys.run}' goes on with {newest + 1}: its "
                f"newest committed version is {newest}"
            )
        return newest + 1

    def _frame_writer(self) -> FrameWriter:
        # Without create-only writes a look comes first: what was there is not ours to delete.
        return FrameWriter(
            self._store,
            self._keys,
            self.epoch,
            self._settings.object_bytes,
            doomed=self._upkeep.doomed,
            creates=self._store.num_ahead > 0 and not self._is_single_writer,
            named=self._upkeep.named_objects,
        )

    def _candidate(self, writer: FrameWriter) -> Candidate:
        return Candidate(self._snapshot, self._settings, writer, self._committer.tip)

    def _add_anchor_if_due(self) -> tuple[int, float]:
        """Bytes of the anchor added to the newest version, and seconds; a failure can wait."""
        upkeep = self._upkeep
        if upkeep.newest_full and upkeep.chain_length < self._settings.anchor_every:
            return 0, 0.0
        start_s = time.perf_counter()
        try:
            num_bytes = self._add_anchor()
        except GymfastError as error:
            _log.warning("run '%s' gets its anchor later: %s", self._keys.run, error)
            num_bytes = 0
        return num_bytes, time.perf_counter() - start_s

    def _add_anchor(self) -> int:
        writer = self._frame_writer()
        _, written = self._commit(
            writer,
            self._candidate(writer).write_anchor,
            lambda made, place: made.anchor_record(place),
        )
        self._upkeep.put_hint()
        return written.frame.num_bytes
