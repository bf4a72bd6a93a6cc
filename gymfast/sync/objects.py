"""Frames as objects: cut into parts on the way out, put together and checked on the way in.

Records, leases and the hint are objects that are read whole.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from gymfast.errors import ChecksumError, FormatError, NotFoundError, StoreError
from gymfast.stores.base import Store
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import MAX_OBJECT_BYTES, NUMBER_LIMIT, FrameRef, ObjectRef, StateRecord

DEFAULT_OBJECT_BYTES = 64 << 20
_READ_BYTES = 8 << 20
_NUM_READS = 8
_WHAT_TO_DO = "`gymfast sync fsck` says what is lost and what heals it"
_T = TypeVar("_T")


def check_object_bytes(object_bytes: int) -> int:
    """The number itself; ValueError if no object may be that large, or it is not positive."""
    if not 1 <= object_bytes <= MAX_OBJECT_BYTES:
        raise ValueError(f"object_bytes is {object_bytes}, expected 1 to {MAX_OBJECT_BYTES}")
    return object_bytes


@dataclass
class FrameWriter:
    """Puts the sections of one frame as objects of at most `object_bytes`, one in memory at a time.

    `seconds` is the time of all puts, hashing included. `doomed` are keys whose delete was asked
    for without an answer: it may still come, so nothing is put there again.
    """

    store: Store
    keys: RunKeys
    epoch: int
    object_bytes: int
    doomed: set[str] = field(default_factory=set)
    seconds: float = 0.0
    refs: list[ObjectRef] = field(default_factory=list)
    _made: list[str] = field(default_factory=list)

    def write(self, sections: Iterable[bytes]) -> FrameRef:
        """The reference of the frame, once all its objects are durable."""
        buffer = bytearray()
        for section in sections:
            view = memoryview(section)
            while view.nbytes:
                part = view[: self.object_bytes - len(buffer)]
                buffer += part
                view = view[part.nbytes :]
                if len(buffer) == self.object_bytes:
                    self._put(buffer)
                    buffer = bytearray()
        if buffer:
            self._put(buffer)
        return FrameRef(sum(ref.num_bytes for ref in self.refs), tuple(self.refs))

    def is_confirmed(self) -> bool:
        """True if every object is readable with its length.

        Raises StoreError if an object has another length.
        """
        for ref in self.refs:
            key = self.keys.object(self.epoch, ref.digest)
            try:
                size = self.store.size(key)
            except NotFoundError:
                return False
            if size != ref.num_bytes:
                raise StoreError(
                    f"'{key}' in {self.store.url} has {size} bytes after a put of {ref.num_bytes}"
                )
        return True

    def discard(self) -> None:
        """Deletes what this writer made new; only for frames that no record can name any more."""
        for key in self._made:
            with suppress(StoreError):
                delete_noted(self.store, key, self.doomed)
        self._made.clear()
        self.refs.clear()

    def _put(self, data: bytearray) -> None:
        start_s = time.perf_counter()
        ref = ObjectRef(hashlib.sha256(data).hexdigest(), len(data))
        key = self.keys.object(self.epoch, ref.digest)
        if key in self.doomed:
            self._put_in_halves(data)
            return
        if not self._is_there(key):
            self._made.append(key)
        self.store.put(key, memoryview(data))
        self.refs.append(ref)
        self.seconds += time.perf_counter() - start_s

    def _put_in_halves(self, data: bytearray) -> None:
        """The same bytes under names that no delete is under way for."""
        if len(data) == 1:
            raise StoreError(
                f"an object of one byte cannot be put in {self.store.url} while its delete is "
                "under way: start a new publisher"
            )
        middle = len(data) // 2
        self._put(data[:middle])
        self._put(data[middle:])

    def _is_there(self, key: str) -> bool:
        try:
            self.store.size(key)
        except NotFoundError:
            return False
        return True


def delete_noted(store: Store, key: str, doomed: set[str]) -> None:
    """Deletes an object; its key stays in `doomed` unless every delete of it was answered."""
    is_doomed = key in doomed
    doomed.add(key)
    store.delete(key)
    if not is_doomed:
        doomed.discard(key)


def read_whole(store: Store, key: str, max_bytes: int) -> bytes:
    """The bytes of a record, lease or hint.

    Raises NotFoundError if it is absent, FormatError if it is longer than `max_bytes`, StoreError.
    """
    try:
        return store.get(key, max_bytes=max_bytes)
    except NotFoundError:
        raise
    except StoreError as error:
        size = store.size(key)
        if size <= max_bytes:
            raise
        raise FormatError(
            f"'{key}' in {store.url} has {size} bytes, at most {max_bytes} are expected there: it "
            "was not written by gymfast; delete it",
            NUMBER_LIMIT,
        ) from error


def agreed(read: Callable[[], bytes]) -> bytes:
    """The bytes that two reads in a row agree on: what comes back damaged differs each time.

    For decisions that a bad read must not make. Raises what `read` raises, StoreError if no two
    reads agree.
    """
    before = read()
    for _ in range(_NUM_READS):
        blob = read()
        if blob == before:
            return blob
        before = blob
    raise StoreError(
        f"{_NUM_READS} reads in a row gave other bytes each time, last {before[:80]!r}"
    )


def settled(read: Callable[[], bytes], parse: Callable[[bytes], _T]) -> _T:
    """What `parse` makes of what `read` returns; damaged only once two reads agree on that.

    Raises what the two raise.
    """
    try:
        return parse(read())
    except FormatError:
        return parse(agreed(read))


def digest_at(store: Store, key: str) -> str:
    """The SHA-256 of an object, read a few MiB at a time, in hex; NotFoundError if it is absent."""
    sha, size = hashlib.sha256(), store.size(key)
    for start in range(0, size, _READ_BYTES):
        sha.update(store.get_range(key, start, min(_READ_BYTES, size - start)))
    return sha.hexdigest()


def read_frame(store: Store, keys: RunKeys, record: StateRecord) -> Iterator[bytes]:
    """The bytes of a frame, a few MiB at a time; the last piece of an object comes after its check.

    A store that is far away is asked for `store.num_ahead` pieces at once.
    Raises NotFoundError if an object is absent, ChecksumError if its length or digest is not that
    of the record: nothing of it may be used then.
    """
    sha = hashlib.sha256()
    tasks = _tasks(store, keys, record)
    for task, piece in zip(tasks, _in_order(tasks, store.num_ahead), strict=True):
        if task.start == 0:
            sha = hashlib.sha256()
        sha.update(piece)
        if task.start + len(piece) == task.ref.num_bytes and sha.hexdigest() != task.ref.digest:
            raise ChecksumError(
                f"'{task.key}' in {store.url} has SHA-256 {sha.hexdigest()}, its record says "
                f"{task.ref.digest}: the store returned damaged bytes; {_WHAT_TO_DO}"
            )
        yield piece


@dataclass(frozen=True)
class _Task:
    """A piece of an object that is to be read."""

    store: Store
    key: str
    ref: ObjectRef
    start: int

    def read(self) -> bytes:
        """The piece; for the first one the length of the whole is compared before."""
        if self.start == 0:
            size = self.store.size(self.key)
            if size != self.ref.num_bytes:
                raise ChecksumError(
                    f"'{self.key}' in {self.store.url} has {size} bytes, its record says "
                    f"{self.ref.num_bytes}: the object is damaged; {_WHAT_TO_DO}"
                )
        length = min(_READ_BYTES, self.ref.num_bytes - self.start)
        return self.store.get_range(self.key, self.start, length)


def _tasks(store: Store, keys: RunKeys, record: StateRecord) -> list[_Task]:
    return [
        _Task(store, keys.object(record.epoch, ref.digest), ref, start)
        for ref in record.frame.objects
        for start in range(0, ref.num_bytes, _READ_BYTES)
    ]


def _in_order(tasks: list[_Task], num_ahead: int) -> Iterator[bytes]:
    """The pieces of all tasks, with so many more under way."""
    if num_ahead == 0 or len(tasks) == 1:
        yield from (task.read() for task in tasks)
        return
    with ThreadPoolExecutor(num_ahead, "gymfast-read") as pool:
        waiting: deque[Future[bytes]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(task.read))
                if len(waiting) > num_ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
