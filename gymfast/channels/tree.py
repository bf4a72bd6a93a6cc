"""Who passes bytes on to whom in a broadcast; pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tree:
    """A tree over all ranks in which each passes on to at most `fanout` others.

    1 is a chain, `num_ranks` a star. Ranks are placed in order, from the root on.
    """

    num_ranks: int
    fanout: int
    root: int = 0

    def __post_init__(self) -> None:
        if self.fanout < 1:
            raise ValueError(f"fanout is {self.fanout}, expected 1 (a chain) or more")

    def children(self, rank: int) -> tuple[int, ...]:
        """Ranks that get their bytes from this one."""
        first = self._place(rank) * self.fanout + 1
        places = range(first, min(first + self.fanout, self.num_ranks))
        return tuple((place + self.root) % self.num_ranks for place in places)

    def ancestors(self, rank: int) -> tuple[int, ...]:
        """The rank that this one gets its bytes from, the one before it, and so on to the root."""
        place, found = self._place(rank), []
        while place:
            place = (place - 1) // self.fanout
            found.append((place + self.root) % self.num_ranks)
        return tuple(found)

    def num_below(self, rank: int) -> int:
        """Ranks on the longest way from this one down."""
        found = self.children(rank)
        return 1 + self.num_below(found[0]) if found else 0  # the first child is the deepest

    def _place(self, rank: int) -> int:
        return (rank - self.root) % self.num_ranks
