"""The lease of a reader: what it still needs, so that retention leaves that alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from gymfast.errors import FormatError, NotFoundError, StoreError
from gymfast.stores.base import Store
from gymfast.sync.clock import Clock
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import (
    FORMAT,
    MAX_SMALL_RECORD_BYTES,
    NUMBER_VALUE,
    RUN_PATTERN,
    LeaseRecord,
    encode,
    parse_lease,
)
from gymfast.sync.objects import read_whole, settled
from gymfast.sync.requests import Pending, Requests

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def read_leases(store: Store, keys: RunKeys) -> Iterator[tuple[str, LeaseRecord | FormatError]]:
    """Key and lease of each reader; the error for one that is damaged or of another run.

    Raises StoreError.
    """
    for key in store.list(keys.readers_prefix):
        where = f"'{key}' in {store.url}"
        try:
            lease = settled(partial(_blob, store, key), partial(parse_lease, where=where))
        except NotFoundError:
            continue
        except FormatError as error:
            yield key, error
            continue
        is_ours = lease.run == keys.run
        what = f"{where}: the lease belongs to run '{lease.run}'"
        yield key, lease if is_ours else FormatError(what, NUMBER_VALUE)


def _blob(store: Store, key: str) -> bytes:
    return read_whole(store, key, MAX_SMALL_RECORD_BYTES)


class Lease:
    """One lease object in the store, renewed while it is used.

    A store that is far away is written to in the background, one request after the other.
    """

    def __init__(
        self, store: Store, keys: RunKeys, reader_id: str, clock: Clock, duration_s: float
    ) -> None:
        """No lease yet. Raises ValueError for an id that is no name."""
        if not re.match(RUN_PATTERN, reader_id):
            raise ValueError(
                f"reader {reader_id!a}: expected 1 to 128 of [A-Za-z0-9._-], not starting with a "
                "dot: nobody would heed its lease"
            )
        self._store = store
        self._keys = keys
        self._clock = clock
        self._duration_s = duration_s
        self._key = keys.reader(reader_id)
        self._reader_id = reader_id
        self._seq = 0
        self._renew_at_s = 0.0
        self._requests = Requests(store, in_order=True)

    @property
    def seq(self) -> int:
        """The oldest record that is asked for; 0 without a lease."""
        return self._seq

    def take(self, seq: int, look: Callable[[], _T]) -> Pending[_T]:
        """What a look at the floor finds that begins once the lease is there.

        If the floor is not beyond record `seq` then, nothing from there on is deleted.
        A reader that may not write reads without a lease, which is logged.
        """
        self._seq = seq
        self._put()
        return self._requests.start(look)

    def renew(self) -> None:
        """Keeps the lease alive; cheap to call often."""
        if self._seq and self._clock.monotonic_s() >= self._renew_at_s:
            self._put()

    def release(self) -> None:
        """Gives the lease back."""
        if self._seq:
            self._seq = 0
            self._write(self._delete)

    def close(self) -> None:
        """Gives the lease back, and waits until that is done."""
        self.release()
        self._requests.close(is_finished=True)

    def _write(self, work: Callable[[], None]) -> None:
        """Begins to write; where the store is near, does."""
        written = self._requests.start(work)
        if not self._requests.is_far:
            written.result()

    def _delete(self) -> None:
        try:
            self._store.delete(self._key)
        except StoreError as error:
            _log.warning("the lease of '%s' stays until it is over: %s", self._reader_id, error)

    def _put(self) -> None:
        duration_us = int(self._duration_s * 1e6)
        expires_us = max(0, self._clock.wall_us() + duration_us)
        lease = LeaseRecord(FORMAT, self._keys.run, self._reader_id, self._seq, expires_us)
        self._renew_at_s = self._clock.monotonic_s() + self._duration_s / 3

        def put() -> None:
            try:
                self._store.put(self._key, encode(lease))
            except StoreError as error:
                _log.warning("'%s' reads without a lease: %s", self._reader_id, error)

        self._write(put)
