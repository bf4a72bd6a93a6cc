"""Every interleaving of retention and readers over one log that grows.

Two publishers delete (one may have been stopped long ago and act on an old view), two readers take
leases. Compactors have folded every span of versions; a reader begins with a full state of the log
or with a fold. A reader that was let through must find everything it needs; the floor, the leases
and what is deleted come from gymfast.sync.retention.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from sync.logs import RUN, LogBuilder

from gymfast.sync.keys import Span
from gymfast.sync.manifest import LeaseRecord
from gymfast.sync.retention import (
    deletion,
    floor_of,
    limited,
    lowest_lease,
    passed_folds,
    version_at,
)

NUM_VERSIONS = 3


@cache
def the_log() -> LogBuilder:
    """An epoch, then versions with an anchor behind each."""
    log = LogBuilder()
    log.epoch()
    log.version("anchor")
    for _ in range(NUM_VERSIONS - 1):
        log.version("delta")
        log.anchor()
    return log


@cache
def folds_of(length: int) -> tuple[tuple[Span, int], ...]:
    """Every fold between versions of the first records, with the newest place of its base."""
    places = {e.tip.version: e.tip.seq for e in the_log().entries[:length] if e.record.seq > 1}
    return tuple((Span(a, b), places[a]) for a in places for b in places if a < b)


class Cleaner(NamedTuple):
    """A publisher in retention: it saw records up to `seen`, then takes `num_done` steps."""

    seen: int = 0
    floor: int = 0
    num_done: int = 0
    lease: int | None = None


class Reader(NamedTuple):
    """Wants the records from `first` to `last`, of which it has read `num_read`, or a fold whose
    base lies at `first`; `kind` says which of the two, or "any".

    It relies on the rest being there from when it is let through.
    """

    kind: str = "any"
    first: int = 0
    last: int = 0
    fold: Span = Span(-1, -1)
    num_done: int = 0
    is_let_through: bool = False
    num_read: int = 0


class World(NamedTuple):
    """`length` records are committed; `gone` were deleted; the mark is the newest floor."""

    length: int = 2
    gone: frozenset[int] = frozenset()
    gone_folds: frozenset[Span] = frozenset()
    mark: int = 0
    cleaners: tuple[Cleaner, ...] = (Cleaner(), Cleaner())
    readers: tuple[Reader, ...] = (Reader("fold"), Reader("log"))


@dataclass(frozen=True)
class Rules:
    """The protocol; a broken variant changes one of them."""

    cleaner_steps: tuple[str, ...] = ("mark", "leases", "delete")
    reader_steps: tuple[str, ...] = ("lease", "check")
    folds_heed_leases: bool = True
    fold_lease_after: int = 0  # places after that of its base
    reads_early: bool = True


class ViolationError(AssertionError):
    """A reader with a lease that finds a record or object gone."""


STARTS = {
    "of the log": World(readers=(Reader("log"), Reader("log"))),
    "of folds": World(readers=(Reader("fold"),)),
    "of both": World(),
    "of any kind": World(readers=(Reader(), Reader())),
}


def explore(rules: Rules | None = None, start: World | None = None) -> int:
    """Number of states reached; ViolationError if a reader that was let through misses anything."""
    rules = rules or Rules()
    seen = {start or World()}
    queue = deque(seen)
    while queue:
        for after in _moves(queue.popleft(), rules):
            if after not in seen:
                _check(after)
                seen.add(after)
                queue.append(after)
    return len(seen)


def _moves(world: World, rules: Rules) -> Iterator[World]:
    if world.length < len(the_log().records):
        yield world._replace(length=world.length + 1)
    for i, cleaner in enumerate(world.cleaners):
        for found, changes in _clean(world, cleaner, rules):
            cleaners = [found if i == j else c for j, c in enumerate(world.cleaners)]
            cleaners.sort(key=repr)
            yield world._replace(cleaners=tuple(cleaners), **changes)
    for i, reader in enumerate(world.readers):
        for found in _read(world, reader, rules):
            readers = [found if i == j else r for j, r in enumerate(world.readers)]
            yield world._replace(readers=tuple(sorted(readers)))


def _clean(world: World, cleaner: Cleaner, rules: Rules) -> Iterator[tuple[Cleaner, dict]]:
    if not cleaner.seen:
        floor = floor_of(the_log().records[: world.length], keep=1)
        if floor > world.mark:
            yield Cleaner(seen=world.length, floor=floor), {}
        return
    step = rules.cleaner_steps[cleaner.num_done]
    after = cleaner._replace(num_done=cleaner.num_done + 1)
    if step == "mark":
        yield after, {"mark": max(world.mark, cleaner.floor)}
    elif step == "leases":
        leases = [
            LeaseRecord(1, RUN, "reader", r.first, 9)
            for r in world.readers
            if "lease" in rules.reader_steps[: r.num_done]
        ]
        yield after._replace(lease=lowest_lease(leases, 0, 0)), {}
    else:
        floor = limited(cleaner.floor, cleaner.lease)
        records = {r.seq: r for r in the_log().records[: cleaner.seen]}
        found = deletion(records, (), floor, 1, is_owner=True)
        spans = [span for span, _ in folds_of(cleaner.seen)]
        lowest = version_at(records.values(), floor if rules.folds_heed_leases else cleaner.floor)
        passed = passed_folds(spans, spans, lowest, None)
        yield (
            Cleaner(),
            {"gone": world.gone | set(found.records), "gone_folds": world.gone_folds | passed},
        )


def _read(world: World, reader: Reader, rules: Rules) -> Iterator[Reader]:
    """The next step to be let through, or a read of what is wanted: both go on at once.

    Who misses something before it is let through plans again.
    """
    idle = Reader(reader.kind)
    if not reader.first:
        yield from _wishes(world, reader.kind, rules)
        return
    if not reader.is_let_through:
        num_done = reader.num_done + 1
        is_let_through = num_done == len(rules.reader_steps)
        if rules.reader_steps[reader.num_done] == "check" and world.mark > reader.first:
            yield idle
        else:
            yield reader._replace(num_done=num_done, is_let_through=is_let_through)
    if reader.is_let_through or rules.reads_early:
        seq = reader.first + reader.num_read
        is_missed = seq in world.gone and not reader.is_let_through
        is_over = not reader.last or is_missed or seq == reader.last
        yield idle if is_over else reader._replace(num_read=reader.num_read + 1)


def _wishes(world: World, kind: str, rules: Rules) -> Iterator[Reader]:
    """What a reader may want now: the records from the floor on, or a fold."""
    idle, length = Reader(kind), world.length
    if kind != "fold":
        yield idle._replace(first=floor_of(the_log().records[:length], 1), last=length)
    newest = max((span.version for span, _ in folds_of(length)), default=0)
    for span, place in () if kind == "log" else folds_of(length):
        is_wanted = kind == "any" or span.version == newest
        if is_wanted and span not in world.gone_folds:
            yield idle._replace(first=place + rules.fold_lease_after, fold=span)


def _check(world: World) -> None:
    for reader in world.readers:
        rest = set(range(reader.first + reader.num_read, reader.last + 1))
        if reader.is_let_through and reader.last and world.gone & rest:
            raise ViolationError("a reader with a lease finds a record gone")
        if reader.is_let_through and reader.fold in world.gone_folds:
            raise ViolationError("a reader with a lease finds its fold gone")


BROKEN = {
    "reads the leases before it marks the floor": Rules(("leases", "mark", "delete")),
    "never marks the floor": Rules(("leases", "delete")),
    "lets readers pass that do not look at the mark": Rules(reader_steps=("lease",)),
    "lets readers look at the mark before they take a lease": Rules(
        reader_steps=("check", "lease")
    ),
    "does not read the leases": Rules(("mark", "delete")),
    "deletes folds below the floor whatever the leases say": Rules(folds_heed_leases=False),
    "lets the lease of a fold begin after its base": Rules(fold_lease_after=1),
}
