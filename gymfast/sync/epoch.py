"""Claims the epoch of a publisher: the create-only record that fences all publishers before it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

from gymfast.errors import (
    ChainError,
    ConflictError,
    DeadlineError,
    FormatError,
    NotFoundError,
    StoreError,
)
from gymfast.sync.chain import Entry, Tip, follow
from gymfast.sync.clock import Clock
from gymfast.sync.commit import CLAIM, Answer, Step, classify
from gymfast.sync.drive import Drive
from gymfast.sync.log import Log
from gymfast.sync.manifest import FORMAT, EpochRecord, LogRecord, digest_of, encode, sign

_NUM_TRIES = 8


def publisher_label() -> str:
    """Host and process, for the error of whoever gets fenced."""
    host = socket.gethostname().encode("ascii", "replace").decode()
    return f"{host} pid {os.getpid()}"[:256]


def new_nonce() -> str:
    """32 random hex digits."""
    return secrets.token_hex(16)


def created_us(clock: Clock) -> int:
    """The wall clock as records hold it: never negative."""
    return max(0, clock.wall_us())


def claim_epoch(log: Log, clock: Clock, timeout_s: float, label: str) -> tuple[Tip, list[Entry]]:
    """The tip at the own epoch record, and the entries before it as far as they are sound.

    Raises DeadlineError if the store does not answer in time, ConflictError without the key of a
    run that is signed: its readers would refuse all that follows.
    """
    for _ in range(_NUM_TRIES):
        entries = _known(log)
        if entries and log.read_agreed(entries[-1].record.seq)[1] != entries[-1].tip.record:
            continue  # it came back damaged, in a way that nothing else shows
        if entries:
            require_key(log, entries[-1].record)
        claim = _Claim(log, clock, label, entries[-1].tip if entries else None)
        actions: dict[Step, Callable[[], Answer]] = {
            Step.CREATE: claim.create,
            Step.READ_BACK: claim.read_back,
            Step.ADVANCE: claim.advance,
        }
        drive = Drive(clock, timeout_s)
        if drive.run(CLAIM, Step.CREATE, actions) is not Step.DONE:
            raise DeadlineError(
                f"run '{log.keys.run}': no epoch could be claimed in {log.store.url} within "
                f"{timeout_s:g} s: {drive.error or 'the record does not become visible'}"
            )
        # A place that retention had emptied is no place at the end of the log.
        if log.floor(claim.tip.seq) <= claim.tip.seq:
            return claim.tip, entries + claim.followed
    raise ConflictError(f"run '{log.keys.run}': other publishers keep moving the log; try again")


def require_key(log: Log, newest: LogRecord) -> None:
    """Raises ConflictError if the run is signed, as `newest` says, and the log has no key."""
    if log.key is None and newest.mac:
        raise ConflictError(
            f"run '{log.keys.run}' in {log.store.url} is signed: its readers refuse records "
            "without a signature; write with its key (key=, --key-file), or to another run"
        )


def _known(log: Log) -> list[Entry]:
    """All entries that retention left, or none if the log is damaged."""
    try:
        return log.load(lambda _: False)
    except ChainError:
        return []


class _Claim:
    """The steps of one claim."""

    def __init__(self, log: Log, clock: Clock, label: str, tip: Tip | None) -> None:
        self._log = log
        self._clock = clock
        self._label = label
        self._nonce = new_nonce()
        self.tip = tip or Tip()
        after = [seq for seq in log.places() if seq > self.tip.seq]
        if after and after[0] != self.tip.seq + 1:
            self.tip = log.salvaged_tip()
        self.followed: list[Entry] = []

    def create(self) -> Answer:
        record = self._record()
        try:
            self._log.create(record)
        except ConflictError:
            return Answer.EXISTS
        self._take(record)
        return Answer.OK

    def read_back(self) -> Answer:
        try:
            found, _ = self._log.read_agreed(self.tip.seq + 1)
        except NotFoundError:
            return Answer.ABSENT
        except FormatError:
            return Answer.OTHER
        answer = classify(found, self._nonce, ())
        if answer is Answer.MINE:
            self._take(self._record_as(found))
        return answer

    def advance(self) -> Answer:
        try:
            found, digest = self._log.read_agreed(self.tip.seq + 1)
            entry = follow(self.tip, found, digest, self._log.keys.run)
        except NotFoundError:
            return Answer.ABSENT
        except (FormatError, ChainError):
            self.tip = self._log.salvaged_tip()
        else:
            self.followed.append(entry)
            self.tip = entry.tip
        return Answer.OK

    def _record(self) -> EpochRecord:
        record = EpochRecord(
            format=FORMAT,
            run=self._log.keys.run,
            seq=self.tip.seq + 1,
            epoch=self.tip.epoch + 1,
            nonce=self._nonce,
            previous=self.tip.record,
            created_us=created_us(self._clock),
            publisher=self._label,
        )
        return sign(record, self._log.key)

    def _record_as(self, found: LogRecord) -> EpochRecord:
        if not isinstance(found, EpochRecord):
            raise StoreError(f"record {found.seq} has our nonce, but is no epoch: {found}")
        return found

    def _take(self, record: EpochRecord) -> None:
        before = self.tip
        self.tip = Tip(
            record.seq, digest_of(encode(record)), record.epoch, before.version, before.root
        )
        self.followed.append(Entry(record, self.tip))
