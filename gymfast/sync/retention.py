"""What may be deleted: pure (docs/sync-protocol.md section 9).

The floor is the first record that stays. It is always a full state, so what stays begins with an
anchor and is a complete chain. Records of epochs stay for ever: they keep old publishers fenced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gymfast.sync.chain import is_full
from gymfast.sync.keys import Span
from gymfast.sync.manifest import EpochRecord, LeaseRecord, LogRecord, StateRecord

NUM_FULL_FOLDS = 2
"""Full states of compactors that stay: the newest, and the one before for who reads it just now."""


@dataclass(frozen=True)
class Deletion:
    """Records and objects to delete, in the order in which to delete them: records first."""

    records: tuple[int, ...]
    objects: tuple[tuple[int, str], ...]


def floor_of(records: Sequence[LogRecord], keep: int) -> int:
    """The place of the newest full state from which `keep` versions can still be reached.

    That is: at or before the oldest of the newest `keep` versions. 0 if there is no such state:
    then nothing may be deleted. `records` ascend. Raises ValueError if keep is under 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, at least 1 version has to stay")
    states = [r for r in records if isinstance(r, StateRecord)]
    if not states:
        return 0
    oldest_kept = states[-1].version - keep + 1
    return max((r.seq for r in states if is_full(r) and r.version <= oldest_kept), default=0)


def lowest_lease(leases: Iterable[LeaseRecord], now_us: int, grace_us: int) -> int | None:
    """The oldest record that a lease needs which has not been over for `grace_us`; None if none."""
    return min((x.seq for x in leases if x.expires_us + grace_us > now_us), default=None)


def limited(floor: int, lease: int | None) -> int:
    """The floor that leaves everything a lease needs."""
    return floor if lease is None else min(floor, lease)


def version_at(records: Iterable[LogRecord], seq: int) -> int:
    """The version that holds at a place of the log; -1 if no record says."""
    states = (r for r in records if isinstance(r, StateRecord) and r.seq <= seq)
    return max((record.version for record in states), default=-1)


def passed_folds(
    spans: Iterable[Span], finished: Collection[Span], lowest: int, leased: int | None
) -> frozenset[Span]:
    """The folds that nobody needs any more.

    Those whose base, or full state, is older than version `lowest`, which holds at the floor; of
    the full states also those that two later ones of the `finished` make superfluous, unless a
    reader has a lease from version `leased` on.
    """
    full = sorted(span.version for span in finished if span.is_full)
    oldest_full = full[-NUM_FULL_FOLDS] if len(full) > NUM_FULL_FOLDS else -1
    if leased is not None:
        oldest_full = min(oldest_full, leased)
    lowest_full = max(lowest, oldest_full)
    return frozenset(
        span for span in spans if span.start < (lowest_full if span.is_full else lowest)
    )


def deletion(
    records: Mapping[int, LogRecord],
    objects: Iterable[tuple[int, str]],
    floor: int,
    newest_epoch: int,
    *,
    is_owner: bool,
    damaged: Collection[int] = (),
) -> Deletion:
    """What lies before the floor or belongs to nothing that stays.

    `records` are all that the log holds, `damaged` the places with something else, `objects`
    (epoch, digest) all that are stored. Objects of the newest epoch may be of a commit in flight:
    only its publisher (`is_owner`), between two commits, may delete them. Objects of a newer epoch
    than the newest known are never touched. While a place from the floor on is missing, no object
    goes: a record that is not visible yet may name it.
    """
    passing = {seq for seq, record in records.items() if not isinstance(record, EpochRecord)}
    gone = tuple(sorted(seq for seq in passing.union(damaged) if seq < floor))
    needed = {
        (record.epoch, ref.digest)
        for seq, record in records.items()
        if seq >= floor and isinstance(record, StateRecord)
        for ref in record.frame.objects
    }
    taken = records.keys() | set(damaged)
    if any(seq not in taken for seq in range(max(floor, 1), max(taken, default=0))):
        return Deletion(gone, ())
    last_epoch = newest_epoch if is_owner else newest_epoch - 1
    loose = tuple(sorted(o for o in objects if o[0] <= last_epoch and o not in needed))
    return Deletion(gone, loose)
