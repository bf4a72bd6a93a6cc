"""Answers of a store that a relay gives to all who ask for the same, as long as they count.

An answer about what may change counts for a moment; a record of the log or of a fold for longer, as
it never changes, but not for ever, as it might have been damaged on the way.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gymfast.errors import NotFoundError

_RECORD_FRESHNESS_S = 10.0
_MAX_ANSWERS = 4096
_MAX_BYTES = 64 << 20
_T = TypeVar("_T")
Fetch = Callable[[], Any]
_Place = tuple[str, str]


@dataclass
class _Answer:
    """What is told, or will be; its bytes count once they are there."""

    since_s: float
    future: Future[Any] = field(default_factory=Future)
    num_bytes: int = 0


class Answers:
    """Answers by operation and name, safe to ask from many threads.

    They keep up to 64 MiB, or the newest alone; those not used for longest go first.
    """

    def __init__(self, freshness_s: float) -> None:
        self._freshness_s = freshness_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Place, _Answer] = OrderedDict()
        self._num_bytes = 0

    def fresh(self, operation: str, name: str, fetch: Callable[[], _T]) -> _T:
        """The answer of the store, one call for all who ask within the freshness limit."""
        place = (operation, name)
        now_s = time.monotonic()
        with self._lock:
            answer = self._kept.get(place)
            is_mine = answer is None or (
                answer.future.done() and now_s - answer.since_s > self._limit_s(place, answer)
            )
            if is_mine or answer is None:
                self._remove(place)
                answer = self._kept[place] = _Answer(now_s)
            self._kept.move_to_end(place)
        if is_mine:
            settle(answer.future, fetch)
            self._settled(place, answer)
        told: _T = answer.future.result()
        return told

    def forget(self, key: str) -> None:
        """Asks anew about a key that was just written, and for lists that may have it."""
        with self._lock:
            for place in [p for p in self._kept if p[1] == key or _lists(p, key)]:
                self._remove(place)

    def _settled(self, place: _Place, answer: _Answer) -> None:
        """Counts an answer that is there; a failure was told to those who waited, and goes."""
        error = answer.future.exception()
        with self._lock:
            if self._kept.get(place) is not answer:
                return
            if error is not None and not isinstance(error, NotFoundError):
                self._remove(place)
                return
            answer.num_bytes = 0 if error is not None else _num_bytes(answer.future.result())
            self._num_bytes += answer.num_bytes
            self._kept.move_to_end(place)
            while len(self._kept) > _MAX_ANSWERS or (
                self._num_bytes > _MAX_BYTES and len(self._kept) > 1
            ):
                self._remove(next(iter(self._kept)))

    def _remove(self, place: _Place) -> None:
        """Lets go of an answer, if there is one; the lock is held."""
        removed = self._kept.pop(place, None)
        if removed is not None:
            self._num_bytes -= removed.num_bytes

    def _limit_s(self, place: _Place, answer: _Answer) -> float:
        is_kept = place[0] == "get" and is_record(place[1]) and answer.future.exception() is None
        return _RECORD_FRESHNESS_S if is_kept else self._freshness_s


def settle(future: Future[Any], work: Fetch) -> None:
    """Gives the future the result of `work`, or what it raised."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise


def is_record(key: str) -> bool:
    """True for the key of a record of the log or of a fold."""
    parts = key.split("/")
    return len(parts) == 3 and parts[1] in ("log", "folds")


def _lists(place: _Place, key: str) -> bool:
    """True if the answer there is a list that the key may belong to."""
    return place[0] == "list" and key.startswith(place[1])


def _num_bytes(answer: object) -> int:
    """Memory that an answer takes: bytes, a number, or the keys of a list."""
    keys = answer if isinstance(answer, tuple) else ()
    return sys.getsizeof(answer) + sum(map(sys.getsizeof, keys))
