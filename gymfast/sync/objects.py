"""Frames as objects: cut into parts on the way out, put together and checked on the way in.

Records, leases and the hint are objects that are read whole.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from gymfast.errors import ChecksumError, ConflictError, FormatError, NotFoundError, StoreError
from gymfast.stores.base import Store, shows_puts
from gymfast.sync.bandwidth import get_known
from gymfast.sync.budget import Reading
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import (
    MAX_OBJECT_BYTES,
    NUMBER_LIMIT,
    FrameRecord,
    FrameRef,
    ObjectRef,
)
from gymfast.sync.requests import READS_PER_AHEAD, Pending, Requests
from gymfast.sync.several import several

DEFAULT_OBJECT_BYTES = 64 << 20
_READ_BYTES = 8 << 20
_NUM_READS = 8
_FIRST_OBJECT_BYTES = 1 << 20
_OBJECTS_PER_SIZE = 16
_MAX_DOUBLINGS = 3  # to 8 MiB: what object stores take, and give, in one request
_MAX_SMALL_OBJECTS = 8192
_PUTS_PER_AHEAD = 2
_WHAT_TO_DO = "`gymfast sync fsck` says what is lost and what heals it"
_T = TypeVar("_T")


def check_object_bytes(object_bytes: int) -> int:
    """The number itself; ValueError if no object may be that large, or it is not positive."""
    if not 1 <= object_bytes <= MAX_OBJECT_BYTES:
        raise ValueError(f"object_bytes is {object_bytes}, expected 1 to {MAX_OBJECT_BYTES}")
    return object_bytes


@dataclass
class FrameWriter:
    """Puts the sections of one frame as objects of at most `object_bytes`, so much in memory.

    A store that is far away gets small objects first, several at once, while the frame is made.
    `seconds` is the time for which the maker of the frame waited for puts. `creates`: objects are
    created, and only those that are there already are put; the store must have create-only writes.
    `named` are the keys that other records need: they are not new, even where their lengths are
    shown late.
    `tell` hears of each object before it is put, from the thread that puts it.
    `doomed` are keys whose delete was asked for without an answer: it may still come, so nothing is
    put there again.
    """

    store: Store
    keys: RunKeys
    epoch: int
    object_bytes: int
    creates: bool = False
    named: Collection[str] = frozenset()
    tell: Callable[[ObjectRef], None] | None = None
    doomed: set[str] = field(default_factory=set)
    seconds: float = 0.0
    refs: list[ObjectRef] = field(default_factory=list)
    _made: list[str] = field(default_factory=list)
    _waiting: deque[tuple[int, Future[list[ObjectRef]]]] = field(default_factory=deque)

    def write(self, sections: Iterable[bytes]) -> FrameRef:
        """The reference of the frame, once all its objects are durable."""
        if self.store.num_ahead == 0:
            self._write(sections, None)
        else:
            num_threads = _PUTS_PER_AHEAD * self.store.num_ahead
            with ThreadPoolExecutor(num_threads, "gymfast-put") as threads:  # waits for all puts
                try:
                    self._write(sections, threads)
                finally:
                    self._waiting.clear()
        return FrameRef(sum(ref.num_bytes for ref in self.refs), tuple(self.refs))

    def is_confirmed(self) -> bool:
        """True if every object is readable with its length, or the store promises that.

        Raises StoreError if an object has another length.
        """
        if shows_puts(self.store):
            return True
        keys = [self.keys.object(self.epoch, ref.digest) for ref in self.refs]
        with closing(sizes_of(self.store, keys)) as sizes:
            for key, ref, pending in zip(keys, self.refs, sizes, strict=True):
                try:
                    size = pending.result()
                except NotFoundError:
                    return False
                if size != ref.num_bytes:
                    raise StoreError(
                        f"'{key}' in {self.store.url} has {size} bytes after a put of "
                        f"{ref.num_bytes}"
                    )
        return True

    def discard(self) -> None:
        """Deletes what this writer made new; only for frames that no record can name any more."""
        for key in self._made:
            with suppress(StoreError):
                delete_noted(self.store, key, self.doomed)
        self._made.clear()
        self.refs.clear()

    def _write(self, sections: Iterable[bytes], threads: ThreadPoolExecutor | None) -> None:
        buffer, num_cut = bytearray(), 0
        wanted = self._next_bytes(num_cut)
        for section in sections:
            view = memoryview(section)
            while view.nbytes:
                part = view[: wanted - len(buffer)]
                buffer += part
                view = view[part.nbytes :]
                if len(buffer) == wanted:
                    num_cut += 1
                    wanted = self._next_bytes(num_cut)
                    self._hand_over(buffer, threads, wanted)
                    buffer = bytearray()
        if buffer:
            self._hand_over(buffer, threads, 0)
        self._take(0, 0)

    def _next_bytes(self, num_cut: int) -> int:
        """The length of the next object: over a long way the first ones are to leave soon.

        Doubled every few objects, up to what goes in one request; the largest frames get large
        objects all the same, as the record lists them all.
        """
        if self.store.num_ahead == 0 or num_cut >= _MAX_SMALL_OBJECTS:
            return self.object_bytes
        doublings = min(num_cut // _OBJECTS_PER_SIZE, _MAX_DOUBLINGS)
        return min(self.object_bytes, _FIRST_OBJECT_BYTES << doublings)

    def _hand_over(self, data: bytearray, threads: ThreadPoolExecutor | None, more: int) -> None:
        """Puts an object, or lets a thread do so; then there is room for `more` bytes."""
        start_s = time.perf_counter()
        if threads is None:
            self.refs.extend(self._put(data))
        else:
            self._waiting.append((len(data), threads.submit(self._put, data)))
            self._take(self.object_bytes, more)
        self.seconds += time.perf_counter() - start_s

    def _take(self, room: int, more: int) -> None:
        """Waits for puts until those under way, and `more` bytes, fit into `room`."""
        start_s = time.perf_counter()
        while self._waiting and sum(size for size, _ in self._waiting) + more > room:
            self.refs.extend(self._waiting.popleft()[1].result())
        self.seconds += time.perf_counter() - start_s

    def _put(self, data: bytearray) -> list[ObjectRef]:
        ref = ObjectRef(hashlib.sha256(data).hexdigest(), len(data))
        key = self.keys.object(self.epoch, ref.digest)
        if key in self.doomed:
            return self._put_in_halves(data)
        if self.tell is not None:
            self.tell(ref)
        if self.creates and len(data) <= _READ_BYTES:
            try:
                self.store.create(key, memoryview(data))
            except ConflictError:
                self.store.put(key, memoryview(data))  # it may be damaged
            else:
                if key not in self.named:
                    self._made.append(key)
            return [ref]
        if key not in self.named and not self._is_there(key):
            self._made.append(key)
        self.store.put(key, memoryview(data))
        return [ref]

    def _put_in_halves(self, data: bytearray) -> list[ObjectRef]:
        """The same bytes under names that no delete is under way for."""
        if len(data) == 1:
            raise StoreError(
                f"an object of one byte cannot be put in {self.store.url} while its delete is "
                "under way: start a new publisher"
            )
        middle = len(data) // 2
        return self._put(data[:middle]) + self._put(data[middle:])

    def _is_there(self, key: str) -> bool:
        try:
            self.store.size(key)
        except NotFoundError:
            return False
        return True


def sizes_of(store: Store, keys: Iterable[str]) -> Generator[Pending[int], None, None]:
    """The lengths of objects, in order; where the store is far several are asked for at a time."""
    return several(store, (partial(store.size, key) for key in keys))


def delete_all_noted(
    store: Store, keys: Iterable[str], doomed: set[str]
) -> Iterator[tuple[str, StoreError | None]]:
    """As `delete_noted` for each key, begun in this order: the key, and the error if it failed.

    Where the store is far several are under way at a time. `doomed` is used by this thread alone.
    """
    before: dict[str, bool] = {}

    def begun() -> Iterator[Callable[[], None]]:
        for key in keys:
            before[key] = key in doomed
            doomed.add(key)
            yield partial(store.delete, key)

    with closing(several(store, begun())) as answers:
        for answer in answers:
            key = next(iter(before))
            was_doomed = before.pop(key)
            try:
                answer.result()
            except StoreError as error:
                yield key, error
                continue
            if not was_doomed:
                doomed.discard(key)
            yield key, None


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


def reading_for(store: Store, room_bytes: int | None = None) -> Reading:
    """How to read frames from the store within that memory (None: any)."""
    return Reading.within(room_bytes, store.num_ahead, _READ_BYTES)


def read_frame(
    store: Store, keys: RunKeys, record: FrameRecord, reading: Reading | None = None
) -> Iterator[bytes]:
    """The bytes of a frame, piece by piece; the last piece of an object comes after its check.

    `reading`: pieces of 8 MiB, as many under way as the store says, if None. Nothing is held of a
    piece that was let go. Raises NotFoundError if an object is absent, ChecksumError if its length
    or digest is not that of the record: nothing of it may be used then.
    """
    if store.num_ahead == 0:
        yield from FrameReads(store, keys, record, None, reading).pieces()
        return
    with closing(Requests(store, per_ahead=READS_PER_AHEAD)) as requests:
        reads = FrameReads(store, keys, record, requests, reading)
        try:
            yield from reads.pieces()
        finally:
            reads.cancel()


class FrameReads:
    """The reads of one frame; `start` sends the first ones before anybody waits for them."""

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        record: FrameRecord,
        requests: Requests | None,
        reading: Reading | None = None,
        early: Callable[[str], Future[bytes] | None] = lambda _: None,
    ) -> None:
        """Nothing is asked for yet; without `requests` each piece is when it is wanted.

        `early` gives the read of a whole object that was begun before, by its key; it may fail.
        """
        self.reading = how = reading or reading_for(store)
        self.num_bytes = record.frame.num_bytes
        self._tasks = deque(_tasks(store, keys, record, how.piece_bytes))
        self._requests = requests
        self._early = early
        self._is_cancelled = False
        self._waiting: deque[tuple[_Task, Future[bytes], bool]] = deque()
        self._limit_bytes = max(1, how.num_ahead) * how.piece_bytes

    def start(self) -> None:
        """Has as many reads under way as is allowed."""
        threads = self._threads
        if threads is None:
            return
        held = sum(task.length for task, _, _ in self._waiting)
        while self._tasks:
            if self._waiting and held + self._tasks[0].length > self._limit_bytes:
                return
            task = self._tasks.popleft()
            held += task.length
            early = self._early(task.key) if task.is_whole else None
            future = threads.submit(self._read, task) if early is None else early
            self._waiting.append((task, future, early is not None))

    def pieces(self) -> Iterator[bytes]:
        """As `read_frame`."""
        sha = hashlib.sha256()
        for task, piece in self._in_order():
            if task.start == 0:
                sha = hashlib.sha256()
            sha.update(piece)
            if task.is_last and sha.hexdigest() != task.ref.digest:
                raise ChecksumError(
                    f"'{task.key}' in {task.store.url} has SHA-256 {sha.hexdigest()}, its record "
                    f"says {task.ref.digest}: the store returned damaged bytes; {_WHAT_TO_DO}"
                )
            if piece:
                yield piece
            del piece  # before the next one comes

    def cancel(self) -> None:
        """Starts no more reads, and waits for none."""
        self._is_cancelled = True
        self._tasks.clear()
        for _, future, _ in self._waiting:
            future.cancel()

    @property
    def _threads(self) -> ThreadPoolExecutor | None:
        return None if self._requests is None else self._requests.threads

    def _result(self, task: _Task, future: Future[bytes], *, is_early: bool) -> bytes:
        """A piece; what was asked for before its record was there may have failed: once more."""
        if is_early:
            with suppress(StoreError):
                piece = future.result()
                if len(piece) == task.length:
                    return piece
            return self._read(task)
        return future.result()

    def _read(self, task: _Task) -> bytes:
        """A piece, in its turn; nothing once nobody wants it any more."""
        assert self._requests is not None
        if task.length == 0:
            return task.read()
        with self._requests.flow.turn(task.length):
            return b"" if self._is_cancelled else task.read()

    def _in_order(self) -> Iterator[tuple[_Task, bytes]]:
        while self._tasks or self._waiting:
            if self._threads is None:
                task = self._tasks.popleft()
                yield task, task.read()
                continue
            self.start()
            task, future, is_early = self._waiting.popleft()
            piece = self._result(task, future, is_early=is_early)
            del future
            self.start()
            yield task, piece
            del piece


@dataclass(frozen=True)
class _Task:
    """A piece of an object that is to be read; of no bytes, a look at the length of the whole."""

    store: Store
    key: str
    ref: ObjectRef
    start: int
    length: int
    is_whole: bool = False

    @property
    def is_last(self) -> bool:
        """True if the object ends with this piece."""
        return self.length > 0 and self.start + self.length == self.ref.num_bytes

    def read(self) -> bytes:
        """The piece. An object that is read whole has to end where its record says, too."""
        if self.length == 0:
            self._check_size()
            return b""
        if not self.is_whole:
            return self.store.get_range(self.key, self.start, self.length)
        try:
            blob = get_known(self.store, self.key, self.length)
        except NotFoundError:
            raise
        except StoreError:
            self._check_size()
            raise
        if len(blob) != self.length:
            self._check_size()
        return blob

    def _check_size(self) -> None:
        size = self.store.size(self.key)
        if size != self.ref.num_bytes:
            raise ChecksumError(
                f"'{self.key}' in {self.store.url} has {size} bytes, its record says "
                f"{self.ref.num_bytes}: the object is damaged; {_WHAT_TO_DO}"
            )


def _tasks(store: Store, keys: RunKeys, record: FrameRecord, piece_bytes: int) -> Iterator[_Task]:
    """Over a long way what fits one request is read with one: its length comes with it."""
    for ref in record.frame.objects:
        key = keys.of(record).object(record.epoch, ref.digest)
        is_whole = store.num_ahead > 0 and ref.num_bytes <= piece_bytes
        if not is_whole:
            yield _Task(store, key, ref, 0, 0)
        for start in range(0, ref.num_bytes, piece_bytes):
            yield _Task(store, key, ref, start, min(piece_bytes, ref.num_bytes - start), is_whole)
