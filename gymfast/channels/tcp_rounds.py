"""What one rank of a TcpChannel has, still waits for, and passes on; pure: no socket, no clock.

Each slot of a round is cut into stripes, one for each stream. A rank answers for a stripe when it
and all ranks behind it have it. Until then every rank before it keeps the bytes; so when a rank is
lost, those behind it get theirs from the rank before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gymfast.channels.base import Slot
from gymfast.channels.tree import Tree

Place = tuple[int, int]  # round and slot


@dataclass(frozen=True)
class Line:
    """Where bytes go: from here to `rank` in the tree of `root`, on one of the streams."""

    root: int
    rank: int
    stream: int


@dataclass(frozen=True)
class Put:
    """Send a stripe."""

    line: Line
    place: Place
    memory: memoryview


@dataclass(frozen=True)
class Answer:
    """Tell the rank before this one, in the tree of `root`, that a stripe is complete."""

    root: int
    stream: int
    place: Place


Action = Put | Answer


@dataclass
class _Stripe:
    memory: memoryview
    is_here: bool
    waiting: set[int]  # ranks that have to answer to this one
    answered: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return self.is_here and not self.waiting


@dataclass
class _Round:
    number: int
    slots: Sequence[Slot]
    stripes: dict[tuple[int, int], _Stripe] = field(default_factory=dict)  # by slot and stream

    @property
    def is_done(self) -> bool:
        return all(stripe.is_done for stripe in self.stripes.values())


class Rounds:
    """The rounds under way at one rank. Not thread-safe."""

    def __init__(self, rank: int, num_ranks: int, fanout: int, streams: int) -> None:
        """Raises ValueError for a fanout or streams below 1."""
        if streams < 1:
            raise ValueError(f"streams is {streams}, expected 1 or more")
        self._rank, self._streams = rank, streams
        self._trees = [Tree(num_ranks, fanout, root) for root in range(num_ranks)]
        self._rounds: deque[_Round] = deque()
        self._num_begun = 0
        self._adopted: dict[int, set[int]] = {}  # by root: ranks further behind that called here
        self.lost: dict[int, str] = {}

    @property
    def num_left(self) -> int:
        """Rounds under way, counted from the oldest that is not complete."""
        while self._rounds and self._rounds[0].is_done:
            self._rounds.popleft()
        return len(self._rounds)

    @property
    def oldest(self) -> int:
        """The number of the oldest round under way, or of the next one."""
        return self._num_begun - self.num_left

    def sources(self, root: int) -> tuple[int, ...]:
        """Ranks that may send the bytes of a root to this one, the nearest first."""
        return self._trees[root].ancestors(self._rank)

    def begin(self, slots: Sequence[Slot]) -> list[Action]:
        """A new round."""
        new = _Round(self._num_begun, slots)
        self._num_begun += 1
        self._rounds.append(new)
        actions: list[Action] = []
        for number, slot in enumerate(slots):
            waiting = self._behind(slot.root, self._rank)
            is_here = slot.root == self._rank
            for stream, part in enumerate(stripes_of(slot.memory, self._streams)):
                new.stripes[number, stream] = _Stripe(part, is_here, set(waiting))
                if is_here:
                    actions += self._pass_on(new, number, stream, waiting)
        return actions

    def memory_for(self, place: Place, stream: int) -> memoryview | None:
        """Where a stripe goes; None for one that is here already.

        Raises KeyError for a round that has not begun, IndexError for a slot that it does not have.
        """
        of = self._find(place[0])
        if of is None:
            if place[0] < self.oldest:
                return None
            raise KeyError(place)
        if place[1] >= len(of.slots):
            raise IndexError(f"slot {place[1]} of {len(of.slots)}")
        stripe = of.stripes[place[1], stream]
        return None if stripe.is_here else stripe.memory

    def received(self, root: int, stream: int, place: Place) -> list[Action]:
        """A stripe came, for the first time or again: then its sender wants an answer."""
        of = self._find(place[0])
        if of is None:
            return [Answer(root, stream, place)]
        stripe = of.stripes[place[1], stream]
        if stripe.is_here:
            return self._answer_if_done(of, place[1], stream)
        stripe.is_here = True
        return self._pass_on(of, place[1], stream, stripe.waiting)

    def answered(self, line: Line, place: Place) -> list[Action]:
        """A rank and all behind it have a stripe."""
        of = self._find(place[0])
        if of is None:
            return []
        stripe = of.stripes[place[1], line.stream]
        stripe.waiting.discard(line.rank)
        stripe.answered.add(line.rank)
        return self._answer_if_done(of, place[1], line.stream)

    def complete(self, root: int, stream: int) -> list[Answer]:
        """Answers for the rounds under way, for a rank before this one that does not know them."""
        return [
            Answer(root, stream, (of.number, number))
            for of in self._rounds
            for number, slot in enumerate(of.slots)
            if slot.root == root and of.stripes[number, stream].is_done
        ]

    def lose(self, rank: int, why: str) -> list[Action]:
        """A rank is gone: those behind it are passed on to from here."""
        if rank in self.lost:
            return []
        self.lost[rank] = why
        actions: list[Action] = []
        for of in self._rounds:
            for (number, stream), stripe in of.stripes.items():
                if rank not in stripe.waiting:
                    continue
                heirs = set(self._behind(of.slots[number].root, rank)) - stripe.answered
                stripe.waiting.discard(rank)
                stripe.waiting.update(heirs)
                if stripe.is_here:
                    actions += self._pass_on(of, number, stream, heirs)
        return actions

    def adopt(self, root: int, rank: int) -> list[Action]:
        """A rank calls for the bytes of a root; one that is not behind this one is from now on.

        It could not reach the rank before it, which may be gone without a word here.
        """
        if rank in self._behind(root, self._rank):
            return []
        self._adopted.setdefault(root, set()).add(rank)
        actions: list[Action] = []
        for of in self._rounds:
            for (number, stream), stripe in of.stripes.items():
                is_new = rank not in stripe.waiting | stripe.answered
                if of.slots[number].root == root and is_new:
                    stripe.waiting.add(rank)
                    if stripe.is_here:
                        actions += self._pass_on(of, number, stream, [rank])
        return actions

    def wanted(self) -> set[int]:
        """Roots whose bytes are missing here in rounds under way."""
        return {
            of.slots[number].root
            for of in self._rounds
            for (number, _), stripe in of.stripes.items()
            if not stripe.is_here
        }

    def patience(self) -> tuple[float, float]:
        """The part of its time that the oldest round may take before ranks behind are given up.

        First here, then at the rank before this one. All of it while bytes are missing here; else
        less the fewer ranks are behind, so that the rank just before a slow one gives it up first,
        and those that wait for bytes go on.
        """
        if not self.num_left:
            return 1.0, 1.0
        of, parts = self._rounds[0], [(0.0, 0.0)]
        if not all(stripe.is_here for stripe in of.stripes.values()):
            return 1.0, 1.0
        for slot in of.slots:
            tree = self._trees[slot.root]
            num_below, height = tree.num_below(self._rank), max(tree.num_below(slot.root), 1)
            parts.append((0.5 + 0.4 * num_below / height, 0.5 + 0.4 * (num_below + 1) / height))
        return max(parts)

    def overdue(self) -> tuple[set[int], set[int]]:
        """Of the oldest round: roots whose bytes are missing, and ranks that did not answer."""
        if not self.num_left:
            return set(), set()
        of = self._rounds[0]
        roots = {of.slots[n].root for (n, _), stripe in of.stripes.items() if not stripe.is_here}
        return roots, {rank for stripe in of.stripes.values() for rank in stripe.waiting}

    def _behind(self, root: int, rank: int) -> list[int]:
        """Who gets the bytes of a root from a rank: its children, for a lost one theirs."""
        found = []
        for child in self._trees[root].children(rank):
            found += self._behind(root, child) if child in self.lost else [child]
        if rank == self._rank:
            found += self._adopted.get(root, set()) - set(found) - self.lost.keys()
        return found

    def _pass_on(
        self, of: _Round, number: int, stream: int, ranks: Sequence[int] | set[int]
    ) -> list[Action]:
        root, memory = of.slots[number].root, of.stripes[number, stream].memory
        place = (of.number, number)
        puts: list[Action] = [
            Put(Line(root, rank, stream), place, memory) for rank in sorted(ranks)
        ]
        return puts + self._answer_if_done(of, number, stream)

    def _answer_if_done(self, of: _Round, number: int, stream: int) -> list[Action]:
        root = of.slots[number].root
        if root == self._rank or not of.stripes[number, stream].is_done:
            return []
        return [Answer(root, stream, (of.number, number))]

    def _find(self, number: int) -> _Round | None:
        place = number - self._rounds[0].number if self._rounds else -1
        return self._rounds[place] if 0 <= place < len(self._rounds) else None


def stripes_of(memory: object, streams: int) -> list[memoryview]:
    """The memory in about equal parts, one for each stream; some may be empty."""
    whole = memoryview(memory)  # type: ignore[arg-type]
    size = -(-len(whole) // streams)
    return [whole[i * size : (i + 1) * size] for i in range(streams)]
