"""The channel between threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from gymfast.channels.base import DEFAULT_DEPTH, DEFAULT_TIMEOUT_S, Memory, Slot
from gymfast.channels.threaded import ThreadedChannel
from gymfast.errors import ChannelError


class Loopback:
    """A group of threads; each takes the channel of its rank once."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._changed = threading.Condition()
        self._offers: dict[tuple[int, int], Memory] = {}  # by round and root
        self._takers: dict[tuple[int, int], set[int]] = {}
        self._gone: dict[int, str] = {}

    def channel(
        self, rank: int, *, depth: int = DEFAULT_DEPTH, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> LoopbackChannel:
        """The channel of one rank. Raises ValueError as Channel does."""
        return LoopbackChannel(self, rank, depth=depth, timeout_s=timeout_s)

    def offer(self, place: tuple[int, int], memory: Memory, deadline_s: float) -> dict[int, str]:
        """Shows memory until every other rank took it; returns the ranks that are gone."""
        with self._changed:
            takers: set[int] = set()
            self._offers[place], self._takers[place] = memory, takers
            self._changed.notify_all()
            everybody = set(range(self.num_ranks))
            try:
                self._wait(
                    lambda: everybody <= takers | self._gone.keys() | {place[1]}, deadline_s, place
                )
                return {rank: text for rank, text in self._gone.items() if rank not in takers}
            finally:
                del self._offers[place], self._takers[place]

    def take(self, rank: int, place: tuple[int, int], memory: Memory, deadline_s: float) -> None:
        """Fills memory of a rank with what the root shows."""
        _, root = place
        with self._changed:
            self._wait(lambda: place in self._offers or root in self._gone, deadline_s, place)
            if place not in self._offers:
                raise ChannelError(f"rank {root} is gone: {self._gone[root]}", (root,))
            offered = self._offers[place]
            if len(offered) != len(memory):
                raise ChannelError(
                    f"rank {root} sends {len(offered)} bytes in round {place[0]}, "
                    f"{len(memory)} are expected here: the plans differ",
                    (root,),
                )
        np.copyto(memory, offered)
        with self._changed:
            if place not in self._takers:
                raise ChannelError(f"rank {root} did not wait for round {place[0]}", (root,))
            self._takers[place].add(rank)
            self._changed.notify_all()

    def leave(self, rank: int, reason: str) -> None:
        """A rank takes part no more."""
        with self._changed:
            self._gone.setdefault(rank, reason)
            self._changed.notify_all()

    def _wait(self, is_done: Callable[[], bool], deadline_s: float, place: tuple[int, int]) -> None:
        def is_over() -> bool:
            return is_done() or place[1] in self._gone

        left_s = max(deadline_s - time.monotonic(), 0)
        if not self._changed.wait_for(is_over, timeout=left_s):
            raise ChannelError(f"round {place[0]} of rank {place[1]} did not end by its deadline")


class LoopbackChannel(ThreadedChannel):
    """One rank of a Loopback."""

    survives_loss = True

    def __init__(self, group: Loopback, rank: int, *, depth: int, timeout_s: float) -> None:
        self._group = group
        self._round = 0
        super().__init__(rank, group.num_ranks, depth=depth, timeout_s=timeout_s)

    def lose(self, rank: int, why: str) -> None:
        self._group.leave(rank, why)

    def _move(self, slots: Sequence[Slot], deadline_s: float) -> None:
        number, self._round = self._round, self._round + 1
        for slot in slots:
            place = (number, slot.root)
            if slot.root == self.rank:
                self._lost |= self._group.offer(place, slot.memory, deadline_s)
                if self.rank in self._lost:
                    raise ChannelError(f"rank {self.rank} is gone: {self._lost[self.rank]}")
            else:
                self._group.take(self.rank, place, slot.memory, deadline_s)

    def _interrupt(self) -> None:
        self._group.leave(self.rank, str(self._failure))

    def _release(self) -> None:
        self._group.leave(self.rank, "it closed its channel")
