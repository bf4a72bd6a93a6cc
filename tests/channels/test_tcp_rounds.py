"""What a rank passes on and answers for, in any order of events: nobody is forgotten."""

from __future__ import annotations

import random

import pytest

from gymfast.channels.base import Slot
from gymfast.channels.tcp_rounds import Answer, Line, Put, Rounds, stripes_of
from gymfast.channels.tree import Tree


@pytest.mark.parametrize("fanout", [1, 2, 3, 10])
@pytest.mark.parametrize("root", [0, 4])
def test_a_tree_reaches_every_rank_once(fanout: int, root: int) -> None:
    tree = Tree(9, fanout, root)
    reached = [root]
    for rank in reached:
        reached += tree.children(rank)
    assert sorted(reached) == list(range(9))
    for rank in range(9):
        ancestors = tree.ancestors(rank)
        assert rank == root or rank in tree.children(ancestors[0])
        assert rank == root or ancestors[-1] == root


class Network:
    """Ranks whose actions wait here until they are delivered, in any order."""

    def __init__(self, num_ranks: int, fanout: int, streams: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = [Rounds(rank, num_ranks, fanout, streams) for rank in range(num_ranks)]
        self.memory = [bytearray(12) for _ in self.ranks]
        self.dead: set[int] = set()
        self.pending: list = []

    def begin(self, root: int) -> None:
        for rank, rounds in enumerate(self.ranks):
            if rank not in self.dead:
                self.add(rank, rounds.begin([Slot(root, self.memory[rank])]))

    def add(self, rank: int, actions: list) -> None:
        self.pending += [(rank, action) for action in actions]

    def kill(self, rank: int) -> None:
        self.dead.add(rank)
        self.pending += [(other, rank) for other in range(len(self.ranks)) if other != rank]

    def run(self) -> None:
        while self.pending:
            rank, what = self.pending.pop(self.random.randrange(len(self.pending)))
            if rank in self.dead:
                continue
            rounds = self.ranks[rank]
            if isinstance(what, int):
                self.add(rank, rounds.lose(what, "it died"))
            elif isinstance(what, Put):
                self.deliver(rank, what)
            elif isinstance(what, Answer):
                for source in rounds.sources(what.root):  # the nearest that lives
                    if source not in self.dead:
                        line = Line(what.root, rank, what.stream)
                        self.add(source, self.ranks[source].answered(line, what.place))
                        break

    def deliver(self, rank: int, put: Put) -> None:
        target = put.line.rank
        if target in self.dead:
            return
        rounds = self.ranks[target]
        memory = rounds.memory_for(put.place, put.line.stream)
        if memory is not None:
            memory[:] = put.memory
        self.add(target, rounds.received(put.line.root, put.line.stream, put.place))


@pytest.mark.parametrize("fanout", [1, 2, 8])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("num_dead", [0, 1, 3])
def test_every_rank_that_lives_gets_every_byte(fanout: int, streams: int, num_dead: int) -> None:
    for seed in range(150):
        network = Network(8, fanout, streams, seed)
        network.memory[0][:] = bytes(range(1, 13))
        network.begin(0)
        for rank in network.random.sample(range(1, 8), num_dead):
            network.kill(rank)
        network.run()
        for rank in set(range(8)) - network.dead:
            assert network.memory[rank] == network.memory[0], (seed, rank)
            assert network.ranks[rank].num_left == 0, (seed, rank)


def test_a_rank_keeps_its_round_until_those_behind_it_have_it() -> None:
    middle = Rounds(1, 3, fanout=1, streams=1)
    memory = bytearray(4)
    assert middle.begin([Slot(0, memory)]) == []
    (put,) = middle.received(0, 0, (0, 0))
    assert put == Put(Line(0, 2, 0), (0, 0), memoryview(memory))
    assert middle.num_left == 1
    assert middle.received(0, 0, (0, 0)) == []
    assert middle.answered(Line(0, 2, 0), (0, 0)) == [Answer(0, 0, (0, 0))]
    assert middle.received(0, 0, (0, 0)) == [Answer(0, 0, (0, 0))]
    assert middle.num_left == 0


@pytest.mark.parametrize("streams", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("size", [0, 1, 5, 64, 1000])
def test_stripes_are_the_memory_in_parts(streams: int, size: int) -> None:
    memory = bytes(i % 256 for i in range(size))
    parts = stripes_of(memory, streams)
    assert len(parts) == streams
    assert b"".join(parts) == memory


def test_a_rank_that_calls_from_further_behind_is_served() -> None:
    root = Rounds(0, 3, fanout=1, streams=1)
    memory = bytearray(4)
    root.begin([Slot(0, memory)])
    assert root.adopt(0, 2) == [Put(Line(0, 2, 0), (0, 0), memoryview(memory))]
    assert root.adopt(0, 2) == []
    assert root.answered(Line(0, 2, 0), (0, 0)) == []
    assert root.num_left == 1  # the rank between may live
    root.lose(1, "it died")
    assert root.num_left == 0
    assert [put.line.rank for put in root.begin([Slot(0, memory)])] == [2]


def test_ranks_nearer_to_the_root_are_more_patient() -> None:
    parts = []
    for rank in range(4):
        rounds = Rounds(rank, 5, fanout=1, streams=1)
        rounds.begin([Slot(0, bytearray(4))])
        rounds.received(0, 0, (0, 0))
        parts.append(rounds.patience())
    assert parts == sorted(parts, reverse=True)
    assert all(0.5 < own < 1 for own, _ in parts)
    assert [before for _, before in parts[1:]] == [own for own, _ in parts[:-1]]
    waiting = Rounds(3, 5, fanout=1, streams=1)
    waiting.begin([Slot(0, bytearray(4))])
    assert waiting.patience() == (1, 1)
