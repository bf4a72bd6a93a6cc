"""Walks a table of commit.py with real answers, pauses and a deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gymfast.errors import StoreError
from gymfast.sync.clock import Clock, Deadline
from gymfast.sync.commit import FINAL, Answer, Step

Action = Callable[[], Answer]
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 2.0


class Drive:
    """One attempt; `error` is the newest StoreError, which is the reason where it fails."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self.error: StoreError | None = None

    def run(
        self, table: Mapping[tuple[Step, Answer], Step], start: Step, actions: Mapping[Step, Action]
    ) -> Step:
        """The final step. An action returns an answer or raises StoreError, which counts as ERROR.

        The deadline counts from the first step after the objects are written: how long writing
        takes depends on their size.
        """
        step, deadline = start, Deadline(self._clock, self._timeout_s)
        pause_s = _FIRST_PAUSE_S
        while step not in FINAL:
            answer = self._ask(actions[step])
            following = table[step, answer]
            if step is Step.PUT:
                deadline = Deadline(self._clock, self._timeout_s)
            elif answer in (Answer.ERROR, Answer.ABSENT) and following not in FINAL:
                if deadline.has_passed:
                    following = table[step, Answer.GIVE_UP]
                else:
                    self._clock.sleep(min(pause_s, deadline.left_s))
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            step = following
        return step

    def _ask(self, action: Action) -> Answer:
        try:
            return action()
        except StoreError as error:
            self.error = error
            return Answer.ERROR
