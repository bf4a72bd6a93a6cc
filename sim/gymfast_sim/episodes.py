"""Rollouts of an engine, one by one: think, wait, act, fail, try again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gymfast_sim.clock import Clock, Log, Rank
from gymfast_sim.draws import Draws, Purpose
from gymfast_sim.gates import Gate
from gymfast_sim.laws import NONE, duration_ns, to_ns
from gymfast_sim.parts import Rollout, Sandbox
from gymfast_sim.pool import Pool
from gymfast_sim.records import State
from gymfast_sim.scenario import Scenario

DONE, DROPPED, SERVED, LOST, ABORTED = 0, 1, 3, 4, 5
"""States of rollouts in the trace; 2 is waiting."""


class Episodes:
    """What rollouts do from their submission on; `finished(rollout, is_done)` is called at the end."""

    finished: Callable[[Rollout, bool], None]

    def __init__(self, clock: Clock, scenario: Scenario, pool: Pool, draw: Draws, log: Log) -> None:
        self._clock, self._pool, self._draw, self._log = clock, pool, draw, log
        self._rollouts = scenario.rollouts
        self._is_episode = self._rollouts.hold == "episode"
        timeout_s, watchdog_s = self._rollouts.timeout_s, self._rollouts.watchdog_s
        self._timeout_ns = None if timeout_s is None else to_ns(timeout_s)
        self._watchdog_ns = None if watchdog_s is None else to_ns(watchdog_s)
        self._detection_ns = to_ns(scenario.sandboxes.detection_s)
        self._slots: Gate[tuple[Rollout, int]] = Gate(self._rollouts.gpu_slots)
        self.wait_counts = [0] * 64
        pool.serve, pool.dies_under = self._serve, self._dies_under

    def submit(self, rollout: Rollout) -> None:
        """A rollout begins."""
        self._pool.classes[rollout.cls].unfinished += 1
        self._pool.touch(rollout.cls)
        self._think(rollout)

    def abort(self, rollouts: Iterable[Rollout]) -> None:
        """Gives up rollouts that are under way, and ends the sandboxes that they have."""
        given_up = list(rollouts)
        for rollout in given_up:
            rollout.is_over = True
            rollout.thought += 1
            self._pool.classes[rollout.cls].unfinished -= 1
            self._pool.touch(rollout.cls)
            self._log.note(self._clock.now_ns, 1, rollout.number, ABORTED)
        for rollout in given_up:
            self._free_slot(rollout)
        self._pool.forget(given_up)

    # Thinking.

    def _think(self, rollout: Rollout) -> None:
        """Thinks about the next action, then takes it or waits for a sandbox."""
        rollout.busy_since_ns = self._clock.now_ns
        if self._rollouts.think == NONE:
            self._go_on(rollout)
            return
        rollout.thought += 1
        if rollout.box is not None:
            self._pool.change(rollout.box, State.HELD)
        if self._slots.is_open:
            self._generate(rollout)
        else:
            self._slots.queue.append((rollout, rollout.thought))

    def _generate(self, rollout: Rollout) -> None:
        """A thought gets its slot on the GPUs."""
        now, box, thought = self._clock.now_ns, rollout.box, rollout.thought
        self._slots.used += 1
        rollout.has_slot = True
        rollout.attempt_gpu_ns += now - rollout.busy_since_ns
        rollout.busy_since_ns = now
        place = self._draw(rollout.number, rollout.attempt, Purpose.THINK, rollout.turn)
        took_ns = duration_ns(self._rollouts.think, place)
        epoch = 0 if box is None else box.epoch

        def thought_over(_: object) -> None:
            if rollout.thought != thought:
                return
            self._free_slot(rollout)
            if box is None or box.epoch == epoch:
                rollout.attempt_think_ns += took_ns
                self._go_on(rollout)

        self._clock.later(took_ns, Rank.THINK, rollout.number, thought_over)

    def _free_slot(self, rollout: Rollout) -> None:
        """The thought that waits longest gets the slot; those without a sandbox any more do not."""
        if not rollout.has_slot:
            return
        rollout.has_slot = False
        slots = self._slots
        slots.used -= 1
        while slots.queue and slots.is_open:
            one, thought = slots.queue.popleft()
            if one.thought == thought and (one.box is None or one.box.state is State.HELD):
                self._generate(one)

    def _go_on(self, rollout: Rollout) -> None:
        if rollout.box is None:
            self._pool.enqueue(rollout)
        else:
            self._act(rollout, rollout.box)

    # Acting.

    def _serve(self, rollout: Rollout, box: Sandbox) -> None:
        """A rollout gets a sandbox."""
        now, log = self._clock.now_ns, self._log
        rollout.charge_wait(box, now)
        log.note(now, 1, rollout.number, SERVED, box.number)
        log.add("num_served")
        waited_ns = now - rollout.waits_since_ns
        log.add("num_waited", waited_ns > 0)
        log.add("wait_ns", waited_ns)
        self.wait_counts[waited_ns.bit_length()] += 1
        self._pool.classes[rollout.cls].num_served += 1
        rollout.box, box.owner = box, rollout
        box.uses += 1
        self._act(rollout, box)

    def _act(self, rollout: Rollout, box: Sandbox) -> None:
        """The next action begins; how and when it ends is drawn now."""
        number = rollout.number
        took_ns = duration_ns(self._rollouts.work, self._place(rollout, Purpose.WORK))
        is_cut = self._timeout_ns is not None and took_ns > self._timeout_ns
        if self._timeout_ns is not None:
            took_ns = min(took_ns, self._timeout_ns)
        rollout.busy_since_ns = self._clock.now_ns
        self._pool.change(box, State.WORKING)
        epoch = box.epoch
        dies = self._dies(rollout, took_ns)
        if dies is not None:
            after_ns, count = dies
            self._clock.later(after_ns, Rank.ACTION, number, lambda _: self._die(box, epoch, count))
            return

        def acted(_: object) -> None:
            if box.epoch == epoch:
                self._log.add("num_timeouts", is_cut)
                self._acted(rollout, box, took_ns)

        self._clock.later(took_ns, Rank.ACTION, number, acted)

    def _dies(self, rollout: Rollout, took_ns: int) -> tuple[int, str] | None:
        """When the sandbox dies under an action, or is given up, and as what that is counted."""
        rollouts = self._rollouts
        if rollouts.fail_ratio:
            fails, when = self._place(rollout, Purpose.WORK_FAILS)
            if fails < rollouts.fail_ratio:
                return round(when * took_ns), "num_died"
        if rollouts.hang_ratio or rollouts.lost_ratio:
            hangs, is_lost = self._place(rollout, Purpose.HANGS)
            if hangs < rollouts.hang_ratio:
                assert self._timeout_ns is not None
                return self._timeout_ns, "num_hung"
            if is_lost < rollouts.lost_ratio:
                assert self._watchdog_ns is not None
                return max(self._watchdog_ns, took_ns), "num_lost_completions"
        return None

    def _place(self, rollout: Rollout, purpose: Purpose) -> tuple[float, float]:
        return self._draw(rollout.number, rollout.attempt, purpose, rollout.turn)

    def _acted(self, rollout: Rollout, box: Sandbox, took_ns: int) -> None:
        rollout.attempt_work_ns += took_ns
        rollout.turn += 1
        is_last = rollout.turn == self._rollouts.turns
        if is_last or not self._is_episode:
            rollout.keep_attempt()
            rollout.attempt = 0 if not is_last else rollout.attempt
            rollout.box = None
            self._pool.release(box)
        if is_last:
            self._finish(rollout, is_done=True)
        else:
            self._think(rollout)

    # Failures.

    def _die(self, box: Sandbox, epoch: int, count: str) -> None:
        if box.epoch == epoch:
            self._log.add(count)
            box.epoch += 1
            self._dies_under(box)

    def _dies_under(self, box: Sandbox) -> None:
        """A sandbox with a rollout is dead; that is noticed after detection_s."""
        if self._detection_ns == 0:
            self._noticed(box)
            return
        self._pool.change(box, State.LOST)
        assert box.owner is not None
        number = box.owner.number
        self._clock.later(self._detection_ns, Rank.ACTION, number, lambda _: self._noticed(box))

    def _noticed(self, box: Sandbox) -> None:
        rollout, box.owner = box.owner, None
        if rollout is None:  # it was given up meanwhile
            self._pool.lose(box)
            return
        rollout.box = None
        rollout.thought += 1
        self._free_slot(rollout)
        self._log.note(self._clock.now_ns, 1, rollout.number, LOST, box.number)
        self._pool.lose(box)
        rollout.lose_action(self._clock.now_ns)
        if self._is_episode:
            rollout.lose_attempt()
            rollout.turn = 0
        rollout.attempt += 1
        if rollout.attempt > self._rollouts.retries.max_retries:
            self._finish(rollout, is_done=False)
            return
        after_ns = self._backoff_ns(rollout)
        rollout.back_off(after_ns)
        if after_ns == 0:
            self._again(rollout)
        else:
            self._clock.later(after_ns, Rank.RETRY, rollout.number, lambda _: self._again(rollout))

    def _again(self, rollout: Rollout) -> None:
        """An episode begins anew, with its first thought; an action is only repeated."""
        if rollout.is_over:
            return
        if self._is_episode:
            self._think(rollout)
        else:
            self._pool.enqueue(rollout)

    def _backoff_ns(self, rollout: Rollout) -> int:
        retries = self._rollouts.retries
        part = 0.0
        if retries.jitter_ratio:
            part = self._place(rollout, Purpose.RETRY)[0]
        return to_ns(retries.delay_s(rollout.attempt, part))

    def _finish(self, rollout: Rollout, *, is_done: bool) -> None:
        rollout.keep_attempt()
        rollout.is_over = True
        self._pool.classes[rollout.cls].unfinished -= 1
        self._pool.touch(rollout.cls)
        self._log.note(self._clock.now_ns, 1, rollout.number, DONE if is_done else DROPPED)
        self.finished(rollout, is_done)
