"""Steps of an engine: when rollouts are submitted, when the trainer works, what a step was."""

from __future__ import annotations

from gymfast_sim.clock import Clock, Log, Rank
from gymfast_sim.draws import Draws, Purpose
from gymfast_sim.episodes import Episodes
from gymfast_sim.laws import NONE, duration_ns, to_ns
from gymfast_sim.parts import Rollout
from gymfast_sim.pool import Pool
from gymfast_sim.records import Cause, StepRecord
from gymfast_sim.scenario import Scenario


class Steps:
    """Synchronous steps: all rollouts, then the trainer and the sync, then the next step."""

    def __init__(self, clock: Clock, scenario: Scenario, pool: Pool, draw: Draws, log: Log) -> None:
        self._clock, self._pool, self._draw, self._log = clock, pool, draw, log
        self._rollouts, self._training = scenario.rollouts, scenario.training
        self._sync_ns = to_ns(self._training.sync.total_s)
        # In whole milliseconds: a mean may come from libm, whose last bit differs by platform.
        self._mean_train_ns = round(self._training.train.expected_s * 1e3) * 10**6
        self._episodes = Episodes(clock, scenario, pool, draw, log)
        self._episodes.finished = self._finished
        self.wait_counts = self._episodes.wait_counts
        self.records: list[StepRecord] = []
        self.step = self._start_ns = 0
        self.is_rolling = self.is_over = False
        self.next_ns: int | None = None
        self._forget()

    def _forget(self) -> None:
        """Nothing of the step has happened yet."""
        self._num_done = self._num_dropped = self._num_aborted = 0
        self._all_causes_ns = [0] * len(Cause)
        self._under_way: dict[int, Rollout] = {}
        self._spoilt: set[int] = set()  # groups of which a rollout was dropped

    def begin(self) -> None:
        """A step begins: its rollouts are submitted."""
        self.is_rolling, self.next_ns, self._start_ns = True, None, self._clock.now_ns
        self._forget()
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
        self._under_way[rollout.number] = rollout
        self._episodes.submit(rollout)

    def _finished(self, rollout: Rollout, is_done: bool) -> None:
        rollouts = self._rollouts
        del self._under_way[rollout.number]
        self._add_causes(rollout)
        if is_done:
            self._num_done += 1
        else:
            self._num_dropped += 1
            self._spoil(rollout.number // rollouts.group_size)
        if self._num_done == rollouts.enough:
            self._give_up(list(self._under_way.values()))
        if self.num_finished == rollouts.num_rollouts:
            self._rolled(rollout)

    @property
    def num_finished(self) -> int:
        """Rollouts of the step that are over, whatever way."""
        return self._num_done + self._num_dropped + self._num_aborted

    def _add_causes(self, rollout: Rollout) -> None:
        for cause, ns in enumerate(rollout.charged_ns):
            self._all_causes_ns[cause] += ns

    def _spoil(self, group: int) -> None:
        """A rollout was dropped: the others of its group are given up, if groups are dropped."""
        self._spoilt.add(group)
        if self._rollouts.group_fail == "drop":
            size = self._rollouts.group_size
            mates = [self._under_way.get(n) for n in range(group * size, (group + 1) * size)]
            self._give_up([mate for mate in mates if mate is not None])

    def _give_up(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            del self._under_way[rollout.number]
        self._num_aborted += len(rollouts)
        if rollouts:
            self._episodes.abort(rollouts)

    # The end of a step.

    def _rolled(self, last: Rollout) -> None:
        """All rollouts are over, `last` was the last; the trainer works, then weights are sent."""
        now, took_ns = self._clock.now_ns, self._train_ns(self.step)
        causes = list(last.charged_ns)
        causes[Cause.TRAIN], causes[Cause.SYNC] = took_ns, self._sync_ns
        end_ns = now + took_ns + self._sync_ns
        self._note_step(causes, rollouts_end_ns=now, end_ns=end_ns)
        self.is_rolling = False
        self._expect_step(now + self._mean_train_ns + self._sync_ns)
        self._clock.later(end_ns - now, Rank.TRAIN, self.step, self._trained)

    def _train_ns(self, step: int) -> int:
        law = self._training.train
        return 0 if law == NONE else duration_ns(law, self._draw(step, 0, Purpose.TRAIN))

    def _note_step(
        self, causes: list[int], *, rollouts_end_ns: int, end_ns: int, staleness: int = 0
    ) -> None:
        self.records.append(
            StepRecord(
                start_ns=self._start_ns,
                rollouts_end_ns=rollouts_end_ns,
                end_ns=end_ns,
                causes_ns={cause.name.lower(): causes[cause] for cause in Cause},
                all_causes_ns={c.name.lower(): self._all_causes_ns[c] for c in Cause},
                num_done=self._num_done,
                num_dropped=self._num_dropped,
                num_aborted=self._num_aborted,
                num_spoilt_groups=len(self._spoilt),
                staleness=staleness,
            )
        )

    def _expect_step(self, at_ns: int) -> None:
        """The policy may know when the next step is expected, if there is one."""
        if self.step + 1 < self._training.steps:
            self.next_ns = at_ns
            return
        for cls, pool in enumerate(self._pool.classes):
            pool.next_step = 0
            self._pool.touch(cls)

    def _trained(self, _: object) -> None:
        self.step += 1
        self.is_over = self.step == self._training.steps
        if not self.is_over:
            self.begin()
