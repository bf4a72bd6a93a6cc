"""The limits that creations pass: client, quota, starting, rate, each first come first served."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gymfast_sim.clock import Clock, Log, Rank
from gymfast_sim.draws import Draws, Purpose
from gymfast_sim.gates import Gate, RateLimit
from gymfast_sim.laws import to_ns
from gymfast_sim.parts import Sandbox
from gymfast_sim.records import State
from gymfast_sim.scenario import Limits


class Admission:
    """Lets creations pass; `start` is called with those of one instant, in their order."""

    def __init__(
        self, clock: Clock, limits: Limits, draw: Draws, log: Log,
        start: Callable[[list[Sandbox]], None],
    ) -> None:  # fmt: skip
        self._clock, self._log, self._start = clock, log, start
        self.client: Gate[Sandbox] = Gate(limits.client_concurrency)
        self.quota: Gate[Sandbox] = Gate(limits.max_live)
        self.starting: Gate[Sandbox] = Gate(limits.max_starting)
        self._last: Gate[Sandbox] = Gate(None)
        interval_ns = limits.interval_ns
        self.rate = None if interval_ns is None else RateLimit(interval_ns, limits.burst)
        self._refused, self._draw = limits.refused, draw
        self._next_ns: int | None = None  # when the next GRANT is due

    def ask(self, boxes: Iterable[Sandbox]) -> None:
        """Puts creations at the tail of the first queue."""
        self.client.queue.extend(boxes)
        self._want_pass(self._clock.now_ns)

    def free(self, gate: Gate[Sandbox]) -> None:
        """One permit of a limit is free again."""
        gate.used -= 1
        if gate.queue:
            self._want_pass(self._clock.now_ns)

    def cancel(self, box: Sandbox) -> None:
        """Gives back the permits of a creation that waits no more; its state says so already."""
        for gate in (self.client, self.quota, self.starting)[: box.num_passed]:
            self.free(gate)

    def _want_pass(self, at_ns: int) -> None:
        if self._next_ns is None or at_ns < self._next_ns:
            self._next_ns = at_ns
            self._clock.later(at_ns - self._clock.now_ns, Rank.GRANT, 0, self._due)

    def _refuse(self, box: Sandbox) -> None:
        """A creation over the rate tries again after a back-off, and keeps its other permits."""
        assert self._refused is not None
        box.num_refused += 1
        self._log.add("num_refused")
        part = self._draw(box.number, box.num_refused, Purpose.REFUSED)[0]
        after_ns = to_ns(self._refused.delay_s(box.num_refused, part))

        def again(_: object) -> None:
            if box.state is State.PENDING:
                self._last.queue.append(box)
                self._want_pass(self._clock.now_ns)

        self._clock.later(after_ns, Rank.RETRY_CREATION, box.number, again)

    def _due(self, _: object) -> None:
        if self._next_ns == self._clock.now_ns:
            self.grant()

    def grant(self) -> None:
        """Lets pass what may pass now."""
        now = self._clock.now_ns
        self._next_ns = None
        gates = (self.client, self.quota, self.starting, self._last)
        for i in range(3):
            gate, after = gates[i], gates[i + 1]
            while gate.queue and gate.is_open:
                box = gate.queue.popleft()
                if box.state is State.PENDING:
                    gate.used += 1
                    box.num_passed = i + 1
                    box.stamps[i + 1] = now
                    self._log.note(now, 2, box.number, i)
                    after.queue.append(box)
        queue, rate, passed = self._last.queue, self.rate, []
        while queue and (self._refused is not None or rate is None or rate.next_ns <= now):
            box = queue.popleft()
            if box.state is State.PENDING and rate is not None and rate.next_ns > now:
                self._refuse(box)
                continue
            if box.state is State.PENDING:
                if rate is not None:
                    rate.take(now)
                box.stamps[4] = now
                self._log.note(now, 2, box.number, 3)
                passed.append(box)
        if passed:
            self._start(passed)
        if queue and rate is not None:
            self._want_pass(rate.next_ns)
