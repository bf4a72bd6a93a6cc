"""The contract of channels: live bytes from one rank of a group to all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

Memory: TypeAlias = Any  # flat, contiguous bytes: a NumPy array of uint8, on a GPU a torch tensor

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_DEPTH = 3


@dataclass(frozen=True)
class Slot:
    """One broadcast of a round: memory that its root reads and all other ranks fill."""

    root: int
    memory: Memory


class Channel(ABC):
    """Moves memory from one rank of a group to all others, round by round. Not thread-safe.

    All ranks begin the same rounds, with slots of the same roots and sizes, in the same order.
    At most `depth` rounds are under way. A rank that dies is named in `lost`; whether the others
    go on is up to the channel (`survives_loss`), an error names the ranks that it concerns. What
    an unfinished round filled is garbage.
    """

    survives_loss = False
    """Whether a root goes on with those that are left, so that only the lost rank misses bytes."""
    takes_many_slots = False
    """Whether several slots of one root in a round cost less than copies into one."""
    good_bucket_bytes = 4 << 20
    """A size of buckets for whoever has no reason for another."""
    sizes_agreed = False
    """Whether all ranks are known to pass the same sizes, so that no round has to compare them."""

    def __init__(self, rank: int, num_ranks: int, *, depth: int, timeout_s: float) -> None:
        """Raises ValueError for a rank that is not in the group, no depth, or no time."""
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank} in a group of {num_ranks}")
        if depth < 1:
            raise ValueError(f"depth is {depth}, expected 1 or more")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, expected more than 0")
        self.rank, self.num_ranks, self.depth, self.timeout_s = rank, num_ranks, depth, timeout_s

    @property
    @abstractmethod
    def lost(self) -> Mapping[int, str]:
        """Ranks that are out of reach from here, and why."""

    @abstractmethod
    def begin(self, slots: Sequence[Slot]) -> None:
        """Begins a round; its memory is the channel's until the round is finished.

        Waits while `depth` rounds are under way. Raises ChannelError as `finish` does.
        """

    @abstractmethod
    def finish(self, num_left: int = 0) -> None:
        """Returns once at most `num_left` rounds are under way, oldest first.

        Raises ChannelError, by the deadline of a round, if one failed or was aborted.
        """

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """For rounds whose sizes all ranks compared before; the block begins and ends without any.

        Raises ChannelError as `finish` does.
        """
        self.finish()
        self.sizes_agreed = True
        try:
            yield
            self.finish()
        finally:
            self.sizes_agreed = False

    def lose(self, rank: int, why: str) -> None:
        """Tells the channel that a rank is gone, from any thread: nobody waits for it any more.

        Ends all rounds where the channel does not survive a loss.
        """
        self.abort(f"rank {rank} is lost: {why}")

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Ends all rounds here and now, from any thread: whoever waits gets a ChannelError."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back. Rounds under way are aborted. May be called twice."""
