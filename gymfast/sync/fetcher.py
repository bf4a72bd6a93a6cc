"""Plans, takes a lease, and fetches all frames of the plan; plans again where something is gone."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack

from gymfast.errors import ChainError, FormatError, NotFoundError, StoreError
from gymfast.sync.chain import Costs, Plan, Step
from gymfast.sync.clock import Clock, Deadline
from gymfast.sync.fold_choice import FoldChoice
from gymfast.sync.lease import Lease
from gymfast.sync.log import Log
from gymfast.sync.manifest import FoldRecord, StateRecord
from gymfast.sync.requests import Pending
from gymfast.sync.staging import MAX_EXPECTED, Advance, Staged, StagedFrame, Stager, name_of
from gymfast.sync.view import View

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_MAX_OVERTAKEN = 8
_NUM_READS = 3  # of an object that comes back damaged, before it counts as damaged in the store
_log = logging.getLogger(__name__)


class _PlanAgainError(Exception):
    """Something that the plan needs is gone or damaged."""


class _BadFoldError(Exception):
    """A fold of the plan cannot be fetched; the log has a way without it."""


class Fetcher:
    """Brings a version into staging. `timeout_s` bounds each wait in which nothing arrives."""

    def __init__(
        self, log: Log, view: View, stager: Stager, lease: Lease, clock: Clock, timeout_s: float
    ) -> None:
        self._log = log
        self._view = view
        self._stager = stager
        self._lease = lease
        self._clock = clock
        self._timeout_s = timeout_s
        self._folds = FoldChoice(log, view)
        self._unusable: dict[int, str] = {}
        self._advance: Advance | None = None
        self._num_bytes = 0
        self._guard: Pending[int] | None = None

    def expect(self, record: StateRecord, needed: int) -> None:
        """Begins to fetch a version that the plan is going to lead over, from record `needed` on.

        Only where the store is far. Lease and mark are on their way then, in this order, while
        bytes come: these are compared with their record whatever happens to the objects.
        """
        if self._log.requests.is_far:
            self._stager.expect(record)
            if not 0 < self._lease.seq <= needed:
                self._take_lease(needed, record.seq)

    def forget(self) -> None:
        """Gives back what was begun, and the lease."""
        self._stager.drop_expected()
        self._guard = None
        self._lease.release()

    def close(self) -> None:
        """As `forget`, and waits until it is done."""
        self.forget()
        self._lease.close()
        self._stager.close()
        self._log.requests.close()

    def fetch(
        self, target: int | None, costs: Costs, *, is_decoded: bool, advance: Advance | None
    ) -> Staged:
        """All frames that lead to the target, checked and held.

        Raises ChainError and NotFoundError if there is no way to it, BudgetError if it cannot be
        staged, FormatError for damaged frames without which there is no way, StoreError and
        DeadlineError. Nothing is held then.
        """
        self._unusable.clear()
        self._folds.begin()
        self._advance = advance
        num_overtaken = 0
        while True:
            plan = self._plan_with_folds(target, costs)
            if not plan.steps:
                return Staged(plan, ())
            self._stager.require_room(plan)
            if not 0 < self._lease.seq <= plan.first_seq or self._guard is None:
                self._take_lease(plan.first_seq, plan.end.seq)
            num_unusable = len(self._unusable)
            try:
                if not self._log.requests.is_far:
                    self._require_kept(plan)
                return self._fetch_all(plan, is_decoded=is_decoded)
            except _BadFoldError:
                continue
            except _PlanAgainError as error:
                _log.warning("run '%s': planning again: %s", self._log.keys.run, error)
                num_overtaken += len(self._unusable) == num_unusable
                if num_overtaken > _MAX_OVERTAKEN:
                    raise StoreError(
                        f"run '{self._log.keys.run}': retention overtook this reader "
                        f"{num_overtaken} times, last: {error}; keep more versions, or raise "
                        "lease_s"
                    ) from error
                self._view.reload()

    def distrust(self, plan: Plan) -> None:
        """Folds of a plan that could not be installed are not used again."""
        self._folds.distrust(plan)

    def _plan_with_folds(self, target: int | None, costs: Costs) -> Plan:
        """The plan; folds are looked for where it has many frames, or the log is damaged."""
        plan = failure = None
        try:
            plan = self._plan(target, costs)
        except (ChainError, NotFoundError) as error:
            if isinstance(error, NotFoundError) and not self._log.damage:
                raise
            failure = error
        is_broken = failure is not None or bool(self._log.damage)
        if self._folds.look_if_useful(None if is_broken else plan, target):
            if is_broken:
                self._view.reload()
            try:
                return self._plan(target, costs)
            except (ChainError, NotFoundError):
                if plan is None:  # else folds led into a part of the log without that version
                    raise
        if plan is None:
            raise failure or ChainError("there is no plan")
        return plan

    def _plan(self, target: int | None, costs: Costs) -> Plan:
        """The plan; where there is none, the error also says what is damaged or lost."""
        try:
            return self._view.plan(target, costs, self._unusable)
        except ChainError as error:
            if not self._unusable:
                raise
            raise ChainError("; ".join((str(error), *self._unusable.values()))) from error

    def _give_up(self, step: Step, what: str) -> Exception:
        if isinstance(step.record, FoldRecord):
            self._folds.drop(step.record, what)
            return _BadFoldError(what)
        self._unusable[step.record.seq] = what
        return _PlanAgainError(what)

    def _take_lease(self, seq: int, known: int) -> None:
        self._guard = self._lease.take(seq, lambda: self._log.floor(known))

    def _require_kept(self, plan: Plan) -> None:
        """Raises _PlanAgainError if retention passed by before it saw the lease.

        Waits for the answer, and forgets it: it holds for as long as the lease.
        """
        guard, self._guard = self._guard, None
        if guard is None or guard.result() <= plan.first_seq:
            return
        first = plan.steps[0]
        if isinstance(first.record, FoldRecord):  # kept for another reader, or made too late
            what = f"retention has passed the base of the fold to version {first.record.version}"
            raise self._give_up(first, what)
        raise _PlanAgainError("retention was faster")

    def _look_at_mark(self, plan: Plan) -> None:
        """As `_require_kept`, while bytes come: these need no mark, so one that fails is let be."""
        try:
            self._require_kept(plan)
        except StoreError as error:
            _log.warning("run '%s': no look at the floor: %s", self._log.keys.run, error)

    def _is_gone(self, plan: Plan) -> bool:
        """True if retention may have deleted what the plan needs, by a look after the lease."""
        self._require_kept(plan)
        return self._log.floor(plan.end.seq) > plan.first_seq

    def _fetch_all(self, plan: Plan, *, is_decoded: bool) -> Staged:
        start_s, verify_before = time.perf_counter(), self._stager.verify_s
        self._num_bytes = 0
        self._stager.drop_expected(but=[name_of(step.record) for step in plan.steps])
        with ExitStack() as stack:
            frames: list[StagedFrame] = []
            for number, step in enumerate(plan.steps):
                for following in plan.steps[number : number + MAX_EXPECTED]:
                    self._stager.expect(following.record, is_planned=True)
                frame = self._fetch_one(plan, step, is_decoded=is_decoded)
                stack.callback(frame.close)
                frames.append(frame)
            stack.pop_all()
        verify_s = self._stager.verify_s - verify_before
        fetch_s = time.perf_counter() - start_s - verify_s
        return Staged(plan, tuple(frames), fetch_s, verify_s)

    def _fetch_one(self, plan: Plan, step: Step, *, is_decoded: bool) -> StagedFrame:
        num_before, num_reads = self._num_bytes, 0
        furthest = num_before
        # A fold is not worth waiting for: there is a way without it.
        deadline = Deadline(self._clock, 0.0 if step.is_fold else self._timeout_s)
        where = f"version {step.record.version} (record {step.record.seq})"
        error: StoreError | None = None

        def tick(num_bytes: int) -> None:
            nonlocal furthest
            self._lease.renew()
            if self._guard is not None and self._guard.is_here:
                self._look_at_mark(plan)
            self._num_bytes += num_bytes
            if self._num_bytes > furthest:  # bytes that a repetition brings again are no progress
                furthest = self._num_bytes
                deadline.restart()
            if self._advance is not None:
                self._advance(self._num_bytes, plan.num_bytes)

        for _ in deadline.pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            self._num_bytes = num_before
            try:
                return self._stager.fetch(step, tick, is_decoded=is_decoded)
            except FormatError as damage:
                num_reads += 1
                if num_reads == _NUM_READS:
                    raise self._give_up(step, f"{where} is damaged: {damage}") from damage
            except NotFoundError as missing:
                error = missing
                if not step.is_fold and self._is_gone(plan):
                    raise _PlanAgainError(f"{where} was deleted: {missing}") from missing
            except StoreError as failure:
                error = failure
        if step.is_fold or isinstance(error, NotFoundError):
            what = f"{where} is lost: {error}; `gymfast sync fsck` says what heals it"
            raise self._give_up(step, what) from error
        deadline.require(f"fetching {where}: {error}")
        raise StoreError(f"{where} cannot be fetched: {error}")
