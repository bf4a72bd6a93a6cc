"""The lease of a reader: what it still needs, so that retention leaves that alone."""

from __future__ import annotations

import logging

from gymfast.errors import StoreError
from gymfast.stores.base import Store
from gymfast.sync.clock import Clock
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import FORMAT, LeaseRecord, encode

_log = logging.getLogger(__name__)


class Lease:
    """One lease object in the store, renewed while it is used."""

    def __init__(
        self, store: Store, keys: RunKeys, reader_id: str, clock: Clock, duration_s: float
    ) -> None:
        """No lease yet. Raises ValueError for an id that is no name."""
        self._store = store
        self._keys = keys
        self._clock = clock
        self._duration_s = duration_s
        self._key = keys.reader(reader_id)
        self._reader_id = reader_id
        self._seq = 0
        self._renew_at_s = 0.0

    def take(self, seq: int) -> None:
        """From here on nothing from record `seq` on is deleted; look at the floor after this.

        A reader that may not write reads without a lease, which is logged.
        """
        self._seq = seq
        self._put()

    def renew(self) -> None:
        """Keeps the lease alive; cheap to call often."""
        if self._seq and self._clock.monotonic_s() >= self._renew_at_s:
            self._put()

    def release(self) -> None:
        """Gives the lease back."""
        if self._seq:
            self._seq = 0
            try:
                self._store.delete(self._key)
            except StoreError as error:
                _log.warning("the lease of '%s' stays until it is over: %s", self._reader_id, error)

    def _put(self) -> None:
        duration_us = int(self._duration_s * 1e6)
        expires_us = max(0, self._clock.wall_us() + duration_us)
        lease = LeaseRecord(FORMAT, self._keys.run, self._reader_id, self._seq, expires_us)
        self._renew_at_s = self._clock.monotonic_s() + self._duration_s / 3
        try:
            self._store.put(self._key, encode(lease))
        except StoreError as error:
            _log.warning("'%s' reads without a lease: %s", self._reader_id, error)
