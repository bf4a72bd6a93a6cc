"""Reads and extends the log of a run in a store."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gymfast.errors import ConflictError, FormatError, NotFoundError, StoreError
from gymfast.stores.base import Store
from gymfast.sync.chain import Entry, Tip, enter, follow, is_full, require_place
from gymfast.sync.keys import RunKeys, number_of
from gymfast.sync.manifest import (
    MAX_RECORD_BYTES,
    NUMBER_MAC,
    LogRecord,
    StateRecord,
    digest_of,
    encode,
    parse_log_record,
)

_log = logging.getLogger(__name__)
Found = tuple[LogRecord, str]


class Log:
    """The records of one run; `key` checks their signatures.

    `is_single_writer` allows a store without create-only writes: a look, then a put.
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
        self._is_single_writer = is_single_writer

    def read(self, seq: int) -> Found:
        """A record and the digest of its bytes.

        Raises NotFoundError if it is absent, FormatError if it is damaged.
        """
        key = self.keys.record(seq)
        blob = self.store.get(key, max_bytes=MAX_RECORD_BYTES)
        record = parse_log_record(blob, f"'{key}' in {self.store.url}", self.key)
        return record, digest_of(blob)

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
        """Places of the log that are taken, ascending."""
        keys = self.store.list(self.keys.log_prefix)
        return [seq for key in keys if (seq := number_of(key)) is not None]

    def floor(self) -> int:
        """The place before which retention may have deleted records; 1 if it never ran."""
        keys = self.store.list(self.keys.floors_prefix)
        return max((number_of(key) or 1 for key in keys), default=1)

    def load(self, is_enough: Callable[[StateRecord], bool] | None = None) -> list[Entry]:
        """The chain from the newest full state for which `is_enough` (None: any) to the end.

        Without such a state it begins with the oldest full state, or the first record. Records
        that are not visible yet, or damaged, end the chain before them. Empty for an empty log.
        Raises ChainError if a record does not follow the one before it.
        """
        floor = self.floor()
        newest_first: list[Found] = []
        for seq in reversed([seq for seq in self.places() if seq >= floor]):
            found = self._read_if_sound(seq)
            follows = not newest_first or newest_first[-1][0].seq == seq + 1
            if found is None or not follows:
                if any(is_full(record) for record, _ in newest_first):
                    break
                newest_first.clear()
            if found is not None:
                newest_first.append(found)
                if is_full(found[0]) and (is_enough is None or is_enough(_state(found[0]))):
                    break
        return self._chained(newest_first)

    def salvaged_tip(self) -> Tip:
        """A tip after everything that is there, damaged or not; its root is unknown.

        For a publisher that goes on after damage: its next version has to be an anchor.
        """
        tip = Tip(root="")
        for seq in self.places():
            blob = self.store.get(self.keys.record(seq), max_bytes=MAX_RECORD_BYTES)
            epoch, version = tip.epoch, tip.version
            try:
                record = parse_log_record(blob, self.keys.record(seq), self.key)
            except (
                FormatError
            ) as error:  # it may have been of either sort: neither number is used again
                self.raise_if_foreign(error)
                epoch, version = epoch + 1, None if version is None else version + 1
            else:
                epoch = max(epoch, record.epoch)
                if isinstance(record, StateRecord):
                    version = max(version or 0, record.version)
            tip = Tip(seq, digest_of(blob), epoch, version, "")
        return tip

    def raise_if_foreign(self, error: FormatError) -> None:
        """Raises the error if it is of a signature: damage is worked around, forgery is not."""
        if error.number == NUMBER_MAC:
            raise error

    def _read_if_sound(self, seq: int) -> Found | None:
        try:
            record, digest = self.read(seq)
        except NotFoundError:
            return None
        except FormatError as error:
            self.raise_if_foreign(error)
            _log.warning("record %d of run '%s' is damaged: %s", seq, self.keys.run, error)
            return None
        require_place(record, seq, self.keys.run)
        return record, digest

    def _chained(self, newest_first: list[Found]) -> list[Entry]:
        while newest_first:
            record = newest_first[-1][0]
            if record.seq == 1 or is_full(record):
                break
            newest_first.pop()
        entries: list[Entry] = []
        for record, digest in reversed(newest_first):
            if entries or record.seq == 1:
                tip = entries[-1].tip if entries else Tip()
                entries.append(follow(tip, record, digest, self.keys.run))
            else:
                entries.append(enter(record, digest, self.keys.run))
        return entries


def _state(record: LogRecord) -> StateRecord:
    if not isinstance(record, StateRecord):
        raise StoreError(f"record {record.seq} holds no state")
    return record
