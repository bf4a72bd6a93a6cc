"""Carries out what retention.py decides: marks the floor, heeds leases, deletes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gymfast.errors import ConflictError, FormatError, NotFoundError, StoreError
from gymfast.stores.base import Store
from gymfast.stores.probe import probe_time_us
from gymfast.sync.clock import Clock, SystemClock
from gymfast.sync.fleet import old_statuses
from gymfast.sync.folds import parts, spans
from gymfast.sync.keys import RunKeys, Span, number_of, object_of
from gymfast.sync.lease import read_leases
from gymfast.sync.log import Log
from gymfast.sync.manifest import LeaseRecord, LogRecord, StateRecord
from gymfast.sync.objects import delete_all_noted, sizes_of
from gymfast.sync.reader_status import read_statuses
from gymfast.sync.retention import (
    deletion,
    floor_of,
    limited,
    lowest_lease,
    passed_folds,
    version_at,
)
from gymfast.sync.signatures import Key

LEASE_GRACE_US = 60_000_000
"""Time after its expiry for which a lease still counts: clocks of two machines differ."""
DAY_US = 86_400_000_000
"""Time after which a lease that is over, or a test of create-only writes, is of nobody any more."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CleanReport:
    """What retention did, or would do; `records` are the places deleted.

    `num_folds` are folds deleted, unfinished ones too; `num_objects` and `num_bytes` count theirs.
    `num_probes` are objects that a killed test of create-only writes left, `num_statuses` what
    readers told of themselves that do not live any more.
    `held_by` is the oldest record that a lease needs, if that kept something from deletion.
    `failures` are tried again the next time.
    """

    floor: int = 0
    records: tuple[int, ...] = ()
    num_objects: int = 0
    num_bytes: int = 0
    num_folds: int = 0
    num_leases: int = 0
    num_probes: int = 0
    num_statuses: int = 0
    held_by: int | None = None
    failures: tuple[str, ...] = ()


def collect(
    store: Store,
    run: str,
    *,
    keep: int,
    dry_run: bool = False,
    key: Key | None = None,
    clock: Clock | None = None,
) -> CleanReport:
    """Retention from outside, safe beside a live publisher.

    Objects of the newest epoch stay for its publisher, who may have a commit in flight: what a dead
    one left goes with the next publisher.
    Raises NotFoundError if the store has no such run, ValueError if keep is under 1.
    """
    log = Log(store, RunKeys(run), key)
    records, damaged = log.read_all()
    if not records:
        raise NotFoundError(f"{store.url} has no run '{run}': no record lies in its log")
    cleaner = Cleaner(store, log.keys, clock or SystemClock(), keep, is_owner=False)
    newest_epoch = max(record.epoch for record in records.values())
    report = cleaner.clean(records, newest_epoch, damaged=damaged, dry_run=dry_run)
    num, failures = cleaner.clean_statuses(dry_run=dry_run)
    return replace(report, num_statuses=num, failures=report.failures + failures)


@dataclass(frozen=True)
class Cleaner:
    """Retention of one run; `is_owner` is True for its publisher, between two commits.

    `doomed` takes the keys whose delete was asked for without an answer.
    """

    store: Store
    keys: RunKeys
    clock: Clock
    keep: int
    is_owner: bool
    doomed: set[str] = field(default_factory=set)

    def clean(
        self,
        records: Mapping[int, LogRecord],
        newest_epoch: int,
        *,
        damaged: Collection[int] = (),
        dry_run: bool = False,
    ) -> CleanReport:
        """Deletes what no kept version and no lease needs; `records` are all that the log holds.

        Places of the log that are `damaged` go below the floor, like others.

        What cannot be deleted is a warning and is left for the next time (R42).
        Raises StoreError if the store cannot be read, or the floor not be marked.
        """
        floor = floor_of([records[seq] for seq in sorted(records)], self.keep)
        if floor > 1 and not dry_run:
            self._mark(floor)
        leases = list(self._leases())
        now_us = self.clock.wall_us()
        held_by = lowest_lease([lease for _, lease in leases], now_us, LEASE_GRACE_US)
        prefix = self.keys.objects_prefix
        listed = (object_of(key, prefix) for key in self.store.list(prefix))
        found = deletion(
            records,
            [place for place in listed if place is not None],
            limited(floor, held_by),
            newest_epoch,
            is_owner=self.is_owner,
            damaged=damaged,
        )
        dead = [key for key, lease in leases if lease.expires_us + DAY_US <= now_us]
        folds, folded = self._passed_folds(records, limited(floor, held_by), held_by)
        objects = [*(self.keys.object(*place) for place in found.objects), *folded]
        num_bytes = self._num_bytes(objects, records.values())
        probes = self._old_probes(now_us)
        named = [*map(self.keys.record, found.records), *map(self.keys.fold, folds)]
        victims = (named, objects, dead, self._old_floors(floor), probes)
        failures = () if dry_run else tuple(self._delete(*victims))
        is_held = held_by is not None and held_by < floor
        return CleanReport(
            floor=floor,
            records=found.records,
            num_objects=len(objects),
            num_bytes=num_bytes,
            num_folds=len(folds),
            num_leases=len(leases),
            num_probes=len(probes),
            held_by=held_by if is_held else None,
            failures=failures,
        )

    def _passed_folds(
        self, records: Mapping[int, LogRecord], floor: int, lease: int | None
    ) -> tuple[list[Span], list[str]]:
        """Folds that nobody needs, unfinished ones too, and the keys of their objects."""
        log = Log(self.store, self.keys)
        finished, stored = spans(log), list(parts(log))
        if not finished and not stored:
            return [], []
        leased = None if lease is None else version_at(records.values(), lease)
        newest = version_at(records.values(), max(records, default=0))
        passed = passed_folds(
            {*finished, *(span for span, _ in stored)},
            [span for span in finished if span.version <= newest],  # others are no full states
            version_at(records.values(), floor),
            leased,
        )
        return sorted(passed), [key for span, key in stored if span in passed]

    def clean_statuses(self, *, dry_run: bool) -> tuple[int, tuple[str, ...]]:
        """Deletes what readers told of themselves a day ago or more; how many, and the failures.

        Reads all that readers tell, which is why it is not done between two commits.
        Raises StoreError if the store cannot be read.
        """
        now_us = self.clock.wall_us()
        old = old_statuses(read_statuses(self.store, self.keys), now_us, DAY_US)
        return len(old), () if dry_run else tuple(self._delete(old))

    def _mark(self, floor: int) -> None:
        with suppress(ConflictError):
            key = self.keys.floor(floor)
            if self.store.has_create_only:
                self.store.create(key, b"")
            else:
                self.store.put(key, b"")

    def _leases(self) -> Iterator[tuple[str, LeaseRecord]]:
        for key, lease in read_leases(self.store, self.keys):
            if isinstance(lease, FormatError):
                _log.warning("a damaged lease is ignored: %s", lease)
            else:
                yield key, lease

    def _old_floors(self, floor: int) -> list[str]:
        prefix = self.keys.floors_prefix
        return [key for key in self.store.list(prefix) if (number_of(key, prefix) or floor) < floor]

    def _old_probes(self, now_us: int) -> list[str]:
        """What tests of create-only writes left; one within a day of now may be under way."""
        times = [(key, probe_time_us(key)) for key in self.store.list(self.keys.probe_prefix)]
        return [key for key, at in times if at is not None and abs(now_us - at) >= DAY_US]

    def _num_bytes(self, objects: Collection[str], records: Iterable[LogRecord]) -> int:
        """What the records say of the lengths of objects; the store is asked for others."""
        known = {
            self.keys.object(record.epoch, ref.digest): ref.num_bytes
            for record in records
            if isinstance(record, StateRecord)
            for ref in record.frame.objects
        }
        num_bytes = sum(known.get(key, 0) for key in objects)
        for size in sizes_of(self.store, [key for key in objects if key not in known]):
            with suppress(StoreError):
                num_bytes += size.result()
        return num_bytes

    def _delete(self, *victims: Collection[str]) -> Iterator[str]:
        """Deletes one collection after the other; what failed, and why."""
        for keys in victims:
            for key, error in delete_all_noted(self.store, dict.fromkeys(keys), self.doomed):
                if error is not None:
                    _log.warning("retention of run '%s' goes on without: %s", self.keys.run, error)
                    yield f"{key}: {error}"
