"""What a run looks like from outside: versions, sizes, publisher and readers."""

from __future__ import annotations

from dataclasses import dataclass

from gymfast.errors import FormatError, NotFoundError
from gymfast.stores.base import Store
from gymfast.sync.chain import is_full
from gymfast.sync.clock import Clock, SystemClock
from gymfast.sync.folds import read_fold, spans
from gymfast.sync.keys import RunKeys, Span
from gymfast.sync.lease import read_leases
from gymfast.sync.log import Log
from gymfast.sync.manifest import EpochRecord, LeaseRecord, LogRecord, StateRecord


@dataclass(frozen=True)
class VersionStatus:
    """A stored state; `kind` is that of its frame, an anchor needs no base."""

    version: int
    kind: str
    root: str
    frame_bytes: int
    raw_bytes: int
    num_changed: int
    created_us: int


@dataclass(frozen=True)
class FoldStatus:
    """A fold that a compactor offers; `base_version` is -1 for a full state."""

    base_version: int
    version: int
    frame_bytes: int
    created_us: int


@dataclass(frozen=True)
class ReaderStatus:
    """A reader with a lease; `version` is the oldest one it may still need, None if unknown."""

    reader: str
    version: int | None
    expires_us: int
    is_live: bool


@dataclass(frozen=True)
class RunStatus:
    """A run; `chain_length` counts the deltas after the newest full state, None without one.

    `stored_bytes` are those of all frames, of folds too.
    """

    run: str
    epoch: int
    publisher: str
    versions: tuple[VersionStatus, ...]
    readers: tuple[ReaderStatus, ...]
    chain_length: int | None
    stored_bytes: int
    free_bytes: int | None
    folds: tuple[FoldStatus, ...] = ()

    @property
    def newest(self) -> VersionStatus | None:
        """The newest version; None before the first."""
        return self.versions[-1] if self.versions else None


def read_status(
    store: Store, run: str, *, key: bytes | None = None, clock: Clock | None = None
) -> RunStatus:
    """The status of a run from its records and leases; no object is read.

    Raises NotFoundError if the store has no such run, StoreError if the store fails.
    """
    log = Log(store, RunKeys(run), key)
    by_place, _ = log.read_all()
    if not by_place:
        raise NotFoundError(f"{store.url} has no run '{run}': no record lies in its log")
    floor = log.floor()
    records = [by_place[seq] for seq in sorted(by_place)]
    epochs = [record for record in records if isinstance(record, EpochRecord)]
    states = [r for r in records if isinstance(r, StateRecord) and r.seq >= floor]
    full = [record for record in states if is_full(record)]
    folds = tuple(_fold(span, log) for span in spans(log))
    sound_folds = tuple(fold for fold in folds if fold is not None)
    now_us = (clock or SystemClock()).wall_us()
    return RunStatus(
        run=run,
        epoch=records[-1].epoch,
        publisher=epochs[-1].publisher if epochs else "",
        versions=tuple(_version(record) for record in states),
        readers=tuple(
            _reader(lease, states, now_us)
            for _, lease in read_leases(store, log.keys)
            if isinstance(lease, LeaseRecord)  # fsck reports damaged ones
        ),
        chain_length=states[-1].version - full[-1].version if full else None,
        stored_bytes=sum(record.frame.num_bytes for record in states)
        + sum(fold.frame_bytes for fold in sound_folds),
        free_bytes=store.free_bytes(),
        folds=sound_folds,
    )


def _version(record: StateRecord) -> VersionStatus:
    return VersionStatus(
        version=record.version,
        kind="anchor" if is_full(record) else "delta",
        root=record.root,
        frame_bytes=record.frame.num_bytes,
        raw_bytes=record.raw_bytes,
        num_changed=getattr(record, "num_changed", 0),
        created_us=record.created_us,
    )


def _fold(span: Span, log: Log) -> FoldStatus | None:
    try:
        fold = read_fold(log, span)
    except (NotFoundError, FormatError):  # fsck reports damaged ones
        return None
    return FoldStatus(fold.base_version, fold.version, fold.frame.num_bytes, fold.created_us)


def _reader(lease: LeaseRecord, states: list[StateRecord], now_us: int) -> ReaderStatus:
    needed = [record.version for record in states if record.seq >= lease.seq]
    return ReaderStatus(
        reader=lease.reader,
        version=min(needed, default=None),
        expires_us=lease.expires_us,
        is_live=lease.expires_us > now_us,
    )


def find_state(records: dict[int, LogRecord], version: int | None, run: str) -> StateRecord:
    """The record of a version (None: the newest).

    Raises NotFoundError that says which versions there are.
    """
    if not records:
        raise NotFoundError(f"there is no run '{run}' in this store: nothing lies in its log")
    states = [r for _, r in sorted(records.items()) if isinstance(r, StateRecord)]
    found = [r for r in states if version is None or r.version == version]
    if not found:
        wanted = "no version yet" if version is None else f"no version {version}"
        have = f": it has {states[0].version} to {states[-1].version}" if states else ""
        raise NotFoundError(f"run '{run}' has {wanted}{have}")
    return found[-1]
