"""Rollouts and steps of an engine: think, act, fail, try again, train."""

from __future__ import annotations

from gymfast_sim.clock import Clock, Log, Rank
from gymfast_sim.draws import Draws, Purpose
from gymfast_sim.laws import NONE, duration_ns, to_ns
from gymfast_sim.parts import Rollout, Sandbox
from gymfast_sim.pool import Pool
from gymfast_sim.records import Cause, State, StepRecord
from gymfast_sim.scenario import Scenario

_DONE, _DROPPED, _SERVED, _LOST = 0, 1, 3, 4  # states of rollouts in the trace


class Steps:
    """The rollouts of a run, step by step."""

    def __init__(self, clock: Clock, scenario: Scenario, pool: Pool, draw: Draws, log: Log) -> None:
        self._clock, self._pool, self._draw, self._log = clock, pool, draw, log
        self._rollouts, self._training = scenario.rollouts, scenario.training
        self._is_episode = self._rollouts.hold == "episode"
        timeout_s = self._rollouts.timeout_s
        self._timeout_ns = None if timeout_s is None else to_ns(timeout_s)
        self._detection_ns = to_ns(scenario.sandboxes.detection_s)
        self._sync_ns = to_ns(self._training.sync.total_s)
        # In whole milliseconds: a mean may come from libm, whose last bit differs by platform.
        self._mean_train_ns = round(self._training.train.expected_s * 1e3) * 10**6
        self.records: list[StepRecord] = []
        self.wait_counts = [0] * 64
        self._all_causes_ns = [0] * len(Cause)
        self.step = self._start_ns = 0
        self.is_rolling = self.is_over = False
        self.next_ns: int | None = None
        self.num_finished = self._num_done = 0
        pool.serve, pool.dies_under = self._serve, self._dies_under

    def begin(self) -> None:
        """A step begins: its rollouts are submitted."""
        self.is_rolling, self.next_ns, self._start_ns = True, None, self._clock.now_ns
        self.num_finished = self._num_done = 0
        if self._rollouts.arrival_gap is not None:
            self._expect_arrival(0)
            return
        for index in range(self._rollouts.num_rollouts):
            self._submit(index)

    def _expect_arrival(self, index: int) -> None:
        gap, number = self._rollouts.arrival_gap, self._number(index)
        assert gap is not None
        after_ns = duration_ns(gap, self._draw(number, 0, Purpose.ARRIVAL))
        self._clock.later(after_ns, Rank.ARRIVE, number, lambda _: self._arrive(index))

    def _arrive(self, index: int) -> None:
        self._submit(index)
        if index + 1 < self._rollouts.num_rollouts:
            self._expect_arrival(index + 1)

    def _number(self, index: int) -> int:
        return self.step * self._rollouts.num_rollouts + index

    def _submit(self, index: int) -> None:
        cls = index // self._rollouts.group_size % len(self._pool.classes)
        rollout = Rollout(self._number(index), cls)
        rollout.charged_ns[Cause.ARRIVAL] = self._clock.now_ns - self._start_ns
        pool = self._pool.classes[cls]
        pool.unfinished += 1
        self._pool.touch(cls)
        self._think(rollout)

    # One rollout.

    def _think(self, rollout: Rollout) -> None:
        """Thinks about the next action, then takes it or waits for a sandbox."""
        if self._rollouts.think == NONE:
            self._go_on(rollout)
            return
        place = self._draw(rollout.number, rollout.attempt, Purpose.THINK, rollout.turn)
        took_ns = duration_ns(self._rollouts.think, place)
        rollout.busy_since_ns = self._clock.now_ns
        box = rollout.box
        if box is not None:
            self._pool.change(box, State.HELD)
        epoch = 0 if box is None else box.epoch

        def thought(_: object) -> None:
            if box is None or box.epoch == epoch:
                rollout.attempt_think_ns += took_ns
                self._go_on(rollout)

        self._clock.later(took_ns, Rank.THINK, rollout.number, thought)

    def _go_on(self, rollout: Rollout) -> None:
        if rollout.box is None:
            self._pool.enqueue(rollout)
        else:
            self._act(rollout, rollout.box)

    def _serve(self, rollout: Rollout, box: Sandbox) -> None:
        """A rollout gets a sandbox."""
        now, log = self._clock.now_ns, self._log
        rollout.charge_wait(box, now)
        log.note(now, 1, rollout.number, _SERVED, box.number)
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
        rollouts, number, attempt = self._rollouts, rollout.number, rollout.attempt
        took_ns = duration_ns(
            rollouts.work, self._draw(number, attempt, Purpose.WORK, rollout.turn)
        )
        is_cut = self._timeout_ns is not None and took_ns > self._timeout_ns
        if self._timeout_ns is not None:
            took_ns = min(took_ns, self._timeout_ns)
        rollout.busy_since_ns = self._clock.now_ns
        self._pool.change(box, State.WORKING)
        epoch = box.epoch
        if rollouts.fail_ratio:
            fails, when = self._draw(number, attempt, Purpose.WORK_FAILS, rollout.turn)
            if fails < rollouts.fail_ratio:
                after_ns = round(when * took_ns)
                self._clock.later(after_ns, Rank.ACTION, number, lambda _: self._die(box, epoch))
                return

        def acted(_: object) -> None:
            if box.epoch == epoch:
                self._log.add("num_timeouts", is_cut)
                self._acted(rollout, box, took_ns)

        self._clock.later(took_ns, Rank.ACTION, number, acted)

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
            self._finish(rollout, _DONE)
        else:
            self._think(rollout)

    # Failures.

    def _die(self, box: Sandbox, epoch: int) -> None:
        if box.epoch == epoch:
            self._log.add("num_died")
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
        rollout = box.owner
        assert rollout is not None
        box.owner = rollout.box = None
        self._log.note(self._clock.now_ns, 1, rollout.number, _LOST, box.number)
        self._pool.lose(box)
        rollout.charged_ns[Cause.RETRY] += self._clock.now_ns - rollout.busy_since_ns
        if self._is_episode:
            rollout.lose_attempt()
            rollout.turn = 0
        rollout.attempt += 1
        if rollout.attempt > self._rollouts.retries.max_retries:
            self._finish(rollout, _DROPPED)
            return
        after_ns = self._backoff_ns(rollout)
        rollout.charged_ns[Cause.BACKOFF] += after_ns
        if after_ns == 0:
            self._again(rollout)
        else:
            self._clock.later(after_ns, Rank.RETRY, rollout.number, lambda _: self._again(rollout))

    def _again(self, rollout: Rollout) -> None:
        """An episode begins anew, with its first thought; an action is only repeated."""
        if self._is_episode:
            self._think(rollout)
        else:
            self._pool.enqueue(rollout)

    def _backoff_ns(self, rollout: Rollout) -> int:
        retries = self._rollouts.retries
        delay_s = retries.initial_delay_s
        for _ in range(rollout.attempt - 1):
            delay_s = min(delay_s * retries.backoff_coefficient, retries.max_delay_s)
        if retries.jitter_ratio and delay_s:
            part = self._draw(rollout.number, rollout.attempt, Purpose.RETRY, rollout.turn)[0]
            delay_s = delay_s * (1.0 - retries.jitter_ratio * part)
        return to_ns(delay_s)

    # The end of a step.

    def _finish(self, rollout: Rollout, state: int) -> None:
        rollout.keep_attempt()
        for cause, ns in enumerate(rollout.charged_ns):
            self._all_causes_ns[cause] += ns
        self._pool.classes[rollout.cls].unfinished -= 1
        self._pool.touch(rollout.cls)
        self._log.note(self._clock.now_ns, 1, rollout.number, state)
        self._num_done += state == _DONE
        self.num_finished += 1
        if self.num_finished == self._rollouts.num_rollouts:
            self._train(rollout)

    def _train(self, last: Rollout) -> None:
        """The trainer works, then the weights are sent; what the last rollout did is why now."""
        training, now, took_ns = self._training, self._clock.now_ns, 0
        if training.train != NONE:
            took_ns = duration_ns(training.train, self._draw(self.step, 0, Purpose.TRAIN))
        causes = list(last.charged_ns)
        causes[Cause.TRAIN], causes[Cause.SYNC] = took_ns, self._sync_ns
        end_ns = now + took_ns + self._sync_ns
        self.records.append(
            StepRecord(
                start_ns=self._start_ns,
                rollouts_end_ns=now,
                end_ns=end_ns,
                causes_ns={cause.name.lower(): causes[cause] for cause in Cause},
                all_causes_ns={c.name.lower(): self._all_causes_ns[c] for c in Cause},
                num_done=self._num_done,
                num_dropped=self.num_finished - self._num_done,
            )
        )
        self.is_rolling, self._all_causes_ns = False, [0] * len(Cause)
        if self.step + 1 < training.steps:
            self.next_ns = now + self._mean_train_ns + self._sync_ns
        else:
            for cls, pool in enumerate(self._pool.classes):
                pool.next_step = 0
                self._pool.touch(cls)
        self._clock.later(end_ns - now, Rank.TRAIN, self.step, self._trained)

    def _trained(self, _: object) -> None:
        self.step += 1
        self.is_over = self.step == self._training.steps
        if not self.is_over:
            self.begin()
