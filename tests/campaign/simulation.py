"""Many processes in one: threads of which exactly one runs, handed on in virtual time.

Each call of a store and each sleep is a place where another one may go on, so every interleaving
at calls of the store can happen, and one number decides which one does. A process may have several
threads (tests/campaign/overlap.py); they take turns like all others.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

_STUCK_S = 60.0  # of real time: nothing in here takes that long
_here = threading.local()


class KilledError(BaseException):
    """Raised inside a process that was killed, at each of its calls from then on."""


class Strand:
    """A thread of some process, used again for another one when it is done.

    `ticket` is the number of its turn: what was planned for an earlier turn is void.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.go = threading.Semaphore(0)
        self.process: Process | None = None
        self.work: Callable[[], object] | None = None
        self.ticket = 0
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        _here.strand = self
        while True:
            self.go.acquire()
            if self.work is None:
                return
            self._simulation.finished(self, _outcome(self.work))


def _outcome(work: Callable[[], object]) -> BaseException | None:
    """What a strand ended with; None if it ended well, or was killed."""
    try:
        work()
    except KilledError:
        return None
    except BaseException as error:  # noqa: BLE001 - `Simulation.run` raises it
        return error
    return None


class Process:
    """One process: its clock, `wall_offset_s` wrong, and whether it is alive."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.wall_offset_s = 0.0
        self.cut_until_s = 0.0
        self.stopped_until_s = 0.0
        self.is_dead = False
        self.is_done = False
        self.num_ahead = 0
        self.strands: list[Strand] = []

    def wall_us(self) -> int:
        return int((self.simulation.now_s + self.wall_offset_s + 1.7e9) * 1e6)

    def monotonic_s(self) -> float:
        return self.simulation.now_s

    def sleep(self, seconds: float) -> None:
        self.simulation.pause(self, max(seconds, 1e-6))

    def kill(self) -> None:
        """No call of it has an effect any more; all its strands end."""
        self.is_dead = True
        for strand in self.strands:
            self.simulation.wake(strand)

    @property
    def is_running(self) -> bool:
        """True in its own threads."""
        strand = current()
        return strand is not None and strand.process is self


Work = Callable[[Process], None]


def current() -> Strand | None:
    """The strand that asks; None outside of the simulation."""
    return getattr(_here, "strand", None)


class Simulation:
    """Virtual time, the processes and what is to happen when."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1000.0
        self.end_s = 0.0
        self.processes: list[Process] = []
        self._events: list[tuple[float, int, Strand | Callable[[], None], int]] = []
        self._numbers = count()
        self._back = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._idle: list[Strand] = []
        self._running: Strand | None = None

    def start(self, name: str, work: Work) -> Process:
        """A process that begins now."""
        process = Process(self, name)
        self.processes.append(process)

        def body() -> None:
            try:
                work(process)
            finally:
                process.is_done = True

        self.spawn(process, body, 0.0)
        return process

    def spawn(self, process: Process, work: Callable[[], object], after_s: float) -> None:
        """One more thread of a process, that begins later."""

        def body() -> None:
            if not process.is_dead:
                work()

        strand = self._idle.pop() if self._idle else Strand(self)
        strand.process, strand.work = process, body
        process.strands.append(strand)
        self._push(self.now_s + after_s, strand)

    def finished(self, strand: Strand, error: BaseException | None) -> None:
        """The strand has nothing more to do."""
        assert strand.process is not None
        strand.process.strands.remove(strand)
        strand.process, strand.work = None, None
        strand.ticket += 1
        self._idle.append(strand)
        self.fail(error)
        self._back.release()

    def fail(self, error: BaseException | None) -> None:
        """`run` raises that, if it is the first."""
        self._failure = self._failure or error

    def at(self, after_s: float, action: Callable[[], None]) -> None:
        """Does that later, whoever runs then."""
        heapq.heappush(self._events, (self.now_s + after_s, next(self._numbers), action, 0))

    def run(self, duration_s: float) -> None:
        """Everything that happens in that time; raises what a process raised."""
        self.end_s = self.now_s + duration_s
        while self._failure is None and self._events and self._events[0][0] <= self.end_s:
            self.now_s, _, what, ticket = heapq.heappop(self._events)
            if not isinstance(what, Strand):
                what()
            elif what.ticket == ticket and what.process is not None:
                until_s = 0.0 if what.process.is_dead else what.process.stopped_until_s
                if until_s > self.now_s:
                    self._push(until_s, what)
                else:
                    self._resume(what)
        if self._failure is not None:
            raise self._failure
        self.now_s = self.end_s

    def close(self) -> None:
        """Ends all processes where they are."""
        self._events.clear()
        for process in self.processes:
            process.is_dead = True
            while process.strands:
                self._resume(process.strands[-1])
        self._events.clear()
        for strand in self._idle:
            strand.go.release()
            strand.thread.join(_STUCK_S)
        self._idle.clear()

    def pause(self, process: Process, seconds: float) -> None:
        """Returns to this thread of the process after that time; KilledError if it died."""
        if process.is_dead:
            raise KilledError
        at_s = max(self.now_s + seconds, process.stopped_until_s)
        is_next = not self._events or at_s < self._events[0][0]
        if is_next and at_s <= self.end_s and self._failure is None:
            self.now_s = at_s
            return
        strand = self._mine(process)
        self._push(at_s, strand)
        self._leave(strand)

    def wait(self, process: Process, future: Future[Any], timeout_s: float | None = None) -> None:
        """Returns once the future is done, or that time has passed; KilledError if it died."""
        if process.is_dead:
            raise KilledError
        if future.done():
            return
        strand = self._mine(process)
        ticket = strand.ticket
        future.add_done_callback(lambda _: self._push(self.now_s, strand, ticket))
        if timeout_s is not None:
            self._push(self.now_s + timeout_s, strand)
        self._leave(strand)

    def wake(self, strand: Strand) -> None:
        """It goes on now, whatever it waits for; not the one that runs."""
        if strand is not self._running:
            self._push(self.now_s, strand)

    def _mine(self, process: Process) -> Strand:
        strand = current()
        assert strand is not None
        assert strand.process is process, f"a thread of somebody else waits for '{process.name}'"
        return strand

    def _leave(self, strand: Strand) -> None:
        assert strand.process is not None
        self._back.release()
        strand.go.acquire()
        if strand.process.is_dead:
            raise KilledError

    def _push(self, at_s: float, strand: Strand, ticket: int | None = None) -> None:
        number = strand.ticket if ticket is None else ticket
        heapq.heappush(self._events, (at_s, next(self._numbers), strand, number))

    def _resume(self, strand: Strand) -> None:
        strand.ticket += 1
        self._running = strand
        strand.go.release()
        if not self._back.acquire(timeout=_STUCK_S):
            name = strand.process.name if strand.process else "somebody"
            raise AssertionError(f"'{name}' waits for something outside the simulation")
        self._running = None
