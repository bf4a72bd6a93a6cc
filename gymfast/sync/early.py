"""Reads of objects that no record names yet (docs/sync-protocol.md section 16)."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from gymfast.errors import NotFoundError
from gymfast.stores.base import Store
from gymfast.sync.bandwidth import get_known
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import ObjectRef
from gymfast.sync.requests import Requests

MAX_EARLY_BYTES = 256 << 20
MAX_EARLY = 64
"""Reads under way or held: a record says the rest."""
NUM_LOOKS = 5
"""For an object that was noted and is not there yet."""


@dataclass(eq=False)
class _Read:
    num_bytes: int
    future: Future[bytes] | None = None
    is_cancelled: bool = False


class EarlyReads:
    """What was begun and not taken; one that fails is forgotten. Safe to use from several threads.

    A forked process has none of its parent's.
    """

    def __init__(self, store: Store, keys: RunKeys, requests: Requests) -> None:
        self._store, self._keys, self._requests = store, keys, requests
        self._begin_anew()

    @property
    def num_bytes(self) -> int:
        """Bytes of all reads."""
        with self._owned():
            return sum(read.num_bytes for read in self._reads.values())

    def begin(self, epoch: int, refs: Iterable[ObjectRef], room: int, piece_bytes: int) -> None:
        """Begins what fits one request and, with all that was begun before, the room."""
        with self._owned():
            threads = None if self._is_closed else self._requests.threads
            if threads is None:
                return
            for ref in refs:
                key = self._keys.object(epoch, ref.digest)
                held = sum(read.num_bytes for read in self._reads.values())
                is_too_much = held + ref.num_bytes > room or len(self._reads) >= MAX_EARLY
                if ref.num_bytes > piece_bytes or is_too_much:
                    return
                if key not in self._reads:
                    read = self._reads[key] = _Read(ref.num_bytes)
                    read.future = threads.submit(self._read_or_forget, key, read)

    def take(self, key: str) -> Future[bytes] | None:
        """The read of that object, for which the caller answers from here on; None without one."""
        with self._owned():
            read = self._reads.pop(key, None)
        return None if read is None else read.future

    def keep(self, keys: Collection[str]) -> None:
        """Forgets all but these: a record has come that names no others."""
        with self._owned():
            for key in self._reads.keys() - set(keys):
                read = self._reads.pop(key)
                read.is_cancelled = True
                if read.future is not None:
                    read.future.cancel()

    def close(self) -> None:
        """Forgets all, and begins no more."""
        with self._owned():
            self._is_closed = True
        self.keep(())

    def _read_or_forget(self, key: str, read: _Read) -> bytes:
        try:
            return self._read(key, read)
        except BaseException:
            with self._owned():
                if self._reads.get(key) is read:
                    del self._reads[key]
            raise

    def _read(self, key: str, read: _Read) -> bytes:
        for is_last in (*(False,) * (NUM_LOOKS - 1), True):
            with self._requests.flow.turn(read.num_bytes):
                if read.is_cancelled:
                    break
                try:
                    return get_known(self._store, key, read.num_bytes)
                except NotFoundError:
                    if is_last:
                        raise
        raise NotFoundError(f"'{key}' is not wanted any more")

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reads: dict[str, _Read] = {}
        self._is_closed = False

    def _owned(self) -> threading.Lock:
        """The lock; in a forked process a new one, as nobody is left to give the old one back."""
        if self._pid != os.getpid():
            self._begin_anew()
        return self._lock
