"""Many processes in one: threads of which exactly one runs, handed on in virtual time.

Each call of a store and each sleep is a place where another one may go on, so every interleaving
at calls of the store can happen, and one number decides which one does.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from itertools import count

_STUCK_S = 60.0  # of real time: nothing in here takes that long


class KilledError(BaseException):
    """Raised inside a process that was killed, at each of its calls from then on."""


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
        self.thread: threading.Thread | None = None
        self.go = threading.Semaphore(0)

    def wall_us(self) -> int:
        return int((self.simulation.now_s + self.wall_offset_s + 1.7e9) * 1e6)

    def monotonic_s(self) -> float:
        return self.simulation.now_s

    def sleep(self, seconds: float) -> None:
        self.simulation.pause(self, max(seconds, 1e-6))

    def kill(self) -> None:
        """No call of it has an effect any more."""
        self.is_dead = True

    @property
    def is_running(self) -> bool:
        """True in its own thread."""
        return threading.current_thread() is self.thread


Work = Callable[[Process], None]


class Simulation:
    """Virtual time, the processes and what is to happen when."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1000.0
        self.end_s = 0.0
        self.processes: list[Process] = []
        self._events: list[tuple[float, int, Process | Callable[[], None]]] = []
        self._numbers = count()
        self._back = threading.Semaphore(0)
        self._failure: BaseException | None = None

    def start(self, name: str, work: Work) -> Process:
        """A process that begins now."""
        process = Process(self, name)

        def body() -> None:
            process.go.acquire()
            try:
                if not process.is_dead:
                    work(process)
            except KilledError:
                pass
            except BaseException as error:  # noqa: BLE001 - `run` raises it
                self._failure = self._failure or error
            process.is_done = True
            self._back.release()

        process.thread = threading.Thread(target=body, name=name, daemon=True)
        process.thread.start()
        self.processes.append(process)
        self._push(self.now_s, process)
        return process

    def at(self, after_s: float, action: Callable[[], None]) -> None:
        """Does that later, whoever runs then."""
        self._push(self.now_s + after_s, action)

    def run(self, duration_s: float) -> None:
        """Everything that happens in that time; raises what a process raised."""
        self.end_s = self.now_s + duration_s
        while self._failure is None and self._events and self._events[0][0] <= self.end_s:
            self.now_s, _, what = heapq.heappop(self._events)
            if not isinstance(what, Process):
                what()
            elif what.stopped_until_s > self.now_s and not what.is_dead:
                self._push(what.stopped_until_s, what)
            else:
                self._resume(what)
        if self._failure is not None:
            raise self._failure
        self.now_s = self.end_s

    def close(self) -> None:
        """Ends all processes where they are."""
        self._events.clear()
        for process in self.processes:
            process.kill()
            while not process.is_done:
                self._resume(process)
            assert process.thread is not None
            process.thread.join(_STUCK_S)

    def pause(self, process: Process, seconds: float) -> None:
        """Returns to the process after that time; KilledError if it died meanwhile."""
        if process.is_dead:
            raise KilledError
        at_s = max(self.now_s + seconds, process.stopped_until_s)
        is_next = not self._events or at_s < self._events[0][0]
        if is_next and at_s <= self.end_s and self._failure is None:
            self.now_s = at_s
            return
        self._push(at_s, process)
        self._back.release()
        process.go.acquire()
        if process.is_dead:
            raise KilledError

    def _push(self, at_s: float, what: Process | Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what))

    def _resume(self, process: Process) -> None:
        if process.is_done:
            return
        process.go.release()
        if not self._back.acquire(timeout=_STUCK_S):
            raise AssertionError(f"'{process.name}' waits for something outside the simulation")
