"""Folds for `fsck`: what is wrong with one endangers no version, so it is waste, never damage."""

from __future__ import annotations

from collections.abc import Iterator

from gymfast.errors import FormatError, NotFoundError, StoreError
from gymfast.stores.base import Store
from gymfast.sync.chain import EMPTY_ROOT, end_of
from gymfast.sync.folds import read_fold
from gymfast.sync.fsck_log import GC_REMOVES_IT, Finding, LogCheck
from gymfast.sync.fsck_strays import BY_HAND
from gymfast.sync.keys import Span, folded_of, span_of
from gymfast.sync.log import Log
from gymfast.sync.manifest import FoldRecord, ObjectRef
from gymfast.sync.objects import digest_at

_REPAIR = "readers go without it; delete it, or wait until the floor has passed it"
_UNFINISHED = "a compactor may be at it; else `gymfast sync gc` removes it below the floor"


def find_bad_folds(log: Log, found: LogCheck, *, reads_objects: bool) -> Iterator[Finding]:
    """Folds that are damaged or fit no place of the log, and objects that no fold names."""
    keys, named, seen = log.keys, set(), set()
    roots = {entry.tip.version: entry.tip.root for entry in found.entries}
    lowest = min((v for v in roots if v is not None), default=0)
    for key in log.store.list(keys.folds_prefix):
        span = span_of(key, keys.folds_prefix)
        if span is None:
            yield Finding("waste", key, "gymfast gives no fold this name", BY_HAND)
            continue
        seen.add(span)
        try:
            fold = read_fold(log, span)
        except NotFoundError:
            continue
        except FormatError as error:
            yield Finding("waste", key, str(error), _REPAIR)
            continue
        named |= {keys.of(fold).object(0, ref.digest) for ref in fold.frame.objects}
        if span.start < lowest:
            yield Finding("waste", key, "it starts before the floor", GC_REMOVES_IT)
        elif not _fits(fold, found, roots):
            yield Finding("waste", key, "it does not fit the log", _REPAIR)
        elif problem := _frame_problem(log, fold, reads=reads_objects):
            yield Finding("waste", key, problem, _REPAIR)
    yield from _find_loose(log, named, seen)


def object_problem(store: Store, key: str, ref: ObjectRef, *, reads: bool) -> str:
    """What is wrong with an object; "" for nothing."""
    try:
        size = store.size(key)
        if size != ref.num_bytes:
            return f"it has {size} bytes, its record says {ref.num_bytes}"
        found = digest_at(store, key) if reads else ref.digest
    except NotFoundError:
        return "it is missing"
    except StoreError as error:
        return f"it cannot be read: {error}"
    return "" if found == ref.digest else f"its bytes have SHA-256 {found}: they are damaged"


def _fits(fold: FoldRecord, found: LogCheck, roots: dict[int | None, str]) -> bool:
    base_root = EMPTY_ROOT if fold.base_version < 0 else roots.get(fold.base_version)
    end = end_of(fold)
    return fold.base_root == base_root and any(entry.tip == end for entry in found.entries)


def _frame_problem(log: Log, fold: FoldRecord, *, reads: bool) -> str:
    """What is wrong with the first object that is not sound; "" for nothing."""
    keys = log.keys.of(fold)
    for ref in fold.frame.objects:
        key = keys.object(0, ref.digest)
        if problem := object_problem(log.store, key, ref, reads=reads):
            return f"object '{key}': {problem}"
    return ""


def _find_loose(log: Log, named: set[str], seen: set[Span]) -> Iterator[Finding]:
    prefix = log.keys.folded_prefix
    for key in log.store.list(prefix):
        span = folded_of(key, prefix)
        if span is None:
            yield Finding("waste", key, "gymfast gives no object this name", BY_HAND)
        elif span not in seen:
            yield Finding("waste", key, f"fold {span} is not finished", _UNFINISHED)
        elif key not in named:
            yield Finding("waste", key, "its fold does not name it", _UNFINISHED)
