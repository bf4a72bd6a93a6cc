"""Several requests to a store at once, where it is far away; one after another where it is near."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from gymfast.stores.base import Store
from gymfast.sync.flow import Flow

REQUESTS_PER_AHEAD = 4
"""Small requests are worth having under way in larger numbers than pieces of 8 MiB."""
READS_PER_AHEAD = 2
"""Connections for what is large: few enough that each one's window stays open."""
MAX_REQUESTS = 16
_T = TypeVar("_T")


class Pending(Generic[_T]):
    """An answer that is on its way, or, for a store that is near, asked for when it is wanted."""

    def __init__(self, work: Callable[[], _T], future: Future[_T] | None) -> None:
        self._work = work
        self._future = future

    @property
    def is_here(self) -> bool:
        """True if the result needs no wait; never for a store that is near."""
        return self._future is not None and self._future.done()

    def result(self) -> _T:
        """The answer; raises what the request raised."""
        return self._work() if self._future is None else self._future.result()


class Requests:
    """Starts requests on threads of its own. Safe to use from several threads."""

    def __init__(
        self,
        store: Store,
        *,
        per_ahead: int = REQUESTS_PER_AHEAD,
        in_order: bool = False,
    ) -> None:
        """Nothing is started yet; `in_order` has one request under way at a time.

        `flow` says when a large one may begin.
        """
        self.is_far = store.num_ahead > 0
        num_threads = min(per_ahead * store.num_ahead, MAX_REQUESTS)
        self._num_threads = 1 if in_order else num_threads
        self.flow = Flow()
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def threads(self) -> ThreadPoolExecutor | None:
        """The threads; None for a store that is near. A forked process has none of those before."""
        if self._pid != os.getpid():
            self._threads, self._lock, self._pid = None, threading.Lock(), os.getpid()
        with self._lock:
            if self._threads is None and self.is_far:
                self._threads = ThreadPoolExecutor(self._num_threads, "gymfast-ask")
            return self._threads

    def start(self, work: Callable[[], _T]) -> Pending[_T]:
        """The answer to come; what nobody waits for may be started or not."""
        threads = self.threads
        return Pending(work, None if threads is None else threads.submit(work))

    def close(self, *, is_finished: bool = False) -> None:
        """Gives the threads back; `is_finished` waits for all that was started."""
        if self._threads is not None:
            self._threads.shutdown(wait=is_finished, cancel_futures=not is_finished)
            self._threads = None
