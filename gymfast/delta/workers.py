"""Jobs on several threads, results in order: sections of a frame are independent of each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Context = TypeVar("Context")
Result = TypeVar("Result")


class OrderedWorkers(Generic[Context, Result]):
    """Runs the jobs of (context, job) pairs ahead of their consumer, at most 2 per thread.

    Where there are few jobs, or `in_place` asks for it, each runs where its result is taken, and
    may use `job_threads` itself.
    """

    def __init__(self, threads: int, num_jobs: int, *, in_place: bool = False) -> None:
        is_wide = threads > 1 and num_jobs >= 2 * threads and not in_place
        self._pool = ThreadPoolExecutor(threads, "gymfast-delta") if is_wide else None
        self._max_jobs = 2 * threads
        self.job_threads = 1 if is_wide else threads
        self._queue: deque[tuple[Context, Future[Result] | None]] = deque()

    def run(
        self, items: Iterable[tuple[Context, Callable[[], Result] | None]]
    ) -> Iterator[tuple[Context, Result | None]]:
        """The contexts in order, each with the result of its job (None where it has none).

        Raises what the first failing job raised, once no job is running any more.
        """
        if self._pool is None:
            for context, job in items:
                yield context, job() if job else None
            return
        num_jobs = 0
        try:
            for context, job in items:
                self._queue.append((context, self._pool.submit(job) if job else None))
                num_jobs += job is not None
                while self._queue and (num_jobs >= self._max_jobs or self._queue[0][1] is None):
                    first, future = self._queue.popleft()
                    num_jobs -= future is not None
                    yield first, future.result() if future else None
            while self._queue:
                first, future = self._queue.popleft()
                yield first, future.result() if future else None
        finally:
            self.stop()

    def stop(self) -> None:
        """Waits until no job is running; those that did not start never will."""
        self._queue.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
