"""A trainer or an engine of `python -m benchmarks wan`, as a process: orders in, answers out.

Orders and answers are lines of JSON. Times are those of the monotonic clock, which all processes of
the machine share.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from gymfast.stores import ObjectStore
from gymfast.sync import LiveTarget, Publisher, Subscriber
from gymfast.sync.clock import SystemClock
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import FrameRef, ObjectRef
from gymfast.sync.objects import DEFAULT_OBJECT_BYTES, FrameReads, FrameWriter
from gymfast.sync.requests import Requests
from gymfast.sync.watching import watch
from gymfast.testing.weights import rl_like_update, rl_like_weights

URL = "s3://bucket/wan"
INTERVAL_S = 0.015
"""How often a reader looks for the next version, here and in the peer's scheme."""
_TIMEOUT_S = 300.0
_MAX_INDEX_BYTES = 16 << 20
Bits = NDArray[np.uint16]
Answer = dict[str, Any]


class Trainer:
    """Weights that move: each step changes the units that one real-looking step changed."""

    def __init__(self, size: int, density: float, threads: int) -> None:
        self.weights = rl_like_weights(size, threads=threads)
        moved = rl_like_update(self.weights, density, threads=threads)
        self._mask = {name: new ^ self.weights[name] for name, new in moved.items()}

    def step(self, shift: int) -> Answer:
        """The changes of that one step, so many elements further on in each tensor."""
        for name, mask in self._mask.items():
            flat, moved = self.weights[name].reshape(-1), mask.reshape(-1)
            at = shift % flat.size
            flat[at:] ^= moved[: flat.size - at]
            flat[:at] ^= moved[flat.size - at :]
        return {}


class OurTrainer(Trainer):
    """Publishes with gymfast."""

    def __init__(self, size: int, density: float, threads: int) -> None:
        super().__init__(size, density, threads)
        self._publisher = Publisher(
            ObjectStore(URL), "ours", threads=threads, anchor_every=256, keep=256
        )

    def publish(self, anchor: bool = False) -> Answer:
        start_s, encoded_s = time.monotonic(), [0.0]

        def advance(done: int, of: int) -> None:  # noqa: ARG001
            encoded_s[0] = time.monotonic()

        report = self._publisher.publish(self.weights, anchor=anchor, advance=advance)
        return {
            "start_s": start_s,
            "encoded_s": encoded_s[0],
            "encode": report.seconds.diff + report.seconds.encode,
            "put": report.seconds.put,
            "version": report.version,
            "num_bytes": report.frame_bytes,
            "raw_bytes": report.raw_bytes,
            "root": report.root,
        }


class OurEngine:
    """Follows with gymfast: live tensors in memory, all bytes read again after each version."""

    def __init__(self, size: int, threads: int) -> None:
        self._threads = threads
        self._weights: dict[str, Bits] = rl_like_weights(size, threads=2) if size else {}
        self._subscriber = self._made()

    def follow(self, version: int) -> Answer:
        return _told(self._subscriber.wait(version, _TIMEOUT_S, interval_s=INTERVAL_S))

    def pull(self) -> Answer:
        return _told(self._subscriber.pull())

    def use(self, threads: int) -> Answer:
        """Goes on with so many threads: the other engines wait."""
        self._subscriber.close()
        self._threads = threads
        self._subscriber = self._made()
        return self.pull()

    def join(self) -> Answer:
        """As an engine that has just started: nothing is held."""
        self._subscriber.close()
        self._weights = {}
        self._subscriber = self._made()
        return self.pull()

    def _made(self) -> Subscriber:
        target = LiveTarget(self._weights, threads=self._threads)
        return Subscriber(ObjectStore(URL), "ours", target)


def _told(report: Any) -> Answer:
    seconds = report.seconds
    return {
        "end_s": time.monotonic(),
        "fetch": seconds.fetch,
        "apply": seconds.verify + seconds.apply + seconds.check,
        "parts": [seconds.verify, seconds.apply, seconds.check],
        "num_bytes": report.num_bytes,
        "root": report.root,
        "kind": report.kind,
    }


class PeerTrainer(Trainer):
    """slime's scheme at its best: xor and zstd level 1 per tensor, xxh3-128 of the new bytes.

    No disk, kept buffers, all threads, and our transport: objects leave while others are made.
    """

    def __init__(self, size: int, density: float, threads: int) -> None:
        super().__init__(size, density, threads)
        self._store, self._keys, self._version = ObjectStore(URL), RunKeys("peer"), -1
        self._snapshot = {name: value.copy() for name, value in self.weights.items()}
        self._scratch = {name: np.empty_like(value) for name, value in self.weights.items()}
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def publish(self, anchor: bool = False) -> Answer:  # noqa: ARG002 - full states are not compared
        start_s = time.monotonic()
        writer = FrameWriter(self._store, self._keys, 1, DEFAULT_OBJECT_BYTES, creates=True)
        table: list[tuple[str, int, str]] = []

        def sections() -> Iterator[bytes]:
            for name, frame, digest in _in_order(self._encode, self._snapshot, self._pool):
                table.append((name, len(frame), digest))
                if frame:
                    yield frame

        frame = writer.write(sections())
        encoded_s = time.monotonic()
        self._version += 1
        objects = [(ref.digest, ref.num_bytes) for ref in frame.objects]
        index = json.dumps({"tensors": table, "objects": objects}).encode()
        self._store.create(self._keys.record(self._version + 1), index)
        return {
            "start_s": start_s,
            "encoded_s": encoded_s,
            "encode": encoded_s - start_s - writer.seconds,
            "put": writer.seconds,
            "version": self._version,
            "num_bytes": frame.num_bytes + len(index),
            "raw_bytes": sum(value.nbytes for value in self.weights.values()),
            "root": _root(table),
        }

    def _encode(self, name: str) -> tuple[str, bytes, str]:
        old, new, xor = self._snapshot[name], self.weights[name], self._scratch[name]
        np.bitwise_xor(old, new, out=xor)
        frame = zstandard.ZstdCompressor(level=1).compress(xor) if xor.any() else b""
        np.copyto(old, new)
        return name, frame, xxhash.xxh3_128_hexdigest(new)


class PeerEngine:
    """Takes what PeerTrainer writes: decompress, xor in place, compare the xxh3-128."""

    def __init__(self, size: int, threads: int) -> None:
        self._store, self._keys = ObjectStore(URL), RunKeys("peer")
        self._weights = rl_like_weights(size, threads=2)
        self._requests = Requests(self._store)
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def follow(self, version: int) -> Answer:
        key = self._keys.record(version + 1)
        found = watch(
            lambda: self._store.get(key, max_bytes=_MAX_INDEX_BYTES),
            self._requests,
            SystemClock(),
            interval_s=INTERVAL_S,
            timeout_s=_TIMEOUT_S,
        )
        assert found is not None
        index = json.loads(found.result())
        start_s = time.monotonic()
        refs = tuple(ObjectRef(digest, num_bytes) for digest, num_bytes in index["objects"])
        record: Any = SimpleNamespace(epoch=1, frame=FrameRef(sum(r.num_bytes for r in refs), refs))
        blob = b"".join(FrameReads(self._store, self._keys, record, self._requests).pieces())
        fetched_s = time.monotonic()
        at, jobs = 0, {}
        for name, num_bytes, digest in index["tensors"]:
            jobs[name] = (memoryview(blob)[at : at + num_bytes], digest)
            at += num_bytes
        for _ in _in_order(partial(self._apply, jobs), jobs, self._pool):
            pass
        end_s = time.monotonic()
        return {
            "end_s": end_s,
            "fetch": fetched_s - start_s,
            "apply": end_s - fetched_s,
            "num_bytes": len(blob),
            "root": _root(index["tensors"]),
            "kind": "deltas",
        }

    def _apply(self, jobs: dict[str, tuple[memoryview, str]], name: str) -> None:
        frame, digest = jobs[name]
        data = self._weights[name].reshape(-1).view(np.uint8)
        if frame:
            content = zstandard.ZstdDecompressor().decompress(frame)
            np.bitwise_xor(data, np.frombuffer(content, np.uint8), out=data)
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise ValueError(f"tensor {name!r} has other bytes than the trainer's")


def _in_order(
    work: Callable[[str], Any], names: Iterable[str], pool: ThreadPoolExecutor
) -> Iterator[Any]:
    """What `work` makes of each name, a few of them ahead."""
    waiting: deque[Future[Any]] = deque()
    for name in names:
        waiting.append(pool.submit(work, name))
        if len(waiting) > 8:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _root(table: Iterable[Iterable[Any]]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(tuple(row)[2] for row in table).encode())


_ROLES: dict[str, Callable[..., Any]] = {
    "ours trainer": OurTrainer,
    "ours engine": OurEngine,
    "peer trainer": PeerTrainer,
    "peer engine": PeerEngine,
}


def main() -> None:
    """Does what each line asks for, until they end."""
    worker: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        what, options = order.pop("do"), order
        if what == "be":
            worker = _ROLES[options.pop("role")](**options)
            answer: Answer = {}
        else:
            answer = getattr(worker, what)(**options)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
