"""The channel over gloo, which torch brings along; mainly for comparison."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from gymfast.channels.agreement import WAITED, exchange, require_equal
from gymfast.channels.base import DEFAULT_DEPTH, DEFAULT_TIMEOUT_S, Slot
from gymfast.channels.control import Control
from gymfast.channels.threaded import ThreadedChannel
from gymfast.errors import ChannelError, MissingDependencyError

_LOOK_S = 0.05
_NO_GROUP = "gloo makes no group"


@dataclass(frozen=True)
class _Round:
    """What gloo has been told to move, each with its root."""

    works: list[tuple[int, Any]]
    deadline_s: float


class GlooChannel(ThreadedChannel):
    """One rank of a gloo process group. A rank that dies ends the rounds of all: make a new group.

    gloo cannot be stopped in the middle: what an aborted round fills may change until it times out.
    """

    takes_many_slots = True
    good_bucket_bytes = 16 << 20  # each broadcast costs about 0.4 ms

    def __init__(
        self,
        process_group: Any,
        *,
        depth: int = DEFAULT_DEPTH,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """A channel over a `torch.distributed.ProcessGroupGloo`, which it has for itself."""
        self._group = process_group
        self._under_way = deque[_Round]()  # begun while sizes were agreed, oldest first
        rank, num_ranks = process_group.rank(), process_group.size()
        super().__init__(rank, num_ranks, depth=depth, timeout_s=timeout_s)

    def begin(self, slots: Sequence[Slot]) -> None:
        if not self.sizes_agreed:
            super().begin(slots)
            return
        # gloo has threads of its own: rounds are under way side by side.
        self.finish(self.depth - 1)
        deadline_s = time.monotonic() + self.timeout_s
        try:
            self._under_way.append(self._begin_all(slots, deadline_s))
        except ChannelError as error:
            self._fail(error)
            raise

    def finish(self, num_left: int = 0) -> None:
        super().finish(num_left)
        while len(self._under_way) > num_left:
            try:
                self._finish_all(self._under_way.popleft())
            except ChannelError as error:
                self._fail(error)
                raise

    def close(self) -> None:
        if self._under_way:
            self.abort("the channel was closed")
            self._under_way.clear()
        super().close()

    def _move(self, slots: Sequence[Slot], deadline_s: float) -> None:
        for root in dict.fromkeys(slot.root for slot in slots):
            mine = [slot for slot in slots if slot.root == root]
            self._compare_sizes(root, [len(slot.memory) for slot in mine], deadline_s)
            self._finish_all(self._begin_all(mine, deadline_s))

    def _begin_all(self, slots: Sequence[Slot], deadline_s: float) -> _Round:
        """All at once: the next begins while the ends of one before are waited for."""
        used = [slot for slot in slots if len(slot.memory)]
        works = [(slot.root, self._begin(slot.memory, slot.root, deadline_s)) for slot in used]
        return _Round(works, deadline_s)

    def _finish_all(self, begun: _Round) -> None:
        for root, work in begun.works:
            self._finish(work, root, begun.deadline_s)

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
                    raise ChannelError(str(self._failure), self._failure.ranks)
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
        # The end of a group waits for rounds that were aborted, until these time out.
        groups, self._group = [self._group], None
        threading.Thread(target=groups.clear, name="gymfast-gloo-end", daemon=True).start()


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
    rank = control.ranks.index(control.rank)
    timeout = timedelta(seconds=timeout_s)
    store, problem = None, ""
    try:
        if rank == 0:
            options = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
            store = dist.TCPStore(host, 0, **options)
    except RuntimeError as error:
        problem = str(error)
    # Nobody waits in gloo for a rank that is not there: it would not say for which.
    value = [depth, [host, store.port] if store else None]
    found = exchange(control, _NO_GROUP, value, problem, timeout_s)
    require_equal("the depth of the channel", {r: depth for r, (depth, _) in found.items()})
    _, place = found[0]

    def make() -> Any:
        where = store or dist.TCPStore(*place, timeout=timeout)
        return dist.ProcessGroupGloo(where, rank, len(control.ranks), timeout)

    end_s = time.monotonic() + 2 * timeout_s  # torch may try for twice its time-out
    troubles = queue.SimpleQueue[Any]()
    with control.watching(lambda *trouble: _pass_on(control, troubles, *trouble)):
        group, problem = _make(make, troubles, end_s)
        if problem:
            control.trouble(problem)
        wait_s = timeout_s + max(end_s - time.monotonic(), 0.0)
        exchange(control, _NO_GROUP, None, problem, wait_s, timeout_s + wait_s)
    return GlooChannel(group, depth=depth, timeout_s=timeout_s)


def _pass_on(control: Control, troubles: queue.SimpleQueue[Any], rank: int, why: str) -> None:
    """What rank 0 learns of a rank the others have to know: they may wait for it in torch."""
    if rank in control.ranks:
        if control.rank == 0:
            control.trouble(why, of=rank)
        troubles.put((None, f"{WAITED}{rank}: {why}"))


def _make(
    make: Callable[[], Any], answers: queue.SimpleQueue[Any], end_s: float
) -> tuple[Any, str]:
    """A group, or why there is none, by the moment `end_s`; trouble is among the answers too.

    torch waits until its time-out for a rank that is gone. Its thread is left to it then.
    """

    def work() -> None:
        try:
            answers.put((make(), ""))
        except RuntimeError as error:
            answers.put((None, str(error)))

    threading.Thread(target=work, name="gymfast-gloo-make", daemon=True).start()
    try:
        group, problem = answers.get(timeout=max(end_s - time.monotonic(), 0.001))
    except queue.Empty:
        return None, "torch made no group in twice the time-out"
    return group, problem
