"""Frames as objects: cut into parts on the way out, put together and checked on the way in.

Records, leases and the hint are objects that are read whole.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from gymfast.errors import ChecksumError, FormatError, NotFoundError, StoreError
from gymfast.stores.base import Store
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import MAX_OBJECT_BYTES, NUMBER_LIMIT, FrameRef, ObjectRef

DEFAULT_OBJECT_BYTES = 64 << 20
_READ_BYTES = 8 << 20
_WHAT_TO_DO = "`gymfast sync fsck` says what is lost and what heals it"


def check_object_bytes(object_bytes: int) -> int:
    """The number itself; ValueError if no object may be that large, or it is not positive."""
    if not 1 <= object_bytes <= MAX_OBJECT_BYTES:
        raise ValueError(f"object_bytes is {object_bytes}, expected 1 to {MAX_OBJECT_BYTES}")
    return object_bytes


@dataclass
class FrameWriter:
    """Puts the sections of one frame as objects of at most `object_bytes`, one in memory at a time.

    `seconds` is the time of all puts, hashing included.
    """

    store: Store
    keys: RunKeys
    epoch: int
    object_bytes: int
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
                self.store.delete(key)
        self._made.clear()
        self.refs.clear()

    def _put(self, data: bytearray) -> None:
        start_s = time.perf_counter()
        ref = ObjectRef(hashlib.sha256(data).hexdigest(), len(data))
        key = self.keys.object(self.epoch, ref.digest)
        if not self._is_there(key):
            self._made.append(key)
        self.store.put(key, memoryview(data))
        self.refs.append(ref)
        self.seconds += time.perf_counter() - start_s

    def _is_there(self, key: str) -> bool:
        try:
            self.store.size(key)
        except NotFoundError:
            return False
        return True


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


def digest_at(store: Store, key: str) -> str:
    """The SHA-256 of an object, read a few MiB at a time, in hex; NotFoundError if it is absent."""
    sha, size = hashlib.sha256(), store.size(key)
    for start in range(0, size, _READ_BYTES):
        sha.update(store.get_range(key, start, min(_READ_BYTES, size - start)))
    return sha.hexdigest()


def read_object(store: Store, key: str, ref: ObjectRef) -> Iterator[bytes]:
    """The bytes of an object, a few MiB at a time; the last piece comes after the check of all.

    Raises NotFoundError if it is absent, ChecksumError if its length or digest is not that of the
    record: nothing of it may be used then.
    """
    size = store.size(key)
    if size != ref.num_bytes:
        raise ChecksumError(
            f"'{key}' in {store.url} has {size} bytes, its record says {ref.num_bytes}: the object "
            f"is damaged; {_WHAT_TO_DO}"
        )
    sha, num_read = hashlib.sha256(), 0
    for piece in _pieces(store, key, size):
        sha.update(piece)
        num_read += len(piece)
        if num_read == size and sha.hexdigest() != ref.digest:
            raise ChecksumError(
                f"'{key}' in {store.url} has SHA-256 {sha.hexdigest()}, its record says "
                f"{ref.digest}: the store returned damaged bytes; {_WHAT_TO_DO}"
            )
        yield piece


def _pieces(store: Store, key: str, size: int) -> Iterator[bytes]:
    """The bytes of an object in order, a few MiB at a time.

    A store that is far away (it has `num_parallel`) is asked for that many pieces ahead.
    """
    wanted = [(start, min(_READ_BYTES, size - start)) for start in range(0, size, _READ_BYTES)]
    num_ahead: int = getattr(store, "num_parallel", 1)
    if num_ahead == 1 or len(wanted) < 2:
        for start, length in wanted:
            yield store.get_range(key, start, length)
        return
    with ThreadPoolExecutor(num_ahead) as pool:
        ahead: deque[Future[bytes]] = deque()
        try:
            for start, length in wanted:
                ahead.append(pool.submit(store.get_range, key, start, length))
                if len(ahead) == num_ahead:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for piece in ahead:
                piece.cancel()
