"""Checks everything a run has in a store, and says what heals what.

Only reads. Safe beside a live publisher: what retention deletes meanwhile is no damage, and
objects of the newest epoch may belong to a commit in flight.
Source: docs/sync-protocol.md section 12.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gymfast.errors import FormatError, NotFoundError
from gymfast.stores.base import Store
from gymfast.sync.chain import is_full
from gymfast.sync.fsck_folds import find_bad_folds, object_problem
from gymfast.sync.fsck_log import Finding, LogCheck, check_log
from gymfast.sync.fsck_strays import (
    find_bad_leases,
    find_bad_statuses,
    find_loose,
    find_strays,
)
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log
from gymfast.sync.manifest import MAX_SMALL_RECORD_BYTES, ObjectRef, StateRecord, parse_hint
from gymfast.sync.objects import read_whole

_PUBLISH_ANCHOR = "publish a full state: `gymfast sync publish --anchor`"
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class FsckReport:
    """What `fsck` found; `restorable` is the newest version a fresh reader can load exactly."""

    run: str
    num_records: int
    num_objects: int
    num_bytes: int
    newest: int | None
    restorable: int | None
    findings: tuple[Finding, ...]

    @property
    def damage(self) -> tuple[Finding, ...]:
        """The findings that are more than waste."""
        return tuple(f for f in self.findings if f.severity == "damage")


def fsck(
    store: Store,
    run: str,
    *,
    key: bytes | None = None,
    reads_objects: bool = True,
    advance: Advance | None = None,
) -> FsckReport:
    """Every record, object, lease and hint of a run, checked against each other.

    With `reads_objects` all bytes are read and compared with their digests, else only lengths.
    `key` is that of the signatures of the records. `advance` is told bytes done and to do.
    Raises NotFoundError if the store has no such run, StoreError if the store itself fails.
    """
    log = Log(store, RunKeys(run), key)
    keys, found = log.keys, check_log(log)
    refs: dict[tuple[int, str], tuple[ObjectRef, list[int]]] = {}
    for record in found.linked:
        for ref in record.frame.objects:
            refs.setdefault((record.epoch, ref.digest), (ref, []))[1].append(record.seq)
    findings = [
        *found.findings,
        *_check_objects(store, keys, refs, advance if reads_objects else None, reads_objects),
        *find_loose(log, found, set(refs)),
        *find_strays(log, found),
        *find_bad_folds(log, found, reads_objects=reads_objects),
        *find_bad_leases(log, int(time.time() * 1e6)),
        *find_bad_statuses(log),
        *_check_hint(store, keys, found),
    ]
    return _report(found, run, findings, floor=log.floor(found.last), num_objects=len(refs))


def _report(
    log: LogCheck, run: str, findings: Iterable[Finding], *, floor: int, num_objects: int
) -> FsckReport:
    """The report, without findings that retention has overtaken."""
    current = [f for f in findings if f.seq == 0 or f.seq >= floor or f.severity == "waste"]
    states = [record for record in log.linked if record.seq >= floor]
    broken = {f.seq for f in current if f.severity == "damage"}
    reached = _reachable(states, broken)
    whole = {r.seq: r.version for r in states if is_full(r) and r.seq not in broken}
    versions = {record.seq: record.version for record in (*states, *log.unlinked)}
    return FsckReport(
        run=run,
        num_records=len(log.entries),
        num_objects=num_objects,
        num_bytes=sum(record.frame.num_bytes for record in states),
        newest=max(versions.values(), default=None),
        restorable=max(reached, default=None),
        findings=tuple(
            f if f.repair else replace(f, repair=_repair(f.seq, versions, reached, whole))
            for f in current
        ),
    )


def _reachable(states: Iterable[StateRecord], broken: set[int]) -> set[int]:
    """Versions that a fresh reader can load; `states` ascend."""
    reached: set[int] = set()
    for record in states:
        if record.seq not in broken and (is_full(record) or record.version - 1 in reached):
            reached.add(record.version)
    return reached


def _repair(seq: int, versions: dict[int, int], reached: set[int], whole: dict[int, int]) -> str:
    """What heals damage at a place of the log."""
    if versions.get(seq) in reached:
        return f"nothing is lost: readers reach version {versions[seq]} another way"
    later = min((place for place in whole if place > seq), default=None)
    if later is not None:
        return f"readers go on with the full state of version {whole[later]}"
    return _PUBLISH_ANCHOR


def _check_objects(
    store: Store,
    keys: RunKeys,
    refs: dict[tuple[int, str], tuple[ObjectRef, list[int]]],
    advance: Advance | None,
    reads: bool,
) -> Iterator[Finding]:
    total = sum(ref.num_bytes for ref, _ in refs.values())
    done = 0
    for (epoch, digest), (ref, places) in refs.items():
        key = keys.object(epoch, digest)
        problem = object_problem(store, key, ref, reads=reads)
        if problem:
            yield from (Finding("damage", key, problem, seq=seq) for seq in places)
        done += ref.num_bytes
        if advance is not None:
            advance(done, total)


def _check_hint(store: Store, keys: RunKeys, log: LogCheck) -> Iterator[Finding]:
    repair = "the next commit replaces it; readers find the end of the log without it"
    try:
        hint = parse_hint(read_whole(store, keys.hint, MAX_SMALL_RECORD_BYTES), f"'{keys.hint}'")
    except NotFoundError:
        return
    except FormatError as error:
        yield Finding("waste", keys.hint, str(error), repair)
        return
    known = {entry.tip.seq: entry.tip.record for entry in log.entries}
    if hint.run != keys.run or known.get(hint.seq, hint.record) != hint.record:
        yield Finding("waste", keys.hint, f"it names another record {hint.seq}", repair)
