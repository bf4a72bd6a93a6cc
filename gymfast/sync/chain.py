"""Which record may follow which, and which frames lead from a held version to a wanted one.

Pure: no I/O, no clock. The rules are C1..C8 of docs/sync-protocol.md section 4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gymfast.errors import ChainError, NotFoundError
from gymfast.sync.manifest import (
    AnchorRecord,
    EpochRecord,
    FoldRecord,
    FrameRecord,
    FrameRef,
    LogRecord,
    StateRecord,
    TipRecord,
    VersionRecord,
)

EMPTY_ROOT = hashlib.sha256(b"gymfast-root-1\n").hexdigest()  # docs/wire-format.md section 2
MAX_CHAIN = 256  # deltas after an anchor before the next one is forced


@dataclass(frozen=True)
class Tip:
    """A place in the log: the record there, and the epoch, version and state that hold after it.

    `Tip()` is the place before the first record.
    """

    seq: int = 0
    record: str = ""
    epoch: int = 0
    version: int | None = None
    root: str = EMPTY_ROOT

    def to_record(self) -> TipRecord:
        """The storable form; ValueError before the first version."""
        if self.version is None:
            raise ValueError("a place before the first version is not stored")
        return TipRecord(self.seq, self.record, self.epoch, self.version, self.root)

    @classmethod
    def from_record(cls, record: TipRecord) -> Tip:
        """The tip that `to_record` stored."""
        return cls(record.seq, record.record, record.epoch, record.version, record.root)


@dataclass(frozen=True)
class Entry:
    """A verified record and the tip after it."""

    record: LogRecord
    tip: Tip


def follow(tip: Tip, record: LogRecord, digest: str, run: str) -> Entry:
    """The entry of a record that follows `tip`; `digest` is that of its bytes.

    Raises ChainError if it does not follow.
    """
    _check_place(tip, record, run)
    epoch = _check_epoch(tip, record)
    version, root = tip.version, tip.root
    if isinstance(record, VersionRecord):
        _check_version(tip, record)
        version, root = record.version, record.root
    elif isinstance(record, AnchorRecord):
        _check_anchor(tip, record)
    return Entry(record, Tip(record.seq, digest, epoch, version, root))


def enter(record: LogRecord, digest: str, run: str, *, is_start: bool = False) -> Entry:
    """The entry of a record whose predecessors are gone; only a full state will do.

    Also one whose full state is known otherwise (`is_start`): by a fold.
    Raises ChainError for any other record.
    """
    if not is_full(record) and not (is_start and isinstance(record, StateRecord)):
        raise ChainError(
            f"record {record.seq} of run '{run}' is no full state, but the records before it "
            "are gone: the log is damaged; run `gymfast sync fsck`"
        )
    if record.run != run:
        raise ChainError(_foreign(record, run))
    assert isinstance(record, VersionRecord | AnchorRecord)
    return Entry(record, Tip(record.seq, digest, record.epoch, record.version, record.root))


def is_full(record: LogRecord) -> bool:
    """True if the frame of the record is a full state."""
    return isinstance(record, AnchorRecord) or (
        isinstance(record, VersionRecord) and record.kind == "anchor"
    )


def end_of(fold: FoldRecord) -> Tip:
    """The place that a fold says it leads to."""
    return Tip(fold.seq, fold.record, fold.epoch, fold.version, fold.root)


def needs_no_base(record: FrameRecord) -> bool:
    """True if the frame leads to its version from nothing."""
    if isinstance(record, FoldRecord):
        return record.base_version < 0
    return is_full(record)


def _check_place(tip: Tip, record: LogRecord, run: str) -> None:
    if record.run != run:
        raise ChainError(_foreign(record, run))
    if record.seq != tip.seq + 1:
        raise ChainError(
            f"run '{run}': record {record.seq} lies where record {tip.seq + 1} belongs: "
            "objects of the store were moved or mixed"
        )
    if record.previous != tip.record:
        raise ChainError(
            f"run '{run}': record {record.seq} follows {record.previous[:16] or 'nothing'}…, but "
            f"record {tip.seq} held here is {tip.record[:16] or 'none'}…: the log was replaced or "
            "rolled back; check the store, or start this reader from scratch"
        )


def _check_epoch(tip: Tip, record: LogRecord) -> int:
    expected = tip.epoch + 1 if isinstance(record, EpochRecord) else tip.epoch
    if record.epoch != expected or record.epoch == 0:
        raise ChainError(
            f"run '{record.run}': record {record.seq} is of epoch {record.epoch}, "
            f"expected {max(expected, 1)}: it was not written by the publisher in charge"
        )
    return expected


def _check_version(tip: Tip, record: VersionRecord) -> None:
    if tip.version is not None and record.version != tip.version + 1:
        raise ChainError(
            f"run '{record.run}': record {record.seq} commits version {record.version} "
            f"after version {tip.version}"
        )
    expected_root = tip.root if record.kind == "delta" else EMPTY_ROOT
    if record.base_root != expected_root or (record.kind == "delta" and tip.version is None):
        raise ChainError(
            f"run '{record.run}': version {record.version} is a delta on state "
            f"{record.base_root[:16]}…, but the version before is {tip.root[:16]}…"
        )


def _check_anchor(tip: Tip, record: AnchorRecord) -> None:
    if record.version != tip.version or record.root != tip.root:
        raise ChainError(
            f"run '{record.run}': record {record.seq} is an anchor of version {record.version}, "
            f"state {record.root[:16]}…, but the log stands at version {tip.version}, "
            f"state {tip.root[:16]}…"
        )


def _foreign(record: LogRecord, run: str) -> str:
    return (
        f"record {record.seq} under run '{run}' belongs to run '{record.run}': "
        "objects of two runs were mixed"
    )


@dataclass(frozen=True)
class Costs:
    """What a plan minimises: bytes, where each request counts like `request_bytes` more."""

    request_bytes: int = 64 << 10

    def of(self, frame: FrameRef) -> int:
        """Cost of fetching a frame."""
        return frame.num_bytes + self.request_bytes * len(frame.objects)


@dataclass(frozen=True)
class Step:
    """A frame to install and the place that is reached with it.

    `first_seq` is the oldest place of the log that the frame needs.
    """

    kind: Literal["delta", "anchor"]
    record: FrameRecord
    tip: Tip
    first_seq: int

    @property
    def is_fold(self) -> bool:
        """True if the frame is of no record of the log."""
        return isinstance(self.record, FoldRecord)


@dataclass(frozen=True)
class Plan:
    """Frames that lead to `end`; no steps if `end` is the state already held."""

    steps: tuple[Step, ...]
    end: Tip
    cost: int = 0

    @property
    def starts_with_anchor(self) -> bool:
        """True if the plan needs no base."""
        return bool(self.steps) and self.steps[0].kind == "anchor"

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(step.record.frame.num_bytes for step in self.steps)

    @property
    def first_seq(self) -> int:
        """The oldest record that the plan needs; 0 without steps."""
        return self.steps[0].first_seq if self.steps else 0


def plan(
    entries: Sequence[Entry],
    applied: Tip | None,
    target: int | None = None,
    *,
    at_least: int | None = None,
    costs: Costs | None = None,
    unusable: Collection[int] = (),
    folds: Iterable[FoldRecord] = (),
) -> Plan:
    """The cheapest way to version `target` (the newest if None) over whole versions.

    `entries` are consecutive. If `applied` (the exact state held, None if unknown or broken) lies
    in the log, they begin with the record after it. `at_least` is the version served last,
    `unusable` are records whose frames are damaged. `folds` that do not
    fit the log are left out.
    Raises ChainError if the target is older than that or cannot be reached from what is known,
    NotFoundError if it is not published yet.
    """
    costs = costs or Costs()
    lowest = applied.version if applied is not None else at_least
    target = _target(entries, applied, target, lowest)
    if applied is not None and target == applied.version:
        return Plan((), _last_of(entries, target) or applied)
    best = _cheapest(entries, applied, target, _Ways(applied, costs, unusable, folds))
    if best is None:
        raise ChainError(_unreachable(entries, applied, target))
    return best


def _target(
    entries: Sequence[Entry], applied: Tip | None, target: int | None, lowest: int | None
) -> int:
    newest = entries[-1].tip.version if entries else applied.version if applied else None
    if target is None:
        target = newest
    if target is None:
        raise NotFoundError("no version has been published yet")
    if newest is None or target > newest:
        raise NotFoundError(
            f"version {target} is not published yet; the newest is "
            f"{'none' if newest is None else newest}"
        )
    if lowest is not None and target < lowest:
        raise ChainError(
            f"version {target} is older than version {lowest} held here: rollback is refused; "
            "to go back start a reader from scratch, in a new place"
        )
    return target


def _last_of(entries: Sequence[Entry], version: int) -> Tip | None:
    tips = [entry.tip for entry in entries if entry.tip.version == version]
    return tips[-1] if tips else None


@dataclass(frozen=True)
class _Way:
    """Frames that lead to a version; `start` is the place of the full state that they begin with.

    0 stands for the held state.
    """

    start: int
    cost: int = 0
    steps: tuple[Step, ...] = ()

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """The lowest is the best: the cheapest, then fewer frames, the older start, fewer folds."""
        num_folds = sum(step.is_fold for step in self.steps)
        return self.cost, len(self.steps), self.start, num_folds

    def then(self, step: Step, cost: int) -> _Way:
        """This way and one frame more."""
        return _Way(self.start, self.cost + cost, (*self.steps, step))


class _Ways:
    """The best way to each version, from the records of the log one after the other."""

    def __init__(
        self,
        applied: Tip | None,
        costs: Costs,
        unusable: Collection[int],
        folds: Iterable[FoldRecord],
    ) -> None:
        self._costs = costs
        self._unusable = unusable
        self._folds: dict[Tip, list[FoldRecord]] = {}
        for fold in folds:
            self._folds.setdefault(end_of(fold), []).append(fold)
        self._tips: dict[int, Tip] = {}  # of each version the newest place so far
        self._found: dict[int, _Way] = {}
        self._held = applied
        if applied is not None and applied.version is not None:
            self._tips[applied.version] = applied

    def to(self, version: int) -> _Way | None:
        """The best way found to a version."""
        return self._found.get(version)

    def start_from_held(self) -> None:
        """The records are those after the held state: deltas lead on from it."""
        if self._held is not None and self._held.version is not None:
            self._found[self._held.version] = _Way(start=0)

    def take(self, entry: Entry) -> None:
        """Adds the ways that end at this place."""
        record, tip = entry.record, entry.tip
        if isinstance(record, StateRecord):
            if record.seq not in self._unusable:
                self._add(record, tip)
            for fold in self._folds.get(tip, ()):
                self._add(fold, tip)
        if tip.version is not None:
            self._tips[tip.version] = tip

    def _add(self, frame: FrameRecord, tip: Tip) -> None:
        version, cost = frame.version, self._costs.of(frame.frame)
        is_fold = isinstance(frame, FoldRecord)
        if needs_no_base(frame):
            if isinstance(frame, FoldRecord) and frame.base_root != EMPTY_ROOT:
                return
            step = Step("anchor", frame, tip, tip.seq)
            self._offer(version, _Way(tip.seq).then(step, cost))
            return
        assert not isinstance(frame, AnchorRecord)
        base = self._tips.get(frame.base_version)
        if base is None or base.root != frame.base_root:
            return
        step = Step("delta", frame, tip, base.seq if is_fold else tip.seq)
        if way := self._found.get(frame.base_version):
            self._offer(version, way.then(step, cost))
        held = self._held
        if is_fold and held and (held.version, held.root) == (base.version, base.root):
            self._offer(version, _Way(start=0).then(step, cost))

    def _offer(self, version: int, way: _Way) -> None:
        before = self._found.get(version)
        if before is None or way.rank < before.rank:
            self._found[version] = way


def _cheapest(
    entries: Sequence[Entry], applied: Tip | None, target: int, ways: _Ways
) -> Plan | None:
    """The cheapest plan; every full state on the way, and the held state, is a start."""
    end = _last_of(entries, target)
    if end is None:
        return None
    if applied is not None and applied.seq + 1 == entries[0].record.seq:
        ways.start_from_held()
    for entry in entries:
        if entry.tip.seq <= end.seq:
            ways.take(entry)
    best = ways.to(target)
    return None if best is None else Plan(best.steps, end, best.cost)


def _unreachable(entries: Sequence[Entry], applied: Tip | None, target: int) -> str:
    held = "nothing usable" if applied is None else f"version {applied.version}"
    oldest = entries[0].record.seq if entries else 0
    return (
        f"version {target} cannot be reached: this reader holds {held}, and the log from record "
        f"{oldest} on has no full state at or before version {target}; ask the publisher for an "
        "anchor, or wait for the next one"
    )
