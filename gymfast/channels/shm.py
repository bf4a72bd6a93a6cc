"""The channel between processes of one host: rings in shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from gymfast._core import ShmRing
from gymfast.channels.agreement import exchange, require_equal
from gymfast.channels.base import DEFAULT_DEPTH, DEFAULT_TIMEOUT_S, Slot
from gymfast.channels.control import Control
from gymfast.channels.threaded import ThreadedChannel
from gymfast.errors import ChannelError

CHUNK_BYTES = 512 << 10
NUM_CHUNKS = 8


class ShmChannel(ThreadedChannel):
    """One rank of a group on one host. See `open_shm`."""

    survives_loss = True
    takes_many_slots = True

    def __init__(
        self,
        rank: int,
        ring: ShmRing,
        paths: Sequence[str],
        *,
        depth: int = DEFAULT_DEPTH,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """A channel in whose ring this rank writes; `paths` lead to the rings of all ranks."""
        self._mine, self._paths = ring, paths
        self._rings: dict[int, ShmRing] = {}
        super().__init__(rank, len(paths), depth=depth, timeout_s=timeout_s)

    def _move(self, slots: Sequence[Slot], deadline_s: float) -> None:
        for slot in slots:
            left_s = max(deadline_s - time.monotonic(), 0)
            if slot.root == self.rank:
                # A slow rank is given up before the others give this one up.
                for rank in self._mine.write(slot.memory, 0.7 * left_s):
                    self._lost.setdefault(rank, f"it did not read within {0.7 * left_s:.3g} s")
                if 0 < self.num_ranks - 1 <= len(self._lost):
                    ranks = tuple(sorted(self._lost))
                    raise ChannelError(f"no other rank reads any more: {ranks}", ranks)
                continue
            try:
                self._ring(slot.root).read(slot.memory, left_s)
            except ChannelError as error:
                raise ChannelError(f"from rank {slot.root}: {error}", (slot.root,)) from error

    def lose(self, rank: int, why: str) -> None:
        self._lost.setdefault(rank, why)
        self._mine.drop(rank)

    def _ring(self, root: int) -> ShmRing:
        if root not in self._rings:
            self._rings[root] = ShmRing.open(self._paths[root], self.rank)
            if self._failure is not None:
                self._rings[root].cancel()
        return self._rings[root]

    def _interrupt(self) -> None:
        for ring in (self._mine, *self._rings.values()):
            ring.cancel()
            ring.leave()

    def _release(self) -> None:
        self._interrupt()
        self._rings.clear()


def make_ring(rank: int, num_ranks: int) -> tuple[ShmRing, str]:
    """The ring that a rank writes in, and the path by which others of this host open it."""
    ring = ShmRing.create(rank, num_ranks, CHUNK_BYTES, NUM_CHUNKS)
    return ring, f"/proc/{os.getpid()}/fd/{ring.fd}"


def open_shm(
    control: Control, *, depth: int = DEFAULT_DEPTH, timeout_s: float = DEFAULT_TIMEOUT_S
) -> ShmChannel:
    """A channel between the ranks of a formation, all of one host and user; called by all of them.

    Each rank takes 4 MiB once it sends.
    Raises ChannelError, on all ranks, if one is lost, has no memory or another depth, or is on
    another host.
    """
    rank = control.ranks.index(control.rank)
    ring, path, problem = None, "", ""
    try:
        ring, path = make_ring(rank, len(control.ranks))
    except (ChannelError, OSError) as error:
        problem = str(error)  # the others hear of it instead of waiting
    found = exchange(control, "no channel in shared memory", [depth, path], problem, timeout_s)
    require_equal("the depth of the channel", {r: depth for r, (depth, _) in found.items()})
    assert ring is not None
    paths = [found[number][1] for number in control.ranks]
    return ShmChannel(rank, ring, paths, depth=depth, timeout_s=timeout_s)
