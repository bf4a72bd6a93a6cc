"""What a subscriber knows of the log, and the way from the state it holds to a wanted version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import count

from gymfast.errors import ChainError, FormatError, NotFoundError
from gymfast.sync.ahead import NoteReader
from gymfast.sync.chain import Costs, Entry, Plan, Tip, end_of, follow, is_full, needs_no_base, plan
from gymfast.sync.clock import Clock
from gymfast.sync.folds import read_useful
from gymfast.sync.log import Found, Log
from gymfast.sync.manifest import COUNT_MAX, EpochRecord, FoldRecord, VersionRecord
from gymfast.sync.requests import Pending
from gymfast.sync.watching import watch

GAP_PATIENCE_S = 30.0
"""How long a missing record may be one that is not visible yet, before it counts as lost."""
_log = logging.getLogger(__name__)
Planned = Callable[[list[Entry], int | None], Plan]
OnNext = Callable[[VersionRecord, int], None]


class View:
    """Consecutive entries of the log, from the held state or from a full state on.

    `held` is the newest place this reader has ever served: nothing older is accepted. `applied`
    is the exact state that the target has, None if it has none or may be broken. `created_us` is
    when the newest record known was made, by its publisher's clock; None if that is unknown. Plans
    may use `folds`. `on_next` is told of a version that follows what is held or known, and of the
    oldest record needed to get there, before the floor is looked at.
    """

    def __init__(self, log: Log, clock: Clock, held: Tip | None) -> None:
        self._log = log
        self._clock = clock
        self._gap_since_s: float | None = None
        self._is_damaged = False
        self._looked_s: float | None = None
        self._looked_at = self._looked_hint = 0
        self.held = held
        self.applied: Tip | None = None
        self.entries: list[Entry] = []
        self.folds: tuple[FoldRecord, ...] = ()
        self.moved_s = clock.monotonic_s()
        self.created_us: int | None = None
        self._is_age_known = False
        self.on_next: OnNext | None = None
        self._watched: tuple[int, Pending[Found]] | None = None

    @property
    def newest(self) -> int | None:
        """The newest version known; None if there is none."""
        if self.entries and self.entries[-1].tip.version is not None:
            return self.entries[-1].tip.version
        return self.held.version if self.held else None

    def refresh(self) -> None:
        """Takes in the records that have become visible.

        Raises ChainError for a log that does not continue what this reader has seen.
        """
        before = self._end
        try:
            self._extend(before)
        except ChainError:
            if not self._forget_misread():
                raise
            self._extend(self._end)
        if self._end != before:
            self.moved_s = self._clock.monotonic_s()
            self._gap_since_s = None
        self._note_age()

    @property
    def can_watch(self) -> bool:
        """True if the next record may come to a place that is known, and the store is far.

        Else looks will do. A damaged record is there already: waiting for it would not wait.
        """
        return self._end is not None and not self._is_damaged and self._log.requests.is_far

    def watch(self, interval_s: float, timeout_s: float, notes: NoteReader) -> None:
        """Returns once the next record can be read, or that time has passed.

        The next `refresh` takes it in. Meanwhile `notes` are looked for.
        """
        assert self._end is not None
        log, seq = self._log, self._end.seq + 1
        notes.expect(seq)
        try:
            found = watch(
                lambda: log.read(seq),
                log.requests,
                self._clock,
                interval_s=interval_s,
                timeout_s=timeout_s,
                beside=notes.look,
            )
        finally:
            notes.expect(0)
        self._watched = None if found is None else (seq, found)

    def find(self, root: str) -> Tip | None:
        """The newest place in the log whose state has this root."""
        entries = self._log.load(lambda record: record.root == root)
        self._check_continues(entries)
        tips = [e.tip for e in entries if e.tip.root == root and e.tip.version is not None]
        return tips[-1] if tips else None

    def plan(self, target: int | None, costs: Costs, unusable: Collection[int]) -> Plan:
        """The plan for a target; with damaged frames, None leads to the newest that can be reached.

        Raises ChainError and NotFoundError as gymfast.sync.chain.plan does; they also name a
        damaged record.
        """
        try:
            return self._plan(target, costs, unusable)
        except (ChainError, NotFoundError) as error:
            if not self._log.damage:
                raise
            raise type(error)(f"{error}; {self._log.damage}") from error

    def advance(self, tip: Tip) -> None:
        """The target holds exactly the state at `tip` from now on."""
        self.held = self.applied = tip
        self.entries = self._after_applied(self.entries)

    def adopt(self, tip: Tip) -> None:
        """The target turned out to hold the state at `tip`: deltas lead on from there."""
        self.advance(tip)
        if self.entries and self.entries[0].record.seq != tip.seq + 1:
            self.entries = []
        self.refresh()

    def set_applied(self, tip: Tip | None) -> None:
        """What the target holds after an install; None if it may hold anything."""
        if tip is None:
            self.applied = None
        else:
            self.advance(tip)

    def reload(self) -> None:
        """Forgets the entries and begins with the newest full state, past damage by a fold."""
        entries = self._log.load(starts=self._starts)
        if self._log.damage and not self._starts:
            damage, found = self._log.damage, read_useful(self._log, self.newest or 0, COUNT_MAX)
            self.folds += tuple(fold for fold in found if needs_no_base(fold))
            if self._starts:
                entries = self._log.load(starts=self._starts)
                self._log.damage = self._log.damage or damage
        self._check_continues(entries)
        if entries and (self.held is None or entries[-1].tip.seq >= self.held.seq):
            self.entries = self._after_applied(entries)

    def ensure_full(self) -> None:
        """Begins with a full state where there is no held state to begin with."""
        if self.applied is None and not any(is_full(entry.record) for entry in self.entries):
            self.reload()

    def _plan(self, target: int | None, costs: Costs, unusable: Collection[int]) -> Plan:
        at_least = self.held.version if self.held else None

        def planned(entries: list[Entry], version: int | None) -> Plan:
            return plan(
                entries,
                self.applied,
                version,
                at_least=at_least,
                costs=costs,
                unusable=unusable,
                folds=self.folds,
            )

        try:
            return planned(self.entries, target)
        except ChainError:
            older = self._log.load(
                lambda r: r.seq not in unusable and (target is None or r.version <= target),
                self._starts,
            )
            self._check_continues(older)
            entries = self._after_applied(older)
            if target is not None or not unusable:
                return planned(entries, target)
            return self._newest_reachable(planned, entries)

    def _extend(self, end: Tip | None) -> None:
        if end is None or not self._follow(end):
            self._load_if_needed(end)

    def _forget_misread(self) -> bool:
        """True if the log contradicts only what this reader took in wrong, which is put right.

        A record that came back damaged may parse, and only the one after it tells. So what is not
        installed is read again; of the place that is held, the record is taken as it is now, if it
        has the same state.
        """
        is_changed, self.entries = bool(self.entries), []
        held = self.held
        if held is None:
            return is_changed
        try:
            record, digest = self._log.read_agreed(held.seq)
        except (NotFoundError, FormatError):
            return is_changed
        if digest == held.record or isinstance(record, EpochRecord):
            return is_changed
        if (record.epoch, record.version, record.root) != (held.epoch, held.version, held.root):
            return is_changed
        _log.warning("record %d was misread: its digest is %s", held.seq, digest)
        self.held = replace(held, record=digest)
        if self.applied is not None and self.applied.seq == held.seq:
            self.applied = self.held
        return True

    @property
    def _starts(self) -> dict[int, Tip]:
        """Places at which the log may be entered, as a fold leads there from nothing."""
        return {fold.seq: end_of(fold) for fold in self.folds if needs_no_base(fold)}

    @property
    def _end(self) -> Tip | None:
        return self.entries[-1].tip if self.entries else self.applied

    def _note_age(self) -> None:
        """Keeps when the newest record was made: also once it is installed, or held from before."""
        if self.entries:
            self.created_us = self.entries[-1].record.created_us
            self._is_age_known = True
        elif self.applied is not None and not self._is_age_known:
            try:
                record, digest = self._log.read(self.applied.seq)
            except (NotFoundError, FormatError) as error:
                if isinstance(error, FormatError):
                    self._log.raise_if_foreign(error)
                _log.info("the age of what is held is unknown: %s", error)
            else:
                self.created_us = record.created_us if digest == self.applied.record else None
            self._is_age_known = True

    def _follow(self, end: Tip) -> bool:
        """True if records were added after `end`, and none of those needed may be deleted."""
        self._is_damaged = False
        added: list[Entry] = []
        floor: Pending[int] | None = None
        for _, read in self._reads_after(end.seq):
            tip = added[-1].tip if added else end
            try:
                record, digest = read.result()
                if isinstance(record, EpochRecord):  # it has no state by which to know it again
                    record, digest = self._log.read_agreed(tip.seq + 1)
            except NotFoundError:
                break
            except FormatError as error:
                self._log.raise_if_foreign(error)
                _log.warning("%s; looking for a full state after it", error)
                self._is_damaged, self._log.damage = True, str(error)
                break
            added.append(follow(tip, record, digest, self._log.keys.run))
            self._announce(added[-1], end)
            # Of a record that is read after the mark was looked at, nobody knows where it lies.
            floor = self._look_at_floor(added[-1].tip) if len(added) == 1 else None
        if added and not self._is_damaged:
            self._log.damage = ""
        self.entries += added
        if not added:
            return False
        floor = floor or self._look_at_floor(added[-1].tip)
        return floor.result() <= self._needed(end)

    def _reads_after(self, seq: int) -> Iterator[tuple[int, Pending[Found]]]:
        """Reads of the records after a place, that which was watched for among them."""
        watched, self._watched = self._watched, None
        if watched is not None and watched[0] == seq + 1:
            yield watched
            seq += 1
        yield from self._log.reads(count(seq + 1))

    def _look_at_floor(self, tip: Tip) -> Pending[int]:
        return self._log.requests.start(lambda: self._log.floor(tip.seq))

    def _announce(self, entry: Entry, end: Tip) -> None:
        is_next = self.applied is not None and isinstance(entry.record, VersionRecord)
        if self.on_next is not None and is_next:
            assert isinstance(entry.record, VersionRecord)
            self.on_next(entry.record, self._needed(end))

    def _needed(self, end: Tip) -> int:
        """The oldest record that is needed to go on from `end`, or from what leads there."""
        return self.entries[0].record.seq if self.entries else end.seq + 1

    def _load_if_needed(self, end: Tip | None) -> None:
        """Loads anew if there is nothing yet, if retention passed by, or if a record is lost."""
        if end is not None:
            needed = self._needed(end)
            if self._log.floor(end.seq) <= needed and not self._is_next_lost(self._end or end):
                return
        self.reload()

    def _is_next_lost(self, tip: Tip) -> bool:
        """True if the record after `tip` is damaged, or missing for long and later ones are there.

        Only a list of the log tells its end from a gap.
        """
        now_s = self._clock.monotonic_s()
        if not self._is_list_due(tip, now_s):
            return False
        if self._is_damaged:
            return True
        if not any(seq > tip.seq for seq in self._log.places()):
            self._gap_since_s = None
            return False
        if self._gap_since_s is None:
            self._gap_since_s = now_s
        is_lost = now_s - self._gap_since_s >= GAP_PATIENCE_S
        if is_lost:
            self._gap_since_s = now_s
        return is_lost

    def _is_list_due(self, tip: Tip, now_s: float) -> bool:
        """True where the hint or a damaged record says that there is more than at the last list.

        Also from time to time: the hint is only advice. A list costs the more the longer the log
        is, so a look that finds nothing new does without.
        """
        hint = self._log.hinted()
        is_due = self._looked_s is None or now_s - self._looked_s >= GAP_PATIENCE_S
        is_due |= hint > max(tip.seq, self._looked_hint)
        is_due |= self._is_damaged and self._looked_at != tip.seq
        if is_due:
            self._looked_s, self._looked_at = now_s, tip.seq
            self._looked_hint = max(hint, self._looked_hint)
        return is_due

    def _check_continues(self, entries: list[Entry]) -> None:
        """Raises ChainError if the entries contradict the place this reader has served."""
        held, run = self.held, self._log.keys.run
        if held is None or not entries:
            return
        first, same = entries[0].record, [e for e in entries if e.tip.seq == held.seq]
        is_other = bool(same) and same[0].tip.record != held.record
        is_other |= first.seq == held.seq + 1 and first.previous != held.record
        if is_other:
            raise ChainError(
                f"run '{run}': record {held.seq} is not the one this reader has followed: the log "
                "was replaced or rolled back; check the store, or start this reader from scratch"
            )

    def _after_applied(self, entries: list[Entry]) -> list[Entry]:
        if self.applied is None:
            return entries
        return [entry for entry in entries if entry.tip.seq > self.applied.seq]

    def _newest_reachable(self, planned: Planned, entries: list[Entry]) -> Plan:
        versions = sorted({e.tip.version for e in entries if e.tip.version is not None})
        for version in reversed(versions):
            try:
                found = planned(entries, version)
            except ChainError:
                continue
            if version != versions[-1]:
                _log.warning("version %d cannot be read, going to %d", versions[-1], version)
            return found
        return planned(entries, None)
