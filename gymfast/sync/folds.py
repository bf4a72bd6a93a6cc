"""Reads and writes folds: frames that lead over many versions at once (docs/sync-protocol.md, 15).

A fold is advice: it is used where it fits the log, and what is wrong with one is a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gymfast.errors import ConflictError, FormatError, NotFoundError, StoreError
from gymfast.sync.keys import Span, folded_of, span_of, span_of_fold
from gymfast.sync.log import Log
from gymfast.sync.manifest import (
    COUNT_MAX,
    MAX_RECORD_BYTES,
    NUMBER_VALUE,
    FoldRecord,
    StateRecord,
    encode,
    parse_fold,
)
from gymfast.sync.objects import read_whole

MAX_READ = 64
"""Folds that a reader looks at for one plan: the longest ones of those that may help."""
_NUM_AHEAD = 8
_MAX_LOOKS = 8
_log = logging.getLogger(__name__)


def spans(log: Log) -> list[Span]:
    """The spans of all folds of the run, ascending; other keys are left out, with a warning.

    Raises StoreError.
    """
    prefix = log.keys.folds_prefix
    found = {key: span_of(key, prefix) for key in log.store.list(prefix)}
    if others := [key for key, span in found.items() if span is None]:
        _log.warning("%d names that no fold has are ignored, first %a", len(others), others[0])
    return sorted(span for span in found.values() if span is not None)


def parts(log: Log) -> Iterator[tuple[Span, str]]:
    """Span and key of all objects of folds, of unfinished ones too. Raises StoreError."""
    prefix = log.keys.folded_prefix
    for key in log.store.list(prefix):
        span = folded_of(key, prefix)
        if span is not None:
            yield span, key


def read_fold(log: Log, span: Span) -> FoldRecord:
    """The record of a fold.

    Raises NotFoundError if it is absent, FormatError if it is damaged, not signed with our key, or
    that of another span or run, StoreError.
    """
    key = log.keys.fold(span)
    where = f"'{key}' in {log.store.url}"
    fold = parse_fold(read_whole(log.store, key, MAX_RECORD_BYTES), where, log.key)
    if fold.run != log.keys.run or span_of_fold(fold) != span:
        raise FormatError(
            f"{where}: the fold is of run '{fold.run}', versions {fold.base_version} to "
            f"{fold.version}: objects of the store were moved or mixed",
            NUMBER_VALUE,
        )
    return fold


def read_useful(
    log: Log, first: int, last: int, without: Iterable[Span] = ()
) -> tuple[FoldRecord, ...]:
    """The folds that lead from version `first` or a later one, or from nothing, up to `last`.

    What cannot be read is left out, with a warning; nothing is raised for the store.
    """
    try:
        found = set(spans(log)).difference(without)
    except StoreError as error:
        _log.warning("run '%s' is read without its folds: %s", log.keys.run, error)
        return ()
    useful = [s for s in found if first <= s.start and s.version <= last]
    useful.sort(key=lambda span: (span.is_full, span.version - span.base, span.version))
    chosen = useful[-MAX_READ:]
    if log.store.num_ahead == 0 or len(chosen) < 2:
        folds = [_if_sound(log, span) for span in chosen]
    else:
        with ThreadPoolExecutor(_NUM_AHEAD, "gymfast-folds") as pool:
            folds = list(pool.map(lambda span: _if_sound(log, span), chosen))
    return tuple(fold for fold in folds if fold is not None)


def newest_version(log: Log) -> int:
    """A version that no later one of the log exceeds, by its newest sound state; raises StoreError.

    COUNT_MAX if none of the newest records is one.
    """
    places = log.places()
    for seq in places[: -_MAX_LOOKS - 1 : -1]:
        with suppress(NotFoundError, FormatError):
            record, _ = log.read(seq)
            if isinstance(record, StateRecord):
                return record.version + places[-1] - seq
    return COUNT_MAX


def create_fold(log: Log, fold: FoldRecord) -> bool:
    """Puts the record of a fold in its place; False if a fold of this span is there.

    Raises StoreError. Where the store has no create-only writes a look comes before the put: of
    two folds of one span either is as good.
    """
    key, blob = log.keys.fold(span_of_fold(fold)), encode(fold)
    try:
        if log.store.has_create_only:
            log.store.create(key, blob)
        elif _exists(log, key):
            return False
        else:
            log.store.put(key, blob)
    except ConflictError:
        return False
    return True


def _exists(log: Log, key: str) -> bool:
    try:
        log.store.size(key)
    except NotFoundError:
        return False
    return True


def _if_sound(log: Log, span: Span) -> FoldRecord | None:
    try:
        return read_fold(log, span)
    except (FormatError, StoreError) as error:
        _log.warning("run '%s' is read without a fold: %s", log.keys.run, error)
        return None
