"""What a reader tells of itself, for `gymfast sync status`: an object in the store, rewritten.

It is advice for people. Nothing of the protocol depends on it, no install waits for it or fails
with it, and it is not signed. Source: docs/sync-protocol.md sections 3.3 and 9.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from msgspec import structs

from gymfast.errors import FormatError, GymfastError, NotFoundError
from gymfast.stores.base import Store
from gymfast.sync.clock import Clock, SystemClock
from gymfast.sync.install_report import SubscriberStatus
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import (
    FORMAT,
    MAX_STATUS_BYTES,
    NUMBER_VALUE,
    RUN_PATTERN,
    StatusRecord,
    encode,
    parse_status,
)
from gymfast.sync.objects import read_whole

PERIOD_S = 30.0
"""How often a reader that lives writes its status anew."""
MAX_READERS = 10_000
"""So many are read at most; a fleet is smaller, a folder that somebody filled is not."""
_NUM_THREADS = 16
_LAST_WORD_S = 5.0
_MAX_ERROR_CHARS = 256
_SECRET = re.compile(
    r"(?i)(://)[^/@\s]+@|((?:key|token|secret|password|signature|credential|authorization)"
    r"[\w-]*\s*[=:]\s*)(?:bearer\s+)?[^\s,;&]+"
)
_log = logging.getLogger(__name__)


def reader_name() -> str:
    """A name for a reader of this process that nobody else has, with that of its host.

    The variable GYMFAST_READER goes before the name of the host.
    """
    host = os.environ.get("GYMFAST_READER") or socket.gethostname()
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", host).lstrip(".")[:100]
    return f"{plain or 'reader'}-{secrets.token_hex(4)}"


def period_s() -> float | None:
    """How often readers of this process write their status; None for never.

    The variable GYMFAST_REPORT_S goes before 30 s. Raises ValueError if it is no number of seconds.
    """
    text = os.environ.get("GYMFAST_REPORT_S")
    try:
        value = float(text) if text else PERIOD_S
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"GYMFAST_REPORT_S is {text!r}, expected seconds, or 0 for never")
    return value or None


def is_reader(name: str) -> bool:
    """True if a reader may have that name."""
    return re.match(RUN_PATTERN, name) is not None


def printable(text: str) -> str:
    """The text of an error as a status may hold it: short, ASCII, without what looks secret."""
    hidden = _SECRET.sub(lambda m: f"{m[1] or m[2]}***{'@' if m[1] else ''}", text)
    plain = "".join(char if " " <= char <= "~" else "?" for char in " ".join(hidden.split()))
    return plain if len(plain) <= _MAX_ERROR_CHARS else f"{plain[: _MAX_ERROR_CHARS - 3]}..."


def read_statuses(
    store: Store, keys: RunKeys, max_readers: int = MAX_READERS
) -> Iterator[tuple[str, StatusRecord | FormatError]]:
    """Key and status of each reader, in order of the keys; the error for one that is damaged.

    What is no name of a reader is left out, and so are readers beyond `max_readers`.
    Raises StoreError.
    """
    prefix = keys.status_prefix
    found = []
    for key in store.list(prefix):
        if is_reader(key.removeprefix(prefix)):
            found.append(key)
        if len(found) == max_readers:
            break

    def read(key: str) -> tuple[str, StatusRecord | FormatError] | None:
        try:
            return key, _parse(read_whole(store, key, MAX_STATUS_BYTES), key, store, keys)
        except NotFoundError:  # its reader has just ended
            return None
        except FormatError as error:
            return key, error

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        yield from (each for each in pool.map(read, found) if each is not None)


def _parse(blob: bytes, key: str, store: Store, keys: RunKeys) -> StatusRecord:
    where = f"'{key}' in {store.url}"
    status = parse_status(blob, where)
    if (status.run, keys.status(status.reader)) != (keys.run, key):
        what = f"{where}: the status is that of reader '{status.reader}' of run '{status.run}'"
        raise FormatError(what, NUMBER_VALUE)
    return status


class StatusReporter:
    """Writes the status of one reader from a thread of its own: who tells never waits.

    What was told last is written, again every `period_s`. A store that fails is logged once, and
    tried again. Safe to call from any thread.
    """

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        reader: str,
        *,
        period_s: float = PERIOD_S,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is written yet. Raises ValueError for a name that is none, or no period."""
        if not is_reader(reader):
            raise ValueError(
                f"reader {reader!a}: expected 1 to 128 of [A-Za-z0-9._-], no dot first"
            )
        if not period_s > 0:
            raise ValueError(f"period_s is {period_s}, expected more than 0")
        self._store = store
        self._key = keys.status(reader)
        self._run, self._reader = keys.run, reader
        self._period_s = period_s
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._record: StatusRecord | None = None
        self._is_new = self._is_closed = self._is_failing = False
        self._thread: threading.Thread | None = None

    def tell(self, status: SubscriberStatus, root: str | None) -> None:
        """From here on this is what the reader is like; returns at once.

        It is written at once if it says more than that there is a newer version.
        """
        with self._changed:
            before, told = self._record, self._record_of(status, root)
            if before is not None and before.version == told.version:
                told = structs.replace(told, installed_us=before.installed_us)
            self._record = told
            self._is_new |= before is None or told != structs.replace(
                before, newest=told.newest, updated_us=told.updated_us
            )
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._write_all, name="gymfast-status", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Takes the status away; waits a few seconds for the store at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_LAST_WORD_S)

    def _record_of(self, status: SubscriberStatus, root: str | None) -> StatusRecord:
        now_us = max(0, self._clock.wall_us())
        return StatusRecord(
            FORMAT,
            self._run,
            self._reader,
            state=status.state.value,
            version=-1 if status.version is None else status.version,
            root=(root or "")[:16],
            newest=-1 if status.newest is None else status.newest,
            installed_us=now_us,
            updated_us=now_us,
            period_us=max(1, int(self._period_s * 1e6)),
            is_stale=status.is_stale,
            error=printable(status.last_error),
        )

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_new or self._is_closed, self._period_s)
                if self._is_closed:
                    break
                record, self._is_new = self._record, False
            if record is not None:
                self._write(structs.replace(record, updated_us=max(0, self._clock.wall_us())))
        with suppress(GymfastError):  # the next `gymfast sync gc` takes it
            self._store.delete(self._key)

    def _write(self, record: StatusRecord) -> None:
        try:
            self._store.put(self._key, encode(record))
            self._is_failing = False
        except GymfastError as error:
            if not self._is_failing:
                _log.warning("the status of '%s' is not told: %s", self._reader, error)
            self._is_failing = True
