"""Chunks of an update on their way: one is sent while the next one is gathered."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gymfast.errors import GymfastError
from gymfast.integrations.flat_bucket import Bucket
from gymfast.integrations.phases import Phases

Chunk = list[tuple[str, Any]]


class BucketPipe:
    """Sends buckets in a thread of its own, in their order; the newest one may be held back.

    Only who knows that nothing follows can send the last one, where it carries the version. A chunk
    is never split: what SGLang fuses may have to be loaded by one call. After a failure chunks are
    dropped, so that the gathering, in which other ranks take part, goes on.
    """

    def __init__(
        self, send: Callable[[Bucket, str | None], None], pack: Callable[[Chunk], Bucket]
    ) -> None:
        self._send, self._pack = send, pack
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gymfast-buckets")
        self._on_its_way: Future[None] | None = None
        self._held: Bucket | None = None
        self._failure: Exception | None = None
        self.phases = Phases()
        self.holds_back = True

    @property
    def is_holding(self) -> bool:
        """True if there is a last bucket."""
        return self._held is not None

    def gather(self, walk: Callable[[Callable[[Chunk], None]], None]) -> None:
        """Takes the chunks of a walk over the weights; what it takes to make them is timed."""
        seconds = self.phases.seconds
        start_s, before_s = time.perf_counter(), sum(seconds.values())
        try:
            walk(self.put)
        finally:
            inside_s = sum(seconds.values()) - before_s
            passed_s = time.perf_counter() - start_s - inside_s
            seconds["gather"] = seconds.get("gather", 0.0) + passed_s

    def put(self, chunk: Chunk) -> None:
        """Takes a chunk over, and empties it."""
        if self._failure is None and chunk:
            held, self._held = self._held, None
            if held is not None:
                self._start(held, None)
            with self.phases("pack"):
                bucket = self._pack(chunk)
            if self.holds_back:
                self._held = bucket
            else:
                self._start(bucket, None)
        chunk.clear()

    def settle(self) -> None:
        """Waits for what is on its way; raises what went wrong since the start."""
        self._finish()
        if self._failure is not None:
            raise self._failure

    def send_last(self, weight_version: str | None) -> None:
        """Sends what is held, if anything is."""
        held, self._held = self._held, None
        if held is not None:
            self._start(held, weight_version)
        self.settle()

    def close(self) -> None:
        """Waits for the thread and ends it."""
        self._finish()
        self._held = None
        self._thread.shutdown()

    def _start(self, bucket: Bucket, weight_version: str | None) -> None:
        self._finish()
        if self._failure is None:
            self._on_its_way = self._thread.submit(self._send, bucket, weight_version)

    def _finish(self) -> None:
        pending, self._on_its_way = self._on_its_way, None
        if pending is None:
            return
        with self.phases("wait"):
            try:
                pending.result()
            except GymfastError as error:
                self._failure = error
