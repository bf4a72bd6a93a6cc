"""One rank of a communicator of NCCL: rounds of grouped broadcasts of memory on GPUs."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from gymfast._core import NcclLibrary, NcclMemory, NcclRank
from gymfast.channels.base import (
    DEFAULT_DEPTH,
    DEFAULT_TIMEOUT_S,
    Arena,
    Channel,
    Memory,
    Slot,
)
from gymfast.channels.control import Control
from gymfast.channels.nccl_library import environment_of
from gymfast.errors import ChannelError

T = TypeVar("T")
_log = logging.getLogger(__name__)
_abandoned: list[object] = []  # memory that an NCCL that hangs may still write to
_LOOK_S = 0.1
_CLOSE_S = 5.0
_GRACE_S = 10.0  # for an abort, which hangs in some versions of NCCL


class NcclChannel(Channel):
    """One rank of a communicator. Memory is that of a GPU: flat torch tensors of bytes.

    A rank that dies ends the rounds of all: see open_nccl for how those that are left go on. NCCL
    does not compare sizes: BucketTransfer.agree does, before a byte moves. A round waits for what
    torch's current stream was given before, and runs on a stream of its own.
    """

    def __init__(
        self,
        library: NcclLibrary,
        rank: int,
        num_ranks: int,
        *,
        device: int = 0,
        depth: int = DEFAULT_DEPTH,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        control: Control | None = None,
    ) -> None:
        """A channel that belongs to no communicator yet: see join.

        Raises ValueError as Channel does, MissingDependencyError without a CUDA runtime,
        ChannelError without a GPU of that number.
        """
        super().__init__(rank, num_ranks, depth=depth, timeout_s=timeout_s)
        self.environment = environment_of(library)
        """What has to be equal on all ranks: for BucketTransfer."""
        self.members: tuple[int, ...] = control.ranks if control else tuple(range(num_ranks))
        """Ranks of the control plane in the order that NCCL has them."""
        self.num_failed_registrations = 0
        """How often an arena could not be allocated or registered, so that rounds go without."""
        self._library, self._device, self._control = library, device, control
        self._ranks = self.members  # by position
        self._nccl = NcclRank(library, device, depth, min(timeout_s, _GRACE_S))
        self._held: deque[Sequence[Slot]] = deque()  # memory of the rounds under way
        self._since_s = 0.0
        self._lock = threading.Lock()
        self._failure: ChannelError | None = None
        self._is_closed = False

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks that the control plane has lost, and why; NCCL itself names none."""
        known = self._control.lost if self._control else {}
        return {p: known[rank] for p, rank in enumerate(self._ranks) if rank in known}

    @property
    def can_shrink(self) -> bool:
        """Whether a communicator without some of the ranks can be made of this one."""
        return self._nccl.can_shrink

    @property
    def can_grow(self) -> bool:
        """Whether this NCCL can add ranks to a communicator."""
        return "grow" in self._library.features

    @property
    def registration(self) -> str:
        """How NCCL knows the arena: "window", "buffer" or "none"."""
        return self._nccl.registration

    @property
    def is_stuck(self) -> bool:
        """Whether NCCL did not come back from an abort: it may still use memory of its rounds."""
        return self._nccl.is_stuck

    @property
    def is_usable(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return self._failure is None and self._nccl.is_usable

    def join(self, unique_id: bytes, *, max_ctas: int = 0) -> None:
        """Becomes part of a communicator, together with all other ranks.

        `max_ctas` is the number of thread blocks that NCCL may take; 0 leaves it to NCCL.
        Raises ChannelError if a rank is lost, or by the deadline.
        """
        place = self.members.index(self._ranks[self.rank])
        self._call(lambda: self._nccl.join(unique_id, self.num_ranks, place, max_ctas))
        self._get_ready("ncclCommInitRankConfig")

    def shrink(self, parent: NcclChannel) -> None:
        """Takes the place of a channel with more ranks; called by those that are left."""
        rank = self._ranks[self.rank]
        self.members = tuple(one for one in parent.members if one in self._ranks)
        excluded = [n for n, one in enumerate(parent.members) if one not in self._ranks]
        if rank not in parent.members:
            raise ValueError(f"rank {rank} was not in the communicator that is to shrink")
        self._nccl = self._call(lambda: parent._nccl.shrink(excluded, self.timeout_s))
        self._get_ready("ncclCommShrink")

    def grow(
        self,
        parent: NcclChannel | None,
        members: Sequence[int],
        unique_id: bytes,
        *,
        max_ctas: int = 0,
    ) -> None:
        """Takes the place of a channel with fewer ranks, or of none on a new rank.

        `unique_id` is that of id_to_grow on the rank that asked for it and on new ranks.
        """
        self.members = tuple(members)
        if parent is not None:
            old = parent._nccl
            self._nccl = self._call(lambda: old.grow(self.num_ranks, unique_id))
        else:
            place = self.members.index(self._ranks[self.rank])
            nccl = self._nccl
            self._call(lambda: nccl.grow_into(unique_id, self.num_ranks, place, max_ctas))
        self._get_ready("ncclCommGrow")

    def new_id(self) -> bytes:
        """What all ranks of a communicator need; asked for on one of them."""
        return self._library.unique_id()

    def id_to_grow(self) -> bytes:
        """What new ranks need; asked for on one rank, which passes it to grow."""
        return self._call(self._nccl.id_to_grow)

    def take_arena(self, num_bytes: int, arena: Arena | None) -> None:
        """Has an arena of so many bytes from now on: the given one if it is as large.

        Raises ChannelError if there is no memory; the channel goes on without.
        """
        if arena is None or arena.num_bytes != num_bytes:
            made = NcclMemory(self._library, num_bytes, self._device)
            arena = Arena(made.address, num_bytes, made.is_managed, made)
        self.arena = arena

    def register_arena(self, how: str) -> bool:
        """Whether NCCL registered the arena as a "window" or "buffer"; it may skip some memory.

        A window is made by all ranks together. Raises ChannelError: the channel has failed then for
        a window, and goes on for a buffer.
        """
        arena, is_window = self.arena, how == "window"
        assert arena is not None
        memory: Any = arena.owner
        nccl, left_s = self._nccl, self.timeout_s
        if not is_window:
            nccl.register_memory(memory, False, left_s)
        elif not self._call(lambda: nccl.register_memory(memory, True, left_s)):
            raise self._late("ncclCommWindowRegister was not complete")
        return nccl.registration == how

    def deregister_arena(self) -> None:
        """Takes the registration back, by itself."""
        self._nccl.deregister()

    def begin(self, slots: Sequence[Slot]) -> None:
        places = [(self._place(slot.root), *_address(slot.memory)) for slot in slots]
        self.finish(self.depth - 1)
        producer = _current_stream(slots)
        if not self._held:
            self._since_s = time.monotonic()
        left_s = self._since_s + self.timeout_s - time.monotonic()
        if not self._call(lambda: self._nccl.begin(places, producer, left_s)):
            raise self._late("a round was not launched")
        self._held.append(slots)

    def finish(self, num_left: int = 0) -> None:
        while True:
            self._let_go()
            # Oldest first: each has a deadline of its own.
            wanted = max(num_left, len(self._held) - 1)
            left_s = self._since_s + self.timeout_s - time.monotonic()
            if not self._call(lambda n=wanted, s=left_s: self._nccl.wait(n, s)):  # type: ignore[misc]
                raise self._late("a round was not complete")
            self._let_go()
            if len(self._held) <= num_left:
                return

    def abort(self, reason: str) -> None:
        self._fail(ChannelError(f"aborted on rank {self.rank}: {reason}"))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._held:
            self.abort("the channel was closed")
        self._nccl.close(min(self.timeout_s, _CLOSE_S))
        if self._nccl.is_stuck:
            _log.warning("NCCL did not come back from an abort: memory of its rounds is kept")
            _abandoned.extend([*self._held, self.arena])
        self._held.clear()
        self.arena = None

    def discard(self) -> None:
        """Closes without asking the other ranks, some of which are gone."""
        self._nccl.stop(is_kept=False)
        self.close()

    def _get_ready(self, call: str) -> None:
        """Returns once the communicator can be used; a rank that is lost meanwhile ends it."""
        deadline_s = time.monotonic() + self.timeout_s
        while not self._call(lambda: self._nccl.wait_until_ready(_LOOK_S)):
            if self.lost or time.monotonic() > deadline_s:
                raise self._late(f"{call} was not complete")

    def _let_go(self) -> None:
        """Gives the memory of finished rounds back."""
        while len(self._held) > self._nccl.num_under_way:
            self._held.popleft()
            self._since_s = time.monotonic()

    def _late(self, what: str) -> ChannelError:
        """The failure that something took too long, or waits for a rank that is lost."""
        lost = self.lost
        names = "; ".join(f"rank {rank} is lost: {why}" for rank, why in sorted(lost.items()))
        why = names or "another rank does not take part, and none is known to be lost"
        text = f"rank {self.rank}: {what} within {self.timeout_s:g} s: {why}"
        return self._fail(ChannelError(text, tuple(sorted(lost))))

    def _fail(self, error: ChannelError) -> ChannelError:
        """Ends all rounds; what went wrong first is told from then on."""
        with self._lock:
            self._failure = self._failure or error
        self._nccl.stop(is_kept=True)
        return ChannelError(str(self._failure), self._failure.ranks)

    def _call(self, work: Callable[[], T]) -> T:
        if self._failure is not None:
            raise ChannelError(str(self._failure), self._failure.ranks)
        try:
            return work()
        except ChannelError as error:
            raise self._fail(error) from error

    def _place(self, root: int) -> int:
        """The number that NCCL has for a position."""
        if not 0 <= root < self.num_ranks:
            raise ValueError(f"root is {root} in a group of {self.num_ranks}")
        return self.members.index(self._ranks[root])


def _address(memory: Memory) -> tuple[int, int]:
    """Where flat bytes begin and how many there are."""
    if hasattr(memory, "data_ptr"):
        if not memory.is_contiguous() or memory.element_size() != 1:
            raise ValueError("memory of a round is not a contiguous tensor of bytes")
        return int(memory.data_ptr()), int(memory.numel())
    if not memory.flags.c_contiguous or memory.itemsize != 1:
        raise ValueError("memory of a round is not a contiguous array of bytes")
    return int(memory.ctypes.data), int(memory.nbytes)


def _current_stream(slots: Sequence[Slot]) -> int:
    """The stream on which the caller works on the memory; 0 is CUDA's default."""
    for slot in slots:
        memory: Any = slot.memory
        if getattr(memory, "is_cuda", False):
            return int(sys.modules["torch"].cuda.current_stream(memory.device).cuda_stream)
    return 0
