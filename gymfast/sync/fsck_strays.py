"""What lies under the name of a run and is nothing that gymfast put there, or left behind."""

from __future__ import annotations

from collections.abc import Iterator

from gymfast.errors import FormatError
from gymfast.stores.probe import probe_time_us
from gymfast.sync.fsck_log import GC_REMOVES_IT, Finding, LogCheck
from gymfast.sync.keys import number_of, object_of
from gymfast.sync.lease import read_leases
from gymfast.sync.log import MAX_GAP, Log
from gymfast.sync.reader_status import is_reader, read_statuses

BY_HAND = "it is ignored; delete it by hand"


def find_strays(log: Log, found: LogCheck) -> Iterator[Finding]:
    """Keys that name nothing, records and marks beyond the end of the log, tests left over.

    Objects of frames, notes, leases, statuses and folds are not looked at. Raises StoreError.
    """
    keys = log.keys
    others = (
        *(keys.objects_prefix, keys.readers_prefix, keys.status_prefix),
        *(keys.folds_prefix, keys.folded_prefix, keys.ahead_prefix),
    )
    for key in log.store.list(f"{keys.run}/"):
        problem, repair = "gymfast gives no object this name", BY_HAND
        if key == keys.hint or key.startswith(others):
            continue
        if key.startswith(keys.probe_prefix) and probe_time_us(key) is not None:
            problem = (
                "a publisher that starts tests the store with it, or one that was killed left it"
            )
            repair = f"{GC_REMOVES_IT} a day later"
        elif (seq := number_of(key, keys.log_prefix)) is not None:
            if seq <= found.last + MAX_GAP:
                continue
            problem = f"no run gets there: its log ends with record {found.last}"
        elif (mark := number_of(key, keys.floors_prefix)) is not None:
            if mark <= found.last or log.reaches(mark):
                continue
            problem = f"it marks a place after the end of the log, record {found.last}"
        yield Finding("waste", key, problem, repair)


def find_loose(log: Log, found: LogCheck, needed: set[tuple[int, str]]) -> Iterator[Finding]:
    """Objects that no record names; `needed` are epoch and digest of all others."""
    newest_epoch = max((entry.tip.epoch for entry in found.entries), default=0)
    prefix = log.keys.objects_prefix
    for key in log.store.list(prefix):
        place = object_of(key, prefix)
        if place is None:
            yield Finding("waste", key, "gymfast gives no object this name", BY_HAND)
        elif place not in needed:
            repair = GC_REMOVES_IT
            if place[0] == newest_epoch:
                repair = "a publish under way may need it; else the next publisher removes it"
            elif place[0] > newest_epoch:
                repair = f"unless a publisher of epoch {place[0]} has just started, {BY_HAND}"
            yield Finding("waste", key, "no record names it", repair)


def find_bad_leases(log: Log, now_us: int) -> Iterator[Finding]:
    """Leases that are damaged, or over at that time, in microseconds since 1970."""
    for key, lease in read_leases(log.store, log.keys):
        if isinstance(lease, FormatError):
            repair = f"its reader writes it anew; if there is none, {BY_HAND}"
            yield Finding("waste", key, str(lease), repair)
        elif lease.expires_us <= now_us:
            repair = f"{GC_REMOVES_IT} a day later"
            yield Finding("waste", key, "the lease of this reader is over", repair)


def find_bad_statuses(log: Log) -> Iterator[Finding]:
    """What is damaged of that which readers tell of themselves, and names that are none."""
    prefix = log.keys.status_prefix
    for key, status in read_statuses(log.store, log.keys):
        if isinstance(status, FormatError):
            repair = f"its reader writes it anew; else {GC_REMOVES_IT}"
            yield Finding("waste", key, str(status), repair)
    for key in log.store.list(prefix):
        if not is_reader(key.removeprefix(prefix)):
            yield Finding("waste", key, "gymfast gives no object this name", BY_HAND)
