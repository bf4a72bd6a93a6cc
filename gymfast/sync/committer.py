"""Commits records at the end of the log, and knows when somebody else took it over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from gymfast.errors import ConflictError, DeadlineError, FormatError, NotFoundError, StoreError
from gymfast.sync.chain import Entry, Tip, follow
from gymfast.sync.clock import Clock
from gymfast.sync.commit import COMMIT, Answer, Step, classify
from gymfast.sync.drive import Action, Drive
from gymfast.sync.epoch import created_us, new_nonce
from gymfast.sync.log import Log
from gymfast.sync.manifest import EpochRecord, LogRecord, StateRecord, digest_of, encode, sign


@dataclass(frozen=True)
class Place:
    """Where the next record goes, and what every attempt to put it there has to say."""

    run: str
    tip: Tip
    nonce: str
    created_us: int


Make = Callable[[Place], StateRecord]


class Committer:
    """The end of the log as this publisher knows it."""

    def __init__(
        self, log: Log, clock: Clock, timeout_s: float, tip: Tip, entries: Iterable[Entry]
    ) -> None:
        """A committer right after the own epoch record, at `tip`; `entries` are known before it."""
        self._log = log
        self._clock = clock
        self._timeout_s = timeout_s
        self._attempts: list[str] = []
        self.records: dict[int, LogRecord] = {e.record.seq: e.record for e in entries}
        self.tip = tip
        self.fence = ""
        self.seconds = 0.0
        self.was_created = False
        self._drive = Drive(clock, timeout_s)

    @property
    def has_open_attempts(self) -> bool:
        """True if a record that was given up may still appear, and needs its objects then."""
        return bool(self._attempts)

    def require_in_charge(self) -> None:
        """Raises ConflictError that names the fence if another publisher took over."""
        if self.fence:
            raise ConflictError(self.fence)

    def commit(self, make: Make, put: Action | None = None, confirm: Action | None = None) -> Step:
        """Puts objects, confirms them, creates the record that `make` gives.

        DONE: the record is the new tip. ADOPT: an earlier attempt is; commit again after it.
        FENCED and FAILED: see `raise_failure`. Without `put` the objects are there already.
        `seconds` is then the time without `put`.
        """
        attempt = _Attempt(self, make, self._log, self._clock)
        self.was_created = False
        self._drive = Drive(self._clock, self._timeout_s)
        actions: dict[Step, Action] = {
            Step.CREATE: attempt.create,
            Step.READ_BACK: attempt.read_back,
        }
        start_s = time.perf_counter()
        if put is not None and confirm is not None:
            actions |= {Step.PUT: put, Step.CONFIRM: lambda: attempt.confirm(confirm)}
        step = self._drive.run(COMMIT, Step.CREATE if put is None else Step.PUT, actions)
        self.seconds = time.perf_counter() - start_s
        if step is Step.DONE:
            assert attempt.made is not None
            self._move(attempt.made, digest_of(encode(attempt.made)))
        elif step is Step.ADOPT:
            assert attempt.found is not None
            self._move(*attempt.found)
        elif step is Step.FENCED:
            self.fence = self._fence_text(attempt)
        return step

    def raise_failure(self, what: str) -> NoReturn:
        """Raises the error of the commit that failed: the store's own, or a DeadlineError."""
        if self._drive.error is not None:
            raise self._drive.error
        raise DeadlineError(
            f"{what} of run '{self._log.keys.run}' was not committed: {self._log.store.url} did "
            f"not show what was written within {self._timeout_s:g} s; publish again"
        )

    def note_attempt(self, nonce: str) -> None:
        """From here on a record with this nonce may appear at the end of the log."""
        self._attempts.append(nonce)
        self.was_created = True

    def classify(self, found: LogRecord, nonce: str) -> Answer:
        """Whose record was found where the next one should go."""
        return classify(found, nonce, self._attempts)

    def _move(self, record: LogRecord, digest: str) -> None:
        self.tip = follow(self.tip, record, digest, self._log.keys.run).tip
        self.records[record.seq] = record
        self._attempts.clear()

    def _fence_text(self, attempt: _Attempt) -> str:
        place = f"record {self.tip.seq + 1} of run '{self._log.keys.run}'"
        who = "is damaged or of another publisher"
        if attempt.is_below_floor:
            who = "lies before the records that a newer publisher keeps"
        if attempt.found is not None and isinstance(attempt.found[0], EpochRecord):
            found = attempt.found[0]
            who = f"says that '{found.publisher}' took over with epoch {found.epoch}"
        return (
            f"this publisher of epoch {self.tip.epoch} is fenced: {place} {who}; "
            "what it wrote is not in the run; stop this trainer, "
            "or start a new publisher to take over in turn"
        )


class _Attempt:
    """Create and read back, for one record."""

    def __init__(self, committer: Committer, make: Make, log: Log, clock: Clock) -> None:
        self._committer = committer
        self._make = make
        self._log = log
        self._place = Place(log.keys.run, committer.tip, new_nonce(), created_us(clock))
        self.made: StateRecord | None = None
        self.found: tuple[LogRecord, str] | None = None
        self.is_below_floor = False

    def create(self) -> Answer:
        if self.made is None:
            self.made = sign(self._make(self._place), self._log.key)
            self._committer.note_attempt(self._place.nonce)
        try:
            self._log.create(self.made)
        except ConflictError:
            return Answer.EXISTS
        return Answer.EXISTS if self._is_below_floor() else Answer.OK

    def _is_below_floor(self) -> bool:
        """True if retention emptied the place before: it is not the end of the log.

        The mark is there before anything is deleted, so a look after the create is enough.
        """
        seq = self._place.tip.seq + 1
        self.is_below_floor = self._log.floor(seq) > seq
        return self.is_below_floor

    def confirm(self, confirm: Action) -> Answer:
        """Missing objects may be late, or a newer publisher has removed them."""
        answer = confirm()
        return self.read_back() if answer is Answer.ABSENT else answer

    def read_back(self) -> Answer:
        try:
            self.found = self._log.read_agreed(self._place.tip.seq + 1)
        except NotFoundError:
            return Answer.ABSENT
        except FormatError:
            return Answer.OTHER
        found, digest = self.found
        answer = self._committer.classify(found, self._place.nonce)
        if answer is Answer.MINE and (self.made is None or digest != digest_of(encode(self.made))):
            raise StoreError(f"record {found.seq} came back changed from {self._log.store.url}")
        is_ours = answer in (Answer.MINE, Answer.EARLIER)
        return Answer.OTHER if is_ours and self._is_below_floor() else answer
