"""Reads the log of a run for `fsck`: goes on after damage instead of stopping at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gymfast.errors import ChainError, FormatError, NotFoundError
from gymfast.stores.base import Store
from gymfast.sync.chain import Entry, Tip, enter, follow, is_full
from gymfast.sync.keys import RunKeys, number_of
from gymfast.sync.manifest import (
    MAX_RECORD_BYTES,
    EpochRecord,
    LogRecord,
    StateRecord,
    digest_of,
    parse_log_record,
)

GC_REMOVES_IT = "`gymfast sync gc` removes it"


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be: `damage` endangers a version, `waste` takes space.

    `seq` is the record it belongs to, 0 for none; `repair` says what heals it.
    """

    severity: Literal["damage", "waste"]
    key: str
    problem: str
    repair: str = ""
    seq: int = 0


@dataclass
class LogCheck:
    """The log as far as it holds together: records with their tips, and what is wrong.

    `unlinked` are states after a damaged place, up to the next full state.
    """

    floor: int = 0
    entries: list[Entry] = field(default_factory=list)
    unlinked: list[StateRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def linked(self) -> list[StateRecord]:
        """The records of `entries` that are about a state."""
        return [e.record for e in self.entries if isinstance(e.record, StateRecord)]


def read_floor(store: Store, keys: RunKeys) -> int:
    """The place before which retention may have deleted records; 0 if it never ran."""
    return max((number_of(key) or 0 for key in store.list(keys.floors_prefix)), default=0)


def check_log(store: Store, keys: RunKeys, key: bytes | None) -> LogCheck:
    """Every record of the log, chained; after damage the walk enters again at a full state.

    Raises NotFoundError if there is no record at all.
    """
    places = [place for k in store.list(keys.log_prefix) if (place := number_of(k))]
    if not places:
        raise NotFoundError(f"{store.url} has no run '{keys.run}': nothing lies in its log")
    log = LogCheck(read_floor(store, keys))
    tip: Tip | None = Tip() if log.floor <= 1 else None
    for seq in range(max(log.floor, 1), max(places) + 1):
        tip = _check_place(log, store, keys, (seq, key), tip)
    for seq in sorted(place for place in places if place < log.floor):
        _check_leftover(log, store, keys, (seq, key))
    return log


def _check_place(
    log: LogCheck, store: Store, keys: RunKeys, place: tuple[int, bytes | None], tip: Tip | None
) -> Tip | None:
    """The tip after a record; None where the chain has no hold."""
    seq, key = place
    where = keys.record(seq)
    try:
        record, digest = _read(store, where, key)
        if tip is None and not is_full(record):
            if isinstance(record, StateRecord):
                log.unlinked.append(record)
            return None
        entry = enter(record, digest, keys.run) if tip is None else None
        entry = entry or follow(tip or Tip(), record, digest, keys.run)
        if record.seq != seq:
            raise ChainError(f"record {record.seq} lies where record {seq} belongs")
    except NotFoundError:
        log.findings.append(Finding("damage", where, "the record is missing", seq=seq))
        return None
    except (FormatError, ChainError) as error:
        log.findings.append(Finding("damage", where, str(error), seq=seq))
        return None
    log.entries.append(entry)
    return entry.tip


def _check_leftover(
    log: LogCheck, store: Store, keys: RunKeys, place: tuple[int, bytes | None]
) -> None:
    """Below the floor only the records of epochs stay."""
    seq, key = place
    where = keys.record(seq)
    try:
        record, _ = _read(store, where, key)
    except NotFoundError:
        return
    except FormatError as error:
        log.findings.append(Finding("waste", where, str(error), GC_REMOVES_IT, seq))
        return
    if not isinstance(record, EpochRecord):
        problem = f"it lies before the floor, record {log.floor}"
        log.findings.append(Finding("waste", where, problem, GC_REMOVES_IT, seq))


def _read(store: Store, where: str, key: bytes | None) -> tuple[LogRecord, str]:
    blob = store.get(where, max_bytes=MAX_RECORD_BYTES)
    return parse_log_record(blob, f"'{where}'", key), digest_of(blob)
