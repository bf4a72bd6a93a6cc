"""The channel over gloo, which torch brings along; mainly for comparison."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from gymfast.channels.base import DEFAULT_DEPTH, DEFAULT_TIMEOUT_S, Slot
from gymfast.channels.control import Control
from gymfast.channels.threaded import ThreadedChannel
from gymfast.errors import ChannelError, MissingDependencyError

_LOOK_S = 0.05


class GlooChannel(ThreadedChannel):
    """One rank of a gloo process group. A rank that dies ends the rounds of all: make a new group.

    gloo cannot be stopped in the middle: what an aborted round fills may change until it times out.
    """

    takes_many_slots = True

    def __init__(
        self,
        process_group: Any,
        *,
        depth: int = DEFAULT_DEPTH,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """A channel over a `torch.distributed.ProcessGroupGloo`, which it has for itself."""
        self._group = process_group
        rank, num_ranks = process_group.rank(), process_group.size()
        super().__init__(rank, num_ranks, depth=depth, timeout_s=timeout_s)

    def _move(self, slots: Sequence[Slot], deadline_s: float) -> None:
        for root in dict.fromkeys(slot.root for slot in slots):
            mine = [slot.memory for slot in slots if slot.root == root]
            self._compare_sizes(root, [len(memory) for memory in mine], deadline_s)
            # All at once: the next begins while the ends of one before are waited for.
            works = [self._begin(m, root, deadline_s) for m in mine if len(m)]
            for work in works:
                self._finish(work, root, deadline_s)

    def _compare_sizes(self, root: int, sizes: list[int], deadline_s: float) -> None:
        """Raises ChannelError for other sizes than the root has: gloo might end the process."""
        said = np.array([len(sizes), sum(sizes), zlib.crc32(repr(sizes).encode())], np.int64)
        ours = said.copy()
        self._finish(self._begin(said.view(np.uint8), root, deadline_s), root, deadline_s)
        if (said != ours).any():
            raise ChannelError(
                f"rank {root} sends {said[1]} bytes in {said[0]} slots, {ours[1]} in {ours[0]} are "
                "expected: the ranks have different plans",
                (root,),
            )

    def _begin(self, memory: Any, root: int, deadline_s: float) -> Any:
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
        try:
            return self._group.broadcast([torch.from_numpy(memory)], options)
        except RuntimeError as error:
            raise ChannelError(f"gloo, with rank {root} as root: {error}", (root,)) from error

    def _finish(self, work: Any, root: int, deadline_s: float) -> None:
        try:
            while not work.is_completed():
                if self._failure is not None:
                    raise ChannelError(str(self._failure))
                if time.monotonic() > deadline_s:
                    raise ChannelError(
                        f"a round was not complete within {self.timeout_s:g} s: waiting for rank "
                        f"{root}",
                        (root,),
                    )
                self._wait(work)
            work.wait()
        except RuntimeError as error:
            raise ChannelError(f"gloo, with rank {root} as root: {error}", (root,)) from error

    def _wait(self, work: Any) -> None:
        """Waits for a moment. gloo says by an error that it was not enough; others come again."""
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=_LOOK_S))

    def _interrupt(self) -> None:
        """The thread looks for a failure by itself."""

    def _release(self) -> None:
        self._group = None


def open_gloo(
    control: Control,
    *,
    host: str = "127.0.0.1",
    depth: int = DEFAULT_DEPTH,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> GlooChannel:
    """A channel over gloo between the ranks of a formation; called by all of them.

    Rank 0 holds the store by which gloo finds its addresses, at its `host`. gloo has no key.
    Raises MissingDependencyError without torch, ChannelError if the group cannot be made.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingDependencyError(
            "gymfast.channels.gloo needs torch: install gymfast[torch]"
        ) from error
    timeout = timedelta(seconds=timeout_s)
    rank, size = control.ranks.index(control.rank), len(control.ranks)
    store = None
    try:
        if rank == 0:
            options = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
            store = dist.TCPStore(host, 0, **options)
        found = control.gather(None, timeout_s)
        missing = [one for one in control.ranks if one not in found]
        place = [missing, host, store.port] if store else None
        missing, *place = control.share(place, timeout_s)
        if missing:  # gloo would wait for them and not say for whom
            raise ChannelError(f"ranks {missing} did not come to make a group", tuple(missing))
        store = store or dist.TCPStore(*place, timeout=timeout)
        group = dist.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise ChannelError(f"gloo makes no group of ranks {control.ranks}: {error}") from error
    return GlooChannel(group, depth=depth, timeout_s=timeout_s)
