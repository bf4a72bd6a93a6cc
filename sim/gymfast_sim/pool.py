"""Sandboxes of an engine: how they start, serve and end, and which rollouts wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from gymfast.sandbox.policy import Policy
from gymfast_sim.admission import Admission
from gymfast_sim.clock import Clock, Log, Rank
from gymfast_sim.draws import Draws, Purpose
from gymfast_sim.laws import NONE, duration_ns, to_ns
from gymfast_sim.parts import FIRST_PHASE, Rollout, Sandbox, SandboxClass
from gymfast_sim.records import State
from gymfast_sim.scenario import Scenario

_PHASES = (Purpose.API, Purpose.QUEUE, Purpose.BOOT, Purpose.SETUP)
QUEUED = 2
"""State of a rollout in the trace; 0 is done, 1 dropped."""


class Pool:
    """The sandboxes of a run.

    `serve(rollout, box)` is called when a rollout gets a sandbox, `dies_under(box)` when one dies
    with a rollout, `changed()` when what a policy may know of a class may have changed.
    """

    serve: Callable[[Rollout, Sandbox], None]
    dies_under: Callable[[Sandbox], None]
    changed: Callable[[], None]

    def __init__(
        self, clock: Clock, scenario: Scenario, policy: Policy, draw: Draws, log: Log
    ) -> None:
        self._clock, self._boxes, self._draw, self._log = clock, scenario.sandboxes, draw, log
        self.admission = Admission(clock, scenario.limits, draw, log, self._start)
        self._teardown_counts = scenario.limits.teardown_counts
        self._max_uses, self._is_early = policy.max_uses, policy.binding == "early"
        boxes = self._boxes
        self._phases = [
            (FIRST_PHASE + i, purpose, law)
            for i, (purpose, law) in enumerate(
                zip(_PHASES, (boxes.api, boxes.queue, boxes.boot, boxes.setup), strict=True)
            )
        ]
        self._lifetime_ns = None if boxes.lifetime_s is None else to_ns(boxes.lifetime_s)
        self._has_client_limit = scenario.limits.client_concurrency is not None
        per_class = [0] * boxes.classes
        for prompt in range(scenario.rollouts.prompts):
            per_class[prompt % boxes.classes] += scenario.rollouts.group_size
        self.classes = [SandboxClass(count) for count in per_class]
        self.state_ns = [0] * len(State)
        self.live: dict[int, Sandbox] = {}
        self._num_boxes = self._num_tickets = self._num_starting = 0
        self._bindable: set[int] = set()
        self._touched = set(range(len(self.classes)))
        self.views = [pool.view for pool in self.classes]
        self.totals = [0, 0, 0, 0]  # alive, unfinished, queued, starting or pending

    def prewarm(self) -> None:
        """Sandboxes that are ready when the run begins; only the quota counts them."""
        for i in range(self._boxes.prewarmed):
            box = self._new(i % len(self.classes))
            self.admission.quota.used += 1
            self._log.add("num_started")
            self._expect_end(box)
            self._rest(box)

    def close(self) -> None:
        """Books the time of sandboxes that are left."""
        for box in self.live.values():
            self.state_ns[box.state] += self._clock.now_ns - box.since_ns

    # What a policy decides.

    def create(self, cls: int, count: int, *, is_bound: bool) -> None:
        """Asks for sandboxes; bound ones are for the rollouts that wait longest."""
        pool = self.classes[cls]
        asked = []
        for _ in range(count):
            box = self._new(cls)
            if is_bound:
                box.owner = pool.queue.popleft()
            else:
                box.replaces = pool.replaced(self._clock.now_ns)
            asked.append(box)
        self._log.add("num_asked", count)
        pool.pending.extend(asked)
        self.admission.ask(asked)

    def cancel(self, cls: int, count: int) -> None:
        """Takes back the creations that were asked for last and still wait."""
        for _ in range(count):
            box = self.classes[cls].newest_pending()
            self._log.add("num_cancelled")
            box.cut_stamps(self._clock.now_ns)
            self.change(box, State.GONE)
            self.admission.cancel(box)
            self._give_back(box)

    def abort(self, cls: int, count: int) -> None:
        """Gives up the starts that began first."""
        for _ in range(count):
            box = self.classes[cls].longest_starting()
            self._log.add("num_aborted")
            self._fail_start(box)
            self.admission.free(self.admission.starting)
            owner, box.owner = box.owner, None
            self._terminate(box)
            self._wait_again(owner, box)

    def terminate(self, cls: int, count: int, *, is_newest: bool) -> None:
        """Ends idle sandboxes: those that became idle last, or those that are idle longest."""
        pool = self.classes[cls]
        for _ in range(count):
            self._terminate(pool.newest_idle() if is_newest else pool.longest_idle())

    def drain(self, cls: int, count: int) -> None:
        """So many busy sandboxes end when they are released."""
        self.classes[cls].drain = count
        self.touch(cls)

    @property
    def counts(self) -> tuple[int, ...]:
        """Sandboxes by state, of all classes."""
        return tuple(map(sum, zip(*[pool.counts for pool in self.classes], strict=True)))

    def look(self) -> list[int]:
        """Makes the views of a policy anew; the classes of which a count changed."""
        changed, totals = [], self.totals
        for cls in sorted(self._touched):
            pool = self.classes[cls]
            old, is_changed = pool.view, pool.look()
            new = self.views[cls] = pool.view
            if is_changed:
                totals[0] += new.alive - old.alive
                totals[1] += new.unfinished - old.unfinished
                totals[2] += new.queued - old.queued
                totals[3] += new.pending + new.starting - old.pending - old.starting
                changed.append(cls)
        self._touched.clear()
        return changed

    # What rollouts do.

    def enqueue(self, rollout: Rollout) -> None:
        """A rollout waits for a sandbox from now on."""
        rollout.queued_ns = rollout.waits_since_ns = self._clock.now_ns
        self.classes[rollout.cls].num_queued += 1
        self._to_tail(rollout)

    def release(self, box: Sandbox) -> None:
        """After its use a sandbox is ended, reset or idle."""
        box.owner = None
        pool, now = self.classes[box.cls], self._clock.now_ns
        is_used_up = self._max_uses is not None and box.uses >= self._max_uses
        if is_used_up or pool.drain:
            pool.drain = max(pool.drain - 1, 0)
            self._terminate(box)
            return
        if self._boxes.reset == NONE:
            self._rest(box)
            return
        took_ns = duration_ns(self._boxes.reset, self._draw(box.number, box.uses, Purpose.RESET))
        box.add_reset(now, now + took_ns)
        self.change(box, State.RESETTING)
        epoch = box.epoch
        self._clock.later(took_ns, Rank.RESET, box.number, lambda _: self._reset(box, epoch))

    def lose(self, box: Sandbox) -> None:
        """A sandbox is gone at once, without teardown."""
        pool = self.classes[box.cls]
        pool.num_lost += 1
        self.change(box, State.GONE)
        pool.drain = min(pool.drain, pool.busy)
        self.admission.free(self.admission.quota)
        self._give_back(box)

    def change(self, box: Sandbox, state: State) -> None:
        """Moves a sandbox to a state and books the time in the one before."""
        now, old = self._clock.now_ns, box.state
        self.state_ns[old] += now - box.since_ns
        pool = self.classes[box.cls]
        pool.counts[old] -= 1
        pool.counts[state] += 1
        self._num_starting += (state is State.STARTING) - (old is State.STARTING)
        box.state, box.since_ns = state, now
        self._log.note(now, 0, box.number, state)
        if state is State.GONE:
            del self.live[box.number]
        self.touch(box.cls)

    def touch(self, cls: int) -> None:
        """What a policy may know of a class may have changed."""
        self._touched.add(cls)
        self.changed()

    def forget(self, rollouts: Collection[Rollout]) -> None:
        """Ends the sandboxes of rollouts that were given up, and takes them out of the queues."""
        for cls in {rollout.cls for rollout in rollouts}:
            queue = self.classes[cls].queue
            self.classes[cls].queue = deque(one for one in queue if not one.is_over)
        for box in [b for b in self.live.values() if b.owner is not None and b.owner.is_over]:
            box.owner = None
            if box.state is State.PENDING:
                self._log.add("num_cancelled")
                self.change(box, State.GONE)
                self.admission.cancel(box)
            elif box.state is State.STARTING:
                self._log.add("num_aborted")
                self._fail_start(box)
                self.admission.free(self.admission.starting)
                self._terminate(box)
            elif box.state is not State.LOST:
                self._terminate(box)
                pool = self.classes[box.cls]
                pool.drain = min(pool.drain, pool.busy)

    # Starts.

    def _new(self, cls: int) -> Sandbox:
        box = Sandbox(self._num_boxes, cls, self._clock.now_ns)
        self._num_boxes += 1
        self.live[box.number] = box
        self.classes[cls].counts[State.PENDING] += 1
        self._log.note(self._clock.now_ns, 0, box.number, State.PENDING)
        self.touch(cls)
        return box

    def _start(self, boxes: Sequence[Sandbox]) -> None:
        """Begins starts; a crowded phase sees all that are starting once these have begun."""
        for box in boxes:
            self.change(box, State.STARTING)
            self.classes[box.cls].starting.append(box)
        self._log.add("num_started", len(boxes))
        now = self._clock.now_ns
        for box in boxes:
            at = now
            for stamp, purpose, law in self._phases:
                if law is not NONE:
                    at += duration_ns(law, self._draw(box.number, 0, purpose), self._num_starting)
                box.stamps[stamp] = at
            self._expect_end(box)
            if self._has_client_limit:
                called_ns = box.stamps[FIRST_PHASE] - now
                self._clock.later(called_ns, Rank.API, box.number, self._called)
            self._expect_ready(box, at - now)

    def _called(self, _: object) -> None:
        self.admission.free(self.admission.client)

    def _expect_ready(self, box: Sandbox, after_ns: int) -> None:
        epoch = box.epoch
        self._clock.later(after_ns, Rank.READY, box.number, lambda _: self._ready(box, epoch))

    def _ready(self, box: Sandbox, epoch: int) -> None:
        if box.epoch != epoch:
            return  # it expired before
        self.admission.free(self.admission.starting)
        ratio = self._boxes.start_fail_ratio
        if ratio and self._draw(box.number, 0, Purpose.START_FAILS)[0] < ratio:
            self._log.add("num_start_failed")
            self._fail_start(box)
            self.lose(box)
        elif box.owner is not None:
            self.serve(box.owner, box)
        else:
            self._rest(box)

    def _fail_start(self, box: Sandbox) -> None:
        """A start ends before its time, or for nothing."""
        box.epoch += 1
        box.cut_stamps(self._clock.now_ns)
        if box.owner is None:
            self.classes[box.cls].note_failed(box, self._clock.now_ns)

    # Ends.

    def _expect_end(self, box: Sandbox) -> None:
        if self._lifetime_ns is not None:
            end = self._lifetime_ns
            self._clock.later(end, Rank.EXPIRE, box.number, lambda _: self._expire(box))
        law = self._boxes.preempted_after
        if law is not None:
            end = duration_ns(law, self._draw(box.number, 0, Purpose.PREEMPTED))
            count = "num_preempted"
            self._clock.later(end, Rank.EXPIRE, box.number, lambda _: self._expire(box, count))

    def _expire(self, box: Sandbox, count: str = "num_expired") -> None:
        """The lifetime of a sandbox is over, or it is preempted, whatever it does."""
        state = box.state
        if state in {State.LOST, State.STOPPING, State.GONE}:
            return
        self._log.add(count)
        box.epoch += 1
        if state is State.STARTING:
            self._fail_start(box)
            self.admission.free(self.admission.starting)
        if state in {State.WORKING, State.HELD}:
            self.dies_under(box)
        else:
            self.lose(box)

    def _terminate(self, box: Sandbox) -> None:
        self._log.add("num_terminated")
        box.epoch += 1
        if self._boxes.teardown == NONE:
            self.change(box, State.GONE)
            self.admission.free(self.admission.quota)
            return
        took_ns = duration_ns(self._boxes.teardown, self._draw(box.number, 0, Purpose.TEARDOWN))
        self.change(box, State.STOPPING)
        if not self._teardown_counts:
            self.admission.free(self.admission.quota)
        self._clock.later(took_ns, Rank.GONE, box.number, lambda _: self._torn_down(box))

    def _torn_down(self, box: Sandbox) -> None:
        self.change(box, State.GONE)
        if self._teardown_counts:
            self.admission.free(self.admission.quota)

    # Idle sandboxes and waiting rollouts.

    def _reset(self, box: Sandbox, epoch: int) -> None:
        if box.epoch == epoch:
            self._rest(box)

    def _rest(self, box: Sandbox) -> None:
        self.change(box, State.IDLE)
        self.classes[box.cls].idle.append(box)
        self._want_bind(box.cls)

    def _give_back(self, box: Sandbox) -> None:
        """The rollout that a lost sandbox was made for waits again, at the tail."""
        owner, box.owner = box.owner, None
        self._wait_again(owner, box)

    def _wait_again(self, owner: Rollout | None, box: Sandbox) -> None:
        if owner is not None:
            owner.charge_failed(box, self._clock.now_ns)
            self._to_tail(owner)

    def _to_tail(self, rollout: Rollout) -> None:
        rollout.ticket = self._num_tickets
        self._num_tickets += 1
        pool = self.classes[rollout.cls]
        pool.queue.append(rollout)
        self._log.note(self._clock.now_ns, 1, rollout.number, QUEUED)
        self.touch(rollout.cls)
        self._want_bind(rollout.cls)

    def _want_bind(self, cls: int) -> None:
        if self._is_early:
            return
        if not self._bindable:
            self._clock.later(0, Rank.BIND, 0, self._bind)
        self._bindable.add(cls)

    def _bind(self, _: object) -> None:
        """Gives idle sandboxes to rollouts, both in the order in which they came."""
        due = sorted(self._bindable)
        self._bindable.clear()
        for cls in due:
            pool = self.classes[cls]
            while pool.queue and pool.counts[State.IDLE]:
                self.serve(pool.queue.popleft(), pool.longest_idle())
