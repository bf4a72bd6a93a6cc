"""Steps whose rollouts run while the trainer works: one step off, and fully asynchronous."""

from __future__ import annotations

from gymfast_sim.clock import Rank
from gymfast_sim.parts import Rollout
from gymfast_sim.records import Cause
from gymfast_sim.steps import Steps


class OneStepOff(Steps):
    """Rollouts of a step while the trainer works on those of the step before, then the sync."""

    _train_end_ns = 0

    def begin(self) -> None:
        """A step begins, and the training of what the step before brought."""
        took_ns = self._train_ns(self.step - 1) if self.step else 0
        self._train_end_ns = self._clock.now_ns + took_ns
        super().begin()

    def _rolled(self, last: Rollout) -> None:
        now = self._clock.now_ns
        begin_ns = max(now, self._train_end_ns)
        causes = list(last.charged_ns)
        causes[Cause.TRAIN], causes[Cause.SYNC] = begin_ns - now, self._sync_ns
        end_ns = begin_ns + self._sync_ns
        self._note_step(causes, rollouts_end_ns=now, end_ns=end_ns)
        self.is_rolling = False
        expected_ns = self._start_ns + (self._mean_train_ns if self.step else 0)
        self._expect_step(max(now, expected_ns) + self._sync_ns)
        self._clock.later(end_ns - now, Rank.TRAIN, self.step, self._trained)


class Asynchronous(Steps):
    """So many rollouts in flight at all times; the trainer takes a batch as soon as there is one.

    Rollout n is submitted when n div batch <= versions + max_staleness, so that it is at most that
    old if rollouts end in their order; a long one may be older, the mean is below that plus one. A
    step is from one sync to the next.
    """

    def begin(self) -> None:
        """The run begins; it has no steps of rollouts."""
        self._num_submitted = self._num_lost = 0
        self._versions: dict[int, int] = {}  # of rollouts, when they were submitted
        self._ready: list[int] = []  # versions of done rollouts that were not trained on
        self._is_training = False
        self.is_rolling = True
        for cls, pool in enumerate(self._pool.classes):
            pool.next_step = 0
            self._pool.touch(cls)
        self._fill()

    def _fill(self) -> None:
        training, batch = self._training, self._rollouts.num_rollouts
        assert training.in_flight is not None
        while len(self._under_way) < training.in_flight:
            number = self._num_submitted
            late = training.max_staleness
            if late is not None and (number - self._num_lost) // batch > self.step + late:
                return
            self._num_submitted += 1
            cls = number // self._rollouts.group_size % len(self._pool.classes)
            rollout = Rollout(number, cls)
            self._under_way[number] = rollout
            self._versions[number] = self.step
            self._episodes.submit(rollout)

    def _finished(self, rollout: Rollout, is_done: bool) -> None:
        del self._under_way[rollout.number]
        self._add_causes(rollout)
        version = self._versions.pop(rollout.number)
        self._num_done += is_done
        self._num_dropped += not is_done
        self._num_lost += not is_done  # it joins no batch: another one takes its place
        if is_done:
            self._ready.append(version)
        self._train_if_ready()
        self._fill()

    def _train_if_ready(self) -> None:
        """Takes the batch that was done first."""
        batch, now = self._rollouts.num_rollouts, self._clock.now_ns
        if self._is_training or len(self._ready) < batch:
            return
        staleness = batch * self.step - sum(self._ready[:batch])
        del self._ready[:batch]
        took_ns = self._train_ns(self.step)
        causes = [0] * len(Cause)
        causes[Cause.STARVED] = now - self._start_ns
        causes[Cause.TRAIN], causes[Cause.SYNC] = took_ns, self._sync_ns
        end_ns = now + took_ns + self._sync_ns
        self._note_step(causes, rollouts_end_ns=now, end_ns=end_ns, staleness=staleness)
        self._num_done = self._num_dropped = 0
        self._all_causes_ns = [0] * len(Cause)
        self._is_training = True
        self._clock.later(end_ns - now, Rank.TRAIN, self.step, self._trained)

    def _trained(self, _: object) -> None:
        self.step += 1
        self._start_ns = self._clock.now_ns
        self._is_training = False
        self.is_over = self.step == self._training.steps
        if not self.is_over:
            self._train_if_ready()
            self._fill()
