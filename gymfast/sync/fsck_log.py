"""Reads the log of a run for `fsck`: goes on after damage instead of stopping at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gymfast.errors import ChainError, FormatError, NotFoundError
from gymfast.sync.chain import Entry, Tip, enter, follow, is_full
from gymfast.sync.log import Log
from gymfast.sync.manifest import NUMBER_MAC, EpochRecord, StateRecord

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

    `last` is the last place that is taken; `unlinked` are states after a damaged place, up to the
    next full state; `num_foreign` records are not signed with the key.
    """

    last: int
    floor: int
    num_foreign: int = 0
    entries: list[Entry] = field(default_factory=list)
    unlinked: list[StateRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def linked(self) -> list[StateRecord]:
        """The records of `entries` that are about a state."""
        return [e.record for e in self.entries if isinstance(e.record, StateRecord)]


def check_log(log: Log) -> LogCheck:
    """Every record of the log, chained; after damage the walk enters again at a full state.

    Raises NotFoundError if there is no record at all, FormatError if all are signed with another
    key.
    """
    places = log.places()
    if not places:
        raise NotFoundError(
            f"{log.store.url} has no run '{log.keys.run}': no record lies in its log"
        )
    found = LogCheck(places[-1], log.floor())
    tip: Tip | None = Tip() if found.floor <= 1 else None
    before = found.floor - 1
    for seq in [place for place in places if place >= found.floor]:
        if seq > before + 1:
            found.findings.append(_missing(log, before + 1, seq - 1))
            tip = None
        tip = _check_place(found, log, seq, tip)
        before = seq
    for seq in [place for place in places if place < found.floor]:
        _check_leftover(found, log, seq)
    if found.num_foreign and not found.entries and not found.unlinked:
        raise log.foreign_run(found.num_foreign)
    return found


def _missing(log: Log, first: int, last: int) -> Finding:
    is_one = first == last
    problem = "the record is missing" if is_one else f"records {first} to {last} are missing"
    return Finding("damage", log.keys.record(first), problem, seq=first)


def _check_place(found: LogCheck, log: Log, seq: int, tip: Tip | None) -> Tip | None:
    """The tip after a record; None where the chain has no hold."""
    where = log.keys.record(seq)
    try:
        record, digest = log.read(seq)
        if tip is None and not is_full(record):
            if isinstance(record, StateRecord):
                found.unlinked.append(record)
            return None
        run = log.keys.run
        entry = enter(record, digest, run) if tip is None else follow(tip, record, digest, run)
    except NotFoundError:
        found.findings.append(_missing(log, seq, seq))
        return None
    except (FormatError, ChainError) as error:
        found.num_foreign += isinstance(error, FormatError) and error.number == NUMBER_MAC
        found.findings.append(Finding("damage", where, str(error), seq=seq))
        return None
    found.entries.append(entry)
    return entry.tip


def _check_leftover(found: LogCheck, log: Log, seq: int) -> None:
    """Below the floor only the records of epochs stay."""
    where = log.keys.record(seq)
    try:
        record, _ = log.read(seq)
    except NotFoundError:
        return
    except FormatError as error:
        repair = "delete it by hand" if error.number == NUMBER_MAC else GC_REMOVES_IT
        found.findings.append(Finding("waste", where, str(error), repair, seq))
        return
    if not isinstance(record, EpochRecord):
        problem = f"it lies before the floor, record {found.floor}"
        found.findings.append(Finding("waste", where, problem, GC_REMOVES_IT, seq))
