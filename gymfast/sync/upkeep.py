"""What a publisher does between two commits: hint and retention; no failure here is one of it."""

from __future__ import annotations

import logging
import time

from gymfast.errors import StoreError
from gymfast.stores.base import Store
from gymfast.sync.chain import MAX_CHAIN, is_full
from gymfast.sync.cleaner import Cleaner, CleanReport
from gymfast.sync.clock import Clock
from gymfast.sync.committer import Committer
from gymfast.sync.epoch import created_us
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log
from gymfast.sync.manifest import FORMAT, HintRecord, StateRecord, encode
from gymfast.sync.retention import floor_of

_log = logging.getLogger(__name__)


class Upkeep:
    """Looks after a run between two commits of its publisher."""

    def __init__(self, log: Log, committer: Committer, clock: Clock, keep: int) -> None:
        """Upkeep of a run that `committer` is in charge of.

        `doomed` are keys of objects whose delete may still take effect.
        """
        self.doomed: set[str] = set()
        self._log = log
        self._store: Store = log.store
        self._keys: RunKeys = log.keys
        self._committer = committer
        self._clock = clock
        self._keep = keep
        self._cleaner = Cleaner(self._store, self._keys, clock, keep, True, self.doomed)
        self._floor = 0
        self._damaged: frozenset[int] = frozenset()
        self._must_read_all = self._must_clean = committer.tip.epoch > 1

    @property
    def chain_length(self) -> int:
        """Versions since the newest full state."""
        full = self.newest_full
        version = self._committer.tip.version
        return 0 if full is None or version is None else version - full.version

    @property
    def newest_full(self) -> StateRecord | None:
        """The newest record whose frame is a full state; None if there is none."""
        return next((r for r in reversed(self.states) if is_full(r)), None)

    @property
    def states(self) -> list[StateRecord]:
        """The records of states that are there, ascending."""
        records = self._committer.records
        ordered = (records[seq] for seq in sorted(records))
        return [record for record in ordered if isinstance(record, StateRecord)]

    @property
    def named_objects(self) -> frozenset[str]:
        """The keys of all objects that the records of states name."""
        return frozenset(
            self._keys.object(record.epoch, ref.digest)
            for record in self.states
            for ref in record.frame.objects
        )

    @property
    def anchor_bytes(self) -> int | None:
        """Size of the newest anchor; None if the next version has to be one."""
        full = self.newest_full
        return None if full is None or self.chain_length >= MAX_CHAIN else full.frame.num_bytes

    @property
    def free_bytes(self) -> int | None:
        """What the store has left; None if it does not say."""
        try:
            return self._store.free_bytes()
        except StoreError:
            return None

    def put_hint(self) -> None:
        """Advises readers where the log ends."""
        tip = self._committer.tip
        version = -1 if tip.version is None else tip.version
        hint = HintRecord(
            FORMAT, self._keys.run, tip.seq, version, tip.record, created_us(self._clock)
        )
        try:
            self._store.put(self._keys.hint, encode(hint))
        except StoreError as error:
            _log.warning("the hint of run '%s' is old now: %s", self._keys.run, error)

    def clean_leftovers(self) -> None:
        """What earlier publishers left goes before the first version: it may be in its way."""
        if self._must_read_all:
            self.clean_if_due()

    def clean_if_due(self) -> tuple[CleanReport | None, float]:
        """What retention did, if the floor moved or something was left over, and seconds.

        It waits while a record that was given up may be there: its objects look left over.
        """
        if self._committer.has_open_attempts:
            return None, 0.0
        records = self._committer.records
        start_s = time.perf_counter()
        try:
            if self._must_read_all:
                found, self._damaged = self._log.read_all()
                records |= found
            floor = floor_of([records[seq] for seq in sorted(records)], self._keep)
            if floor <= self._floor and not self._must_clean:
                return None, 0.0
            epoch = self._committer.tip.epoch
            report = self._cleaner.clean(records, epoch, damaged=self._damaged)
        except StoreError as error:
            _log.warning("retention of run '%s' has to wait: %s", self._keys.run, error)
            return None, time.perf_counter() - start_s
        self._floor, self._must_read_all = floor, False
        self._must_clean = bool(report.failures or report.held_by)
        if not report.failures:
            for seq in report.records:
                records.pop(seq, None)
            self._damaged -= set(report.records)
        return report, time.perf_counter() - start_s
