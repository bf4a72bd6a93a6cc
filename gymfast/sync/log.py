"""Reads and extends the log of a run in a store."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

from gymfast.errors import ConflictError, FormatError, NotFoundError, StoreError
from gymfast.stores.base import Store
from gymfast.sync.chain import Entry, Tip, enter, follow, is_full
from gymfast.sync.keys import RunKeys, number_of
from gymfast.sync.manifest import (
    MAX_RECORD_BYTES,
    MAX_SMALL_RECORD_BYTES,
    NUMBER_MAC,
    NUMBER_VALUE,
    LogRecord,
    StateRecord,
    digest_of,
    encode,
    parse_hint,
    parse_log_record,
)
from gymfast.sync.objects import agreed, digest_at, read_whole, settled
from gymfast.sync.requests import MAX_REQUESTS, Pending, Requests

MAX_GAP = 2**32
"""Places after the one before, beyond which only a sound record counts: no run gets there, and a
key with such a number is rubbish. Going on after it would use the numbers up."""
_log = logging.getLogger(__name__)
Found = tuple[LogRecord, str]


class Log:
    """The records of one run; `key` checks their signatures.

    `damage` tells of a damaged or missing record that the newest look at the log met; "" if it met
    none.
    `is_single_writer` allows a store without create-only writes: a look, then a put. `requests` has
    several reads under way where the store is far.
    """

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        key: bytes | None = None,
        *,
        is_single_writer: bool = False,
    ) -> None:
        self.store = store
        self.keys = keys
        self.key = key
        self.damage = ""
        self.requests = Requests(store)
        self._is_single_writer = is_single_writer

    def read(self, seq: int) -> Found:
        """A record and the digest of its bytes.

        Raises NotFoundError if it is absent, FormatError if it is damaged, too long, or that of
        another place or run.
        """
        return self._parsed(seq, self._blob(seq))

    def read_agreed(self, seq: int) -> Found:
        """As `read`, from bytes that two reads agree on: for what cannot be taken back."""
        return self._parsed(seq, agreed(lambda: self._blob(seq)))

    def read_settled(self, seq: int) -> Found:
        """As `read`, but damaged only if two reads agree."""
        return settled(lambda: self._blob(seq), lambda blob: self._parsed(seq, blob))

    def _blob(self, seq: int) -> bytes:
        return read_whole(self.store, self.keys.record(seq), MAX_RECORD_BYTES)

    def _parsed(self, seq: int, blob: bytes) -> Found:
        where = f"'{self.keys.record(seq)}' in {self.store.url}"
        record = parse_log_record(blob, where, self.key)
        if record.run != self.keys.run:
            raise FormatError(
                f"{where}: the record is of run '{record.run}': objects of two runs were mixed",
                NUMBER_VALUE,
            )
        if record.seq != seq:
            raise FormatError(
                f"{where}: record {record.seq} lies where record {seq} belongs: objects of the "
                "store were moved or mixed",
                NUMBER_VALUE,
            )
        return record, digest_of(blob)

    def read_all(self) -> tuple[dict[int, LogRecord], frozenset[int]]:
        """All sound records by place, whether they hang together or not, and damaged places.

        A record whose signature is not ours is neither. Raises FormatError if that is true of all
        records that are sound otherwise.
        """
        records: dict[int, LogRecord] = {}
        damaged: set[int] = set()
        foreign: set[int] = set()
        previous = ""
        for seq in reversed(self.places()):
            try:
                records[seq], digest = self.read_settled(seq)
                if digest != previous:  # what is deleted depends on it, and nothing vouches for it
                    records[seq], digest = self.read_agreed(seq)
                previous = records[seq].previous
            except NotFoundError:
                continue
            except FormatError as error:
                _log.warning("run '%s' goes on without: %s", self.keys.run, error)
                (foreign if error.number == NUMBER_MAC else damaged).add(seq)
        if foreign and not records:
            raise self.foreign_run(len(foreign))
        return dict(sorted(records.items())), frozenset(damaged)

    def foreign_run(self, num_records: int) -> FormatError:
        """The error for a run none of whose records is signed with our key."""
        has = (
            "its only record is not"
            if num_records == 1
            else f"none of its {num_records} records is"
        )
        return FormatError(
            f"run '{self.keys.run}' in {self.store.url}: {has} signed with this key; give the "
            "key that its publisher signs with, or none if it does not sign",
            NUMBER_MAC,
        )

    def create(self, record: LogRecord) -> None:
        """Puts a record in its place; ConflictError if the place is taken."""
        key, blob = self.keys.record(record.seq), encode(record)
        if not self._is_single_writer:
            self.store.create(key, blob)
            return
        try:
            self.store.size(key)
        except NotFoundError:
            self.store.put(key, blob)
            return
        raise ConflictError(f"create '{key}' in {self.store.url}: it exists already")

    def places(self) -> list[int]:
        """Places of the log that are taken, ascending; without strays, which no run gets to."""
        taken = [0]
        for key in self.store.list(self.keys.log_prefix):
            seq = number_of(key, self.keys.log_prefix)
            if seq is not None and (seq <= taken[-1] + MAX_GAP or self._is_sound(seq)):
                taken.append(seq)
        return taken[1:]

    def floor(self, known: int = 0) -> int:
        """The place before which retention may have deleted records; 1 if it never ran.

        The log is known to reach place `known`. A mark beyond its end is not of retention, which
        marks a record that stays: it does not count.
        """
        prefix = self.keys.floors_prefix
        marks = [seq for key in self.store.list(prefix) if (seq := number_of(key, prefix))]
        marks.sort(reverse=True)
        return next((seq for seq in marks if seq <= known or self.reaches(seq, known)), 1)

    def reaches(self, seq: int, known: int = 0) -> bool:
        """True if that place, or a later one, is taken; the log is known to reach place `known`."""
        try:
            self.store.size(self.keys.record(seq))
        except NotFoundError:
            return seq <= known + MAX_GAP and any(place >= seq for place in self.places())
        return True

    def hinted(self) -> int:
        """The place that the hint names, which may be old or wrong; 0 if there is none."""
        key = self.keys.hint
        try:
            blob = read_whole(self.store, key, MAX_SMALL_RECORD_BYTES)
            hint = parse_hint(blob, f"'{key}' in {self.store.url}")
        except NotFoundError:
            return 0
        except (FormatError, StoreError) as error:
            _log.info("run '%s' is followed without its hint: %s", self.keys.run, error)
            return 0
        return hint.seq if hint.run == self.keys.run else 0

    def load(
        self,
        is_enough: Callable[[StateRecord], bool] | None = None,
        starts: Mapping[int, Tip] | None = None,
    ) -> list[Entry]:
        """The chain from the newest full state for which `is_enough` (None: any) to the end.

        `starts` are places whose full state is known otherwise, and what has to hold there.
        Without such a state it begins with the oldest full state, or the first record. Records
        that are not visible yet, or damaged, end the chain before them. Empty for an empty log.
        Raises ChainError if a record does not follow the one before it.
        """
        floor = self.floor()
        self.damage = ""
        starts = starts or {}
        newest_first: list[Found] = []
        places = [seq for seq in reversed(self.places()) if seq >= floor]
        for seq, read in self.reads(places):
            found = self._if_sound(seq, read)
            follows = not newest_first or newest_first[-1][0].seq == seq + 1
            if found is None or not follows:
                if any(_is_start(each, starts) for each in newest_first):
                    break
                if found is not None:
                    self._note_gap(seq + 1)
                newest_first.clear()
            if found is not None:
                newest_first.append(found)
                if _is_start(found, starts) and (is_enough is None or is_enough(_state(found[0]))):
                    break
        return self._chained(newest_first, starts)

    def reads(self, places: Iterable[int]) -> Iterator[tuple[int, Pending[Found]]]:
        """Reads of records at these places, in order; where the store is far, more and more ahead.

        Nothing is read ahead of the first one that is found.
        """
        waiting: deque[tuple[int, Pending[Found]]] = deque()
        rest, num_ahead = iter(places), 1
        while True:
            wanted = islice(rest, num_ahead - len(waiting))
            waiting.extend((seq, self.requests.start(partial(self.read, seq))) for seq in wanted)
            if not waiting:
                return
            yield waiting.popleft()
            num_ahead = min(2 * num_ahead, MAX_REQUESTS)

    def salvaged_tip(self) -> Tip:
        """A tip after everything that is there, damaged or not; its root is unknown.

        For a publisher that goes on after damage: its next version has to be an anchor.
        """
        tip = Tip(root="")
        for seq in self.places():
            epoch, version, digest = tip.epoch, tip.version, ""
            try:
                record, digest = self.read_agreed(seq)
            except NotFoundError:
                continue
            except FormatError as error:
                # It may have been of either sort: neither number is used again.
                self.raise_if_foreign(error)
                epoch, version = epoch + 1, None if version is None else version + 1
            else:
                epoch = record.epoch
                if isinstance(record, StateRecord):
                    version = record.version
            tip = Tip(seq, digest, epoch, version, "")
        if tip.seq and not tip.record:
            tip = replace(tip, record=digest_at(self.store, self.keys.record(tip.seq)))
        return tip

    def raise_if_foreign(self, error: FormatError) -> None:
        """Raises the error if it is of a signature: damage is worked around, forgery is not."""
        if error.number == NUMBER_MAC:
            raise error

    def _is_sound(self, seq: int) -> bool:
        try:
            self.read(seq)
        except (NotFoundError, FormatError) as error:
            _log.warning("place %d of run '%s' is ignored: %s", seq, self.keys.run, error)
            return False
        return True

    def _note_gap(self, seq: int) -> None:
        what = f"record {seq} of run '{self.keys.run}' is missing, but there are later ones"
        self.damage = self.damage or what

    def _settled(self, seq: int, read: Pending[Found]) -> Found:
        try:
            return read.result()
        except FormatError:
            return self.read_agreed(seq)

    def _if_sound(self, seq: int, read: Pending[Found]) -> Found | None:
        try:
            record, digest = self._settled(seq, read)
        except NotFoundError:
            return None
        except FormatError as error:
            self.raise_if_foreign(error)
            _log.warning("record %d of run '%s' is damaged: %s", seq, self.keys.run, error)
            self.damage = self.damage or str(error)
            return None
        return record, digest

    def _chained(self, newest_first: list[Found], starts: Mapping[int, Tip]) -> list[Entry]:
        while newest_first:
            if newest_first[-1][0].seq == 1 or _is_start(newest_first[-1], starts):
                break
            newest_first.pop()
        entries: list[Entry] = []
        for record, digest in reversed(newest_first):
            if entries or record.seq == 1:
                tip = entries[-1].tip if entries else Tip()
                entries.append(follow(tip, record, digest, self.keys.run))
            else:
                entries.append(enter(record, digest, self.keys.run, is_start=True))
        return entries


def _is_start(found: Found, starts: Mapping[int, Tip]) -> bool:
    """True if a full state leads to the place of this record."""
    record, digest = found
    if is_full(record) or not isinstance(record, StateRecord):
        return is_full(record)
    tip = Tip(record.seq, digest, record.epoch, record.version, record.root)
    return starts.get(record.seq) == tip


def _state(record: LogRecord) -> StateRecord:
    if not isinstance(record, StateRecord):
        raise StoreError(f"record {record.seq} holds no state")
    return record
