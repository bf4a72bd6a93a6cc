"""Threads of a simulated process: requests that overlap, in an order that one number decides.

The product starts requests on a `ThreadPoolExecutor` where its store is far. Within a history that
name means `pool`, so its threads are strands of the process that asked: each begins a little later
than it was asked for, and every call of the store is a place where another one may go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from gymfast.errors import GymfastError
from tests.campaign.simulation import KilledError, Process, current

_BEGIN_S = 0.001  # mean time until a thread that was asked for runs
_POOLED = ("requests", "objects", "folds")


class SimulatedFuture(Future[Any]):
    """An answer that a simulated thread waits for in virtual time."""

    def result(self, timeout: float | None = None) -> Any:
        _wait(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        _wait(self, timeout)
        return super().exception(0)


def _wait(future: Future[Any], timeout_s: float | None) -> None:
    strand = current()
    if strand is not None and strand.process is not None:
        strand.process.simulation.wait(strand.process, future, timeout_s)


def wait(futures: Iterable[Future[Any]], timeout: float | None = None) -> None:
    """Returns when the one future is done, or that time has passed."""
    (future,) = futures
    _wait(future, timeout)


class SimulatedExecutor(Executor):
    """At most so many strands of a process at once, which take what was asked for in order."""

    def __init__(self, process: Process, max_workers: int) -> None:
        self._process = process
        self._max_workers = max_workers
        self._waiting: deque[tuple[SimulatedFuture, Callable[[], object]]] = deque()
        self._running: list[SimulatedFuture] = []
        self._num_strands = 0
        self._is_shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SimulatedFuture:
        if self._process.is_dead:
            raise KilledError
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = SimulatedFuture()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        if self._num_strands < self._max_workers:
            self._num_strands += 1
            simulation = self._process.simulation
            after_s = simulation.rng.expovariate(1 / _BEGIN_S)
            simulation.spawn(self._process, self._serve, after_s)
        return future

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        futures = [self.submit(fn, *arguments) for arguments in zip(*iterables, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut = True
        if cancel_futures:
            while self._waiting:
                self._waiting.popleft()[0].cancel()
        while wait and (self._running or self._waiting):
            _wait(self._running[0] if self._running else self._waiting[0][0], None)

    def _serve(self) -> None:
        """What a strand does: one piece of work after the other, until there is none."""
        try:
            while self._waiting:
                future, work = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    self._do(future, work)
        finally:
            self._num_strands -= 1

    def _do(self, future: SimulatedFuture, work: Callable[[], object]) -> None:
        self._running.append(future)
        try:
            result = work()
        except BaseException as error:
            self._running.remove(future)
            future.set_exception(error)
            if isinstance(error, KilledError):
                raise
            if not isinstance(error, GymfastError):
                self._process.simulation.fail(error)
        else:
            self._running.remove(future)
            future.set_result(result)


def pool(max_workers: int, name: str = "") -> Executor:
    """Strands of the process that asks; real threads for whoever is outside of the simulation."""
    strand = current()
    if strand is None or strand.process is None:
        return ThreadPoolExecutor(max_workers, name)
    return SimulatedExecutor(strand.process, max_workers)


@contextmanager
def overlapping() -> Iterator[None]:
    """The product with simulated threads, wherever it asks a store that is far."""
    with ExitStack() as stack:
        for module in _POOLED:
            patch = mock.patch(f"gymfast.sync.{module}.ThreadPoolExecutor", pool)
            stack.enter_context(patch)
        stack.enter_context(mock.patch("gymfast.sync.watching.Future", SimulatedFuture))
        stack.enter_context(mock.patch("gymfast.sync.watching.wait", wait))
        yield
