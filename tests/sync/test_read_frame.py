"""Frames from a store that is far away: several pieces under way, in order, checked one by one."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from gymfast.errors import ChecksumError, NotFoundError, StoreError
from gymfast.stores import MemoryStore
from gymfast.sync import objects
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import FrameRef, ObjectRef
from gymfast.sync.objects import read_frame
from gymfast.testing.faults import PassThroughStore

KEYS = RunKeys("r")
PIECE = 100


class FarStore(PassThroughStore):
    """Answers a read only when `num_ahead` more are under way, or there are no more to come."""

    num_ahead = 3

    def __init__(self, inner, num_reads: int) -> None:
        super().__init__(inner)
        self.num_ahead = FarStore.num_ahead
        self.most = self.under_way = self.done = 0
        self.num_reads = num_reads
        self.changed = threading.Condition()

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self.together(lambda: super(FarStore, self).get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.together(lambda: super(FarStore, self).get_range(key, start, length))

    def together(self, read: Callable[[], bytes]) -> bytes:
        with self.changed:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.changed.notify_all()
            enough = min(self.num_ahead, self.num_reads - self.done)
            self.changed.wait_for(lambda: self.under_way >= enough, timeout=0.2)
        try:
            return read()
        finally:
            with self.changed:
                self.under_way -= 1
                self.done += 1
                self.changed.notify_all()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_READ_BYTES", PIECE)


def stored(inner: MemoryStore, sizes: list[int]):
    """A record whose frame is random objects of these sizes, and the frame."""
    rng = np.random.default_rng(0)
    blobs = [rng.bytes(size) for size in sizes]
    refs = tuple(ObjectRef(hashlib.sha256(blob).hexdigest(), len(blob)) for blob in blobs)
    for ref, blob in zip(refs, blobs, strict=True):
        inner.put(KEYS.object(1, ref.digest), blob)
    return SimpleNamespace(epoch=1, frame=FrameRef(sum(sizes), refs)), blobs


@pytest.mark.parametrize("sizes", [[1], [PIECE], [PIECE + 1], [950, 1, 300], [50] * 12])
def test_pieces_come_in_order_with_several_under_way(sizes: list[int]) -> None:
    inner = MemoryStore()
    record, blobs = stored(inner, sizes)
    num_reads = sum(-(-size // PIECE) for size in sizes)
    far = FarStore(inner, num_reads)
    for store in (inner, far):
        pieces = list(read_frame(store, KEYS, record))
        assert b"".join(pieces) == b"".join(blobs)
        assert max(map(len, pieces)) <= PIECE
    # A limit of bytes, not of requests: small objects need more of them under way.
    num_pieces = far.num_ahead * PIECE // min(PIECE, *sizes)
    assert min(far.num_ahead, num_reads) <= far.most <= max(num_pieces, 1)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda b: b[:-1], ChecksumError, "has 299 bytes, its record says 300"),
        (lambda b: b + b"x", ChecksumError, "has 301 bytes, its record says 300"),
        (lambda b: b"x" + b[1:], ChecksumError, "damaged bytes"),
        (None, NotFoundError, "no such object"),
    ],
)
def test_the_object_that_is_wrong_is_named_and_its_last_piece_kept_back(
    far: bool, change, error: type[StoreError], says: str
) -> None:
    inner = MemoryStore()
    record, blobs = stored(inner, [250, 300, 80])
    key = KEYS.object(1, record.frame.objects[1].digest)
    if change is None:
        inner.delete(key)
    else:
        inner.put(key, change(blobs[1]))
    pieces: list[bytes] = []
    with pytest.raises(error, match=f"'{key}'.*{says}"):
        pieces.extend(read_frame(FarStore(inner, 7) if far else inner, KEYS, record))
    assert sum(map(len, pieces)) < 250 + 300


def test_a_reader_that_stops_leaves_no_thread_behind() -> None:
    inner = MemoryStore()
    record, _ = stored(inner, [PIECE] * 20)
    frame = read_frame(FarStore(inner, 20), KEYS, record)
    next(frame)
    frame.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("gymfast-read")]
