"""Tells readers of objects before the record that names them, so that bytes travel while more come.

Advice: what a reader fetched early is used only where the record names it, by its digest, and
nobody waits for it. Where a store is near there is none (docs/sync-protocol.md section 16).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gymfast.errors import FormatError, NotFoundError, StoreError
from gymfast.stores.base import Store
from gymfast.sync.keys import RunKeys
from gymfast.sync.log import Log
from gymfast.sync.manifest import (
    FORMAT,
    MAX_AHEAD_OBJECTS,
    MAX_SMALL_RECORD_BYTES,
    AheadRecord,
    ObjectRef,
    encode,
    parse_ahead,
)
from gymfast.sync.objects import read_whole
from gymfast.sync.requests import Requests

MAX_NOTES = 32
"""Of one record; what more there is, the record tells."""
_MAX_LOOKS = 4
_log = logging.getLogger(__name__)
Begin = Callable[[int, tuple[ObjectRef, ...]], None]


class Notes:
    """Notes of the objects of one record that is being made, one put after the other."""

    def __init__(self, store: Store, keys: RunKeys, epoch: int, seq: int) -> None:
        """Notes for record `seq`, which nobody has seen yet; none where the store is near."""
        self._store, self._keys = store, keys
        self._epoch, self._seq = epoch, seq
        self._requests = Requests(store, in_order=True)
        self._lock = threading.Lock()
        self._refs: list[ObjectRef] = []
        self._number = 0
        self._is_busy = self._is_over = False

    def add(self, ref: ObjectRef) -> None:
        """An object is being put. Returns at once; a note under way is followed by one of the rest.

        Safe to use from several threads.
        """
        if not self._requests.is_far:
            return
        with self._lock:
            self._refs.append(ref)
            if self._is_busy or self._is_over:
                return
            self._is_busy = True
        self._requests.start(self._put_all)

    def close(self) -> None:
        """Puts no more notes, and waits for none."""
        with self._lock:
            self._is_over = True
        self._requests.close()

    def _put_all(self) -> None:
        while refs := self._next():
            note = AheadRecord(FORMAT, self._keys.run, self._epoch, self._seq, refs)
            try:
                self._store.put(self._keys.ahead(self._number), encode(note))
            except StoreError as error:
                _log.info("run '%s': readers are not told ahead: %s", self._keys.run, error)
                self._number = MAX_NOTES
            self._number += 1

    def _next(self) -> tuple[ObjectRef, ...]:
        with self._lock:
            refs = tuple(self._refs[:MAX_AHEAD_OBJECTS])
            del self._refs[:MAX_AHEAD_OBJECTS]
            if self._is_over or self._number >= MAX_NOTES:
                refs = ()
            self._is_busy = bool(refs)
            return refs


class NoteReader:
    """Looks for notes of the next record; `begin` gets epoch and objects of each that is found."""

    def __init__(self, log: Log, begin: Begin) -> None:
        self._log_of_run = log
        self._begin = begin
        self._lock = threading.Lock()
        self._seq = self._number = self._num_looks = 0

    def expect(self, seq: int) -> None:
        """The next record is that one; 0: none is waited for."""
        with self._lock:
            if seq != self._seq:
                self._seq, self._number = seq, 0

    def look(self) -> None:
        """Begins a look, unless several are under way; safe to use from several threads."""
        with self._lock:
            is_over = self._seq == 0 or self._number >= MAX_NOTES
            if is_over or self._num_looks >= _MAX_LOOKS:
                return
            self._num_looks += 1
            seq, number = self._seq, self._number
        self._log_of_run.requests.start(lambda: self._look(seq, number))

    def _look(self, seq: int, number: int) -> None:
        try:
            note = self._read(number)
        finally:
            with self._lock:
                self._num_looks -= 1
        if note is None or note.seq != seq:
            return
        with self._lock:
            is_new = (seq, number) == (self._seq, self._number)
            if is_new:  # within the lock: after `expect` nothing begins that was expected before
                self._number += 1
                self._begin(note.epoch, note.objects)
        if is_new:
            self.look()

    def _read(self, number: int) -> AheadRecord | None:
        log = self._log_of_run
        key = log.keys.ahead(number)
        try:
            blob = read_whole(log.store, key, MAX_SMALL_RECORD_BYTES)
            note = parse_ahead(blob, f"'{key}' in {log.store.url}")
        except NotFoundError:
            return None
        except (FormatError, StoreError) as error:
            _log.info("run '%s' is followed without a note: %s", log.keys.run, error)
            return None
        return note if note.run == log.keys.run else None
