"""What `gymfast relay` serves: a store with everything of a run fetched once for many readers.

Objects are kept in files without names, in pieces, and are compared with the digest that is their
name as soon as all pieces are there. Everything else, and what is absent, is an answer of the store
that counts for a moment (relay_answers.py).
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores.base import Blob, Store, check_key, check_prefix, check_range
from gymfast.sync.manifest import MAX_OBJECT_BYTES, MAX_RECORD_BYTES, MAX_SMALL_RECORD_BYTES
from gymfast.sync.relay_answers import Answers, Fetch, is_record, settle

PIECE_BYTES = 8 << 20
FRESHNESS_S = 0.25
"""How long an answer about what may change counts."""
_AHEAD = 3  # pieces that are fetched before they are asked for
_PAUSES_S = (0.05, 0.3)  # before a call that failed at once is made again
_SILENCE_S = 5.0  # a call that failed later than this is not made again: others wait for it
_NUM_TRIES = 3  # of an object that arrives with other bytes than its name says
_MAX_FILES = 512
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class RelayCache:
    """A store that fetches from `upstream` what is asked for, once, and keeps `max_bytes` of it.

    Safe to call from many threads: those that ask for the same wait for one fetch. Leases and
    statuses of readers are passed on; nothing else can be written.
    """

    has_create_only = False
    num_ahead = 0

    def __init__(
        self,
        upstream: Store,
        *,
        max_bytes: int,
        folder: Path | None = None,
        freshness_s: float = FRESHNESS_S,
    ) -> None:
        """Nothing is fetched yet; `folder` (default: that for temporary files) holds the objects.

        Raises ValueError if not even one object fits, or `freshness_s` is no time.
        """
        if max_bytes < MAX_OBJECT_BYTES:
            raise ValueError(
                f"the relay is to keep {max_bytes} bytes, but one object may have "
                f"{MAX_OBJECT_BYTES}: give it at least that"
            )
        if not freshness_s >= 0:
            raise ValueError(f"freshness_s is {freshness_s}, expected 0 or more seconds")
        self.upstream = upstream
        self.url = f"relay of {upstream.url}"
        self.fetched_bytes = 0
        self._max_bytes = max_bytes
        self._folder = folder
        self._lock = threading.Lock()
        self._objects: OrderedDict[str, _Object] = OrderedDict()
        self._answers = Answers(freshness_s)
        self._pool = ThreadPoolExecutor(_AHEAD, "gymfast-relay")
        self._is_closed = threading.Event()

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        if not is_of_reader(check_key(key)):
            self._refuse(key)
        self.upstream.put(key, data)
        self._answers.forget(key)

    def create(self, key: str, data: Blob) -> None:  # noqa: ARG002
        self._refuse(check_key(key))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if _is_object(check_key(key)):
            size = self.size(key)
            self._check_size(key, size, max_bytes)
            return self.get_range(key, 0, size)
        blob = self._whole(key)
        self._check_size(key, len(blob), max_bytes)
        return blob

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        if not _is_object(check_key(key)):
            return self._slice(key, self._whole(key), start, length)
        for _ in range(_NUM_TRIES):
            held = self._object(key)
            if start + length > held.size:
                raise self._truncated(key, start, length, held.size)
            try:
                return self._read(held, start, length)
            except _DamagedError as error:
                damage = error
        raise StoreError(
            f"'{key}' from {self.upstream.url} has SHA-256 {damage}: its bytes were damaged there "
            "or on the way; they are fetched anew when they are asked for again"
        ) from damage

    def _read(self, held: _Object, start: int, length: int) -> bytes:
        """Bytes of an object; pieces that are not there are fetched, and some behind them."""
        last = max(start + length - 1, start) // PIECE_BYTES
        for index in range(last + 1, min(last + 1 + _AHEAD, held.num_pieces)):
            self._pool.submit(self._fetch_ahead, held, index)
        pieces = []
        for index in range(start // PIECE_BYTES, last + 1 if length else 0):
            piece = self._piece(held, index)
            low = max(0, start - index * PIECE_BYTES)
            pieces.append(piece[low : start + length - index * PIECE_BYTES])
        return b"".join(pieces)

    def size(self, key: str) -> int:
        return self._object(key).size if _is_object(check_key(key)) else len(self._whole(key))

    def list(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        return iter(self._answers.fresh("list", prefix, lambda: self._listed(prefix)))

    def delete(self, key: str) -> None:
        if not is_of_reader(check_key(key)):
            self._refuse(key)
        self.upstream.delete(key)
        self._answers.forget(key)

    def free_bytes(self) -> int | None:
        return self.upstream.free_bytes()

    def close(self) -> None:
        """Ends fetching ahead, and gives the disk back."""
        self._is_closed.set()
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._objects.clear()

    def status(self) -> dict[str, object]:
        """Bytes fetched from upstream, bytes and objects kept."""
        with self._lock:
            held = list(self._objects.values())
            return {
                "upstream": self.upstream.url,
                "fetched_bytes": self.fetched_bytes,
                "kept_bytes": sum(each.size for each in held),
                "kept_objects": len(held),
            }

    def _whole(self, key: str) -> bytes:
        """A record, or another small object."""
        limit = MAX_RECORD_BYTES if is_record(key) else MAX_SMALL_RECORD_BYTES
        return self._answers.fresh("get", key, lambda: self._counted_get(key, limit))

    def _counted_get(self, key: str, limit: int) -> bytes:
        blob = self._patiently(lambda: self.upstream.get(key, max_bytes=limit))
        self._count(len(blob))
        return blob

    def _listed(self, prefix: str) -> tuple[str, ...]:
        return self._patiently(lambda: tuple(self.upstream.list(prefix)))

    def _patiently(self, work: Callable[[], _T]) -> _T:
        """What upstream says; where a line broke it is asked again, before readers go there."""
        begin_s = time.monotonic()
        for pause_s in _PAUSES_S:
            try:
                return work()
            except (NotFoundError, ConflictError):
                raise
            except StoreError as error:
                if time.monotonic() - begin_s > _SILENCE_S:
                    raise
                _log.info("asked again: %s", error)
            self._is_closed.wait(pause_s)
        return work()

    def _object(self, key: str) -> _Object:
        with self._lock:
            held = self._objects.get(key)
            if held is not None:
                self._objects.move_to_end(key)
                return held
        size: int = self._answers.fresh("size", key, lambda: self._sized(key))
        if size > MAX_OBJECT_BYTES:
            raise StoreError(
                f"'{key}' in {self.upstream.url} has {size} bytes, no object has over "
                f"{MAX_OBJECT_BYTES}: it was not written by gymfast"
            )
        with self._lock:
            held = self._objects.get(key)
            if held is None:
                held = self._objects[key] = _Object(key, size, self._folder)
                self._evict()
            return held

    def _sized(self, key: str) -> int:
        return self._patiently(lambda: self.upstream.size(key))

    def _evict(self) -> None:
        """Lets go of the objects that were not used for longest; who reads one keeps its file."""
        kept = sum(each.size for each in self._objects.values())
        while len(self._objects) > 1 and (
            kept > self._max_bytes or len(self._objects) > _MAX_FILES
        ):
            kept -= self._objects.popitem(last=False)[1].size

    def _piece(self, held: _Object, index: int) -> bytes:
        """A piece, fetched by one of all who ask. Raises _DamagedError once for a bad object."""

        def fetch() -> None:
            start = index * PIECE_BYTES
            length = min(PIECE_BYTES, held.size - start)
            piece = self._patiently(lambda: self.upstream.get_range(held.key, start, length))
            self._count(len(piece))
            self._keep(held, index, piece)

        try:
            held.have(index, fetch)
            return held.read(index)
        except _DamagedError:
            with self._lock:
                if self._objects.get(held.key) is held:
                    del self._objects[held.key]
            raise

    def _keep(self, held: _Object, index: int, piece: bytes) -> None:
        """Writes a piece; on a full disk what was not used for longest goes first."""
        while True:
            try:
                held.write(index, piece)
                return
            except OSError as error:
                if error.errno == errno.ENOSPC and self._let_go_of_another(held):
                    continue
                raise StoreError(
                    f"the relay cannot keep '{held.key}': {error.strerror}: give it more room "
                    "(--cache-dir), or let it keep less (--cache-gb)"
                ) from error

    def _let_go_of_another(self, held: _Object) -> bool:
        with self._lock:
            others = (key for key, each in self._objects.items() if each is not held)
            oldest = next(others, None)
            if oldest is not None:
                del self._objects[oldest]
        return oldest is not None

    def _fetch_ahead(self, held: _Object, index: int) -> None:
        try:
            self._piece(held, index)
        except (StoreError, _DamagedError) as error:
            _log.info("fetching ahead: %s", error)  # whoever asks for the piece meets it

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.fetched_bytes += num_bytes

    def _check_size(self, key: str, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            raise StoreError(
                f"get '{key}' from {self.url}: {size} bytes, over the limit of {max_bytes}"
            )

    def _slice(self, key: str, blob: bytes, start: int, length: int) -> bytes:
        if start + length > len(blob):
            raise self._truncated(key, start, length, len(blob))
        return blob[start : start + length]

    def _truncated(self, key: str, start: int, length: int, size: int) -> StoreError:
        return StoreError(
            f"get_range '{key}' from {self.url}: expected {length} bytes at {start}, but the "
            f"object has only {size} bytes: it is truncated"
        )

    def _refuse(self, key: str) -> NoReturn:
        raise StoreError(
            f"'{key}' in {self.url}: a relay passes on leases and statuses of readers only; "
            "publish to the store behind it"
        )


class _DamagedError(Exception):
    """The digest of an object is not its name; the text is the digest found."""


class _Object:
    """An object in a file without a name, as far as it was fetched."""

    def __init__(self, key: str, size: int, folder: Path | None) -> None:
        self.key = key
        self.size = size
        self.num_pieces = -(-size // PIECE_BYTES)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - kept
        self._lock = threading.Lock()
        self._futures: dict[int, Future[None]] = {}
        self._written: set[int] = set()
        self._sha = hashlib.sha256()
        self._num_hashed = 0

    def have(self, index: int, fetch: Fetch) -> None:
        """Returns when the piece is there; of all who ask, one calls `fetch`."""
        with self._lock:
            future = self._futures.get(index)
            is_mine = future is None
            if future is None:
                future = self._futures[index] = Future()
        if is_mine:
            settle(future, fetch)
            if future.exception() is not None:
                with self._lock:
                    self._futures.pop(index, None)
        future.result()

    def write(self, index: int, piece: bytes) -> None:
        """Keeps a piece.

        Raises _DamagedError if that completes other bytes than the name says, OSError of the disk.
        """
        written = 0
        while written < len(piece):  # a disk that fills up takes a part without an error
            place = index * PIECE_BYTES + written
            written += os.pwrite(self._file.fileno(), memoryview(piece)[written:], place)
        with self._lock:
            self._written.add(index)
            while self._num_hashed in self._written:
                mine = self._num_hashed == index
                self._sha.update(piece if mine else self.read(self._num_hashed))
                self._num_hashed += 1
            if self._num_hashed == self.num_pieces:
                found = self._sha.hexdigest()
                if found != self.key.rpartition("/")[2]:
                    raise _DamagedError(found)

    def read(self, index: int) -> bytes:
        """The bytes of a piece that is there."""
        start = index * PIECE_BYTES
        length = min(PIECE_BYTES, self.size - start)
        piece = os.pread(self._file.fileno(), length, start)
        if len(piece) != length:
            raise StoreError(f"the relay has lost bytes of '{self.key}': its disk failed")
        return piece


def is_lease(key: str) -> bool:
    """True for the key of a reader's lease."""
    parts = key.split("/")
    return len(parts) == 3 and parts[1] == "readers"


def is_of_reader(key: str) -> bool:
    """True for the keys that readers write: their lease and their status."""
    parts = key.split("/")
    return is_lease(key) or (len(parts) == 3 and parts[1] == "status")


def _is_object(key: str) -> bool:
    parts = key.split("/")
    return len(parts) == 4 and parts[1] in ("objects", "folded")
