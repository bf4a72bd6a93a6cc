"""A channel whose rounds are moved by a thread of its own, one after the other."""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from gymfast.channels.base import DEFAULT_DEPTH, DEFAULT_TIMEOUT_S, Channel, Slot
from gymfast.errors import ChannelError

_Job = Sequence[Slot] | None


class ThreadedChannel(Channel):
    """What loopback, shared memory, sockets and gloo have in common.

    A subclass moves one round in `_move`, and makes it end soon after `_interrupt`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        depth: int = DEFAULT_DEPTH,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(rank, num_ranks, depth=depth, timeout_s=timeout_s)
        self._lost: dict[int, str] = {}
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        self._failure: ChannelError | None = None
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._work, name=f"gymfast-channel-{rank}", daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks that are out of reach from here, and why."""
        return dict(self._lost)

    def begin(self, slots: Sequence[Slot]) -> None:
        self.finish(self.depth - 1)
        with self._changed:
            self._num_left += 1
        self._jobs.put(slots)

    def finish(self, num_left: int = 0) -> None:
        with self._changed:
            # A round has its own deadline; the margin is for the thread to say so.
            is_done = self._changed.wait_for(
                lambda: self._num_left <= num_left or self._failure is not None,
                timeout=(self.depth + 1) * self.timeout_s + 5,
            )
            if self._failure is not None:
                raise ChannelError(str(self._failure), self._failure.ranks)
            if not is_done:
                raise ChannelError(f"{self._num_left} rounds did not end by their deadlines")

    def abort(self, reason: str) -> None:
        self._fail(ChannelError(f"aborted on rank {self.rank}: {reason}"))
        self._interrupt()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            is_busy = self._num_left > 0
        if is_busy:
            self.abort("the channel was closed")
        self._jobs.put(None)
        self._thread.join()
        self._release()

    @abstractmethod
    def _move(self, slots: Sequence[Slot], deadline_s: float) -> None:
        """Moves one round by `deadline_s` of time.monotonic(); raises ChannelError."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Makes a round under way end soon, with an error; called from any thread."""

    def _release(self) -> None:
        """Gives back what the channel holds; no round is under way."""

    def _work(self) -> None:
        while (slots := self._jobs.get()) is not None:
            if self._failure is None:
                try:
                    self._move(slots, time.monotonic() + self.timeout_s)
                except ChannelError as error:
                    self._fail(error)
                except Exception as error:  # noqa: BLE001 - the caller's thread has to hear of it
                    self._fail(ChannelError(f"rank {self.rank}: {type(error).__name__}: {error}"))
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()

    def _fail(self, error: ChannelError) -> None:
        with self._changed:
            self._failure = self._failure or error  # the first is the cause of the others
            self._changed.notify_all()
