"""Tensors in buckets over a channel, agreed on before and acknowledged after.

All ranks of a group make the same calls. What a transfer fills is garbage until it returned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, SupportsInt

from gymfast.buckets import ALIGNMENT, BucketPlan, BucketTensor, Piece, Turn, rounds
from gymfast.channels.agreement import Terms, agree
from gymfast.channels.base import Channel, Memory, Slot
from gymfast.channels.bucket_memory import BucketMemory
from gymfast.channels.control import Control
from gymfast.channels.host_memory import HostMemory
from gymfast.channels.troubles import heeding
from gymfast.errors import ChannelError, ChecksumError

_Digests = dict[int, list[list[int]]]  # by root and bucket: one for each slot
_Unread = dict[int, list[list[SupportsInt]]]  # a GPU may not have them yet
_SENDS = ", which sends, "  # in what a rank says whose bytes are right for all that it knows
_OWN_SLOT_BYTES = 1 << 20  # below, a copy at each end costs less than a slot


@dataclass
class Seconds:
    """Where the time of a transfer went on this rank; waiting for the channel is `wire`."""

    ready: float = 0.0
    pack: float = 0.0
    wire: float = 0.0
    unpack: float = 0.0
    acknowledge: float = 0.0


@dataclass(frozen=True)
class TransferReport:
    """What became of one transfer. `failed` has the words of each rank that did not get all."""

    version: int
    num_bytes: int
    failed: dict[int, str]
    seconds: Seconds = field(compare=False)

    def require_all(self) -> None:
        """Raises ChannelError, naming all of them, if a rank failed."""
        if self.failed:
            words = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.failed.items()))
            raise ChannelError(f"version {self.version}: {words}", tuple(sorted(self.failed)))


@dataclass
class _Load:
    """One bucket of a round: pieces that are moved from and to where they lie, and all others."""

    turn: Turn
    direct: list[Slot]
    arena: Slot | None
    packed: list[Piece]  # at their places in the arena

    @property
    def slots(self) -> list[Slot]:
        return self.direct if self.arena is None else [*self.direct, self.arena]


class BucketTransfer:
    """Moves tensors from their roots to all other ranks of a formation, any number of times."""

    def __init__(
        self,
        control: Control,
        channel: Channel,
        shares: Mapping[int, Sequence[BucketTensor]],
        bucket_bytes: int,
        *,
        environment: Mapping[str, str] | None = None,
        memory: BucketMemory | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """A transfer of `shares`: the tensors that each root sends, by its rank in the control.

        Ranks of the channel are positions in `control.ranks`. `environment` has what has to be
        equal on all ranks, such as the version and settings of NCCL.
        Raises ValueError for roots that are not in the formation, and as BucketPlan does.
        """
        if strangers := sorted(set(shares) - set(control.ranks)):
            raise ValueError(f"roots {strangers} are not among the ranks {control.ranks}")
        self._control, self._channel, self._timeout_s = control, channel, timeout_s
        self._memory: BucketMemory = memory or HostMemory()
        self._environment = {"the digest": self._memory.digest_name, **(environment or {})}
        self._plans = {root: BucketPlan(shares[root], bucket_bytes) for root in sorted(shares)}
        self._roots = list(self._plans)
        self._arenas: dict[tuple[int, int], Memory] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(plan.num_bytes for plan in self._plans.values())

    @property
    def staging_bytes(self) -> int:
        """Memory that this takes at most beside the tensors: `depth` buckets for each root.

        Taken once, when it is needed; pieces that are moved from where they lie need none.
        """
        sizes = (min(plan.bucket_bytes, plan.num_bytes) for plan in self._plans.values())
        return self._channel.depth * sum(sizes)

    def agree(self) -> None:
        """Returns if all ranks have the same plans and environment.

        Raises ChannelError, on all ranks, with the first difference and whose it is.
        """
        terms = Terms(self._plans, self._channel.depth, self._environment)
        agree(self._control, terms, self._timeout_s)

    def run(
        self, version: int, tensors: Mapping[str, Memory], *, refusal: Exception | None = None
    ) -> TransferReport:
        """Sends and fills tensors: flat bytes, those of other roots to be overwritten.

        A rank that cannot take part calls it with its `refusal`, which is raised again.
        Of a tensor only its length and slices are used, each slice once, in order: one that makes
        its bytes when it is sliced need never be whole in memory.

        The report tells of all ranks. Raises ChannelError if this rank did not get all,
        ChecksumError for damaged bytes, ValueError for tensors of another size; others go on if
        the channel can, or fail by their deadlines. A rank that failed needs a new channel.
        """
        control, seconds = self._control, Seconds()
        begin_s = time.perf_counter()
        failure = refusal
        digests: _Digests = {}
        try:
            if failure is None:
                self._check(tensors)
        except ValueError as error:
            failure = error
        refused = self._refused(version, failure)
        seconds.ready = time.perf_counter() - begin_s
        if not refused:
            try:
                with (
                    heeding(control, self._channel, self._roots),
                    self._channel.agreed(),
                    self._memory.in_use(),
                ):
                    digests = self._move(tensors, seconds)
            except Exception as error:  # noqa: BLE001 - raised below, when all ranks know of it
                failure = error
                self._channel.abort(f"{type(error).__name__}: {error}")
                control.trouble(f"{type(error).__name__}: {error}")
        begin_s = time.perf_counter()
        failed = self._acknowledge(digests, failure, refused)
        seconds.acknowledge = time.perf_counter() - begin_s
        if isinstance(failure, ChannelError):
            raise _with_causes(failure, failed) from failure
        if failure is not None:
            raise failure
        report = TransferReport(version, self.num_bytes, failed, seconds)
        if refused:
            report.require_all()
        if control.rank in failed:
            words = failed[control.rank]
            if senders := tuple(root for root in self._roots if root in failed):
                raise _with_causes(ChannelError(words, senders), failed)
            raise ChecksumError(words)
        return report

    def _refused(self, version: int, failure: Exception | None) -> dict[int, str]:
        """Why no round begins, by rank; empty if all ranks begin the same rounds.

        So no rank waits in one for another that never comes, or that passes other sizes.
        """
        control = self._control
        words = "" if failure is None else f"{type(failure).__name__}: {failure}"
        said = control.gather([words, version, self._layout], self._timeout_s)
        refused: dict[int, str] = {}
        for rank, (text, number, layout) in said.items():
            if text:
                refused[rank] = text
            elif number != version:
                refused[rank] = f"it runs version {number}, rank 0 runs {version}"
            elif layout != said[0][2]:
                refused[rank] = "its plan is not that of rank 0: agree() says in what"
        if not self._channel.survives_loss:
            refused |= {r: why for r, why in control.lost.items() if r in control.ranks}
        shared = control.share(sorted(refused.items()), self._timeout_s)
        return {int(rank): str(text) for rank, text in shared}

    @cached_property
    def _layout(self) -> list[Any]:
        """What the sizes of all rounds follow from: equal for equal rounds only."""
        digests = [[root, plan.digest] for root, plan in self._plans.items()]
        return [_OWN_SLOT_BYTES if self._channel.takes_many_slots else 0, digests]

    def _acknowledge(
        self, digests: _Digests, failure: Exception | None, refused: Mapping[int, str]
    ) -> dict[int, str]:
        """Who did not get all and why, as rank 0 found it."""
        control = self._control
        words = "" if failure is None else f"{type(failure).__name__}: {failure}"
        answers = control.gather(
            [words, [digests.get(r, []) for r in self._roots]], self._timeout_s
        )
        lost = {rank: why for rank, why in control.lost.items() if rank in control.ranks}
        failed = {**lost, **refused}
        for rank, (text, theirs) in answers.items():
            if text or (not refused and (text := self._differences(theirs, answers))):
                failed[rank] = text
        # Rank 0 may first have to wait for the end of its last rounds.
        rounds_s = 0.0 if control.rank == 0 else self._channel.timeout_s
        shared = control.share(sorted(failed.items()), self._timeout_s + rounds_s)
        return {int(rank): str(text) for rank, text in shared}

    def _differences(self, theirs: list[list[list[int]]], answers: Mapping[int, Any]) -> str:
        """What a rank got that is not what a root sent."""
        for place, root in enumerate(self._roots):
            if root not in answers:
                return f"rank {root}{_SENDS}is lost: {self._control.lost.get(root, '')}"
            if words := answers[root][0]:
                return f"rank {root}{_SENDS}failed: {words}"
            sent = answers[root][1][place]
            for bucket, (one, other) in enumerate(zip(sent, theirs[place], strict=True)):
                if one != other:
                    plan = self._plans[root]
                    names = [plan.tensors[piece.tensor].name for piece in plan.pieces(bucket)]
                    return (
                        f"bucket {bucket} of rank {root} came with other bytes than were sent; it "
                        f"holds {names[0]!r} and {len(names) - 1} more tensors"
                    )
        return ""

    def _move(self, tensors: Mapping[str, Memory], seconds: Seconds) -> _Digests:
        """All rounds; digests of the buckets of each root."""
        channel, under_way = self._channel, deque[list[_Load]]()
        digests: _Unread = {root: [] for root in self._roots}
        counts = [self._plans[root].num_buckets for root in self._roots]
        for number, turns in enumerate(rounds(counts)):
            if len(under_way) == channel.depth:
                self._end(under_way.popleft(), channel.depth - 1, tensors, digests, seconds)
            begin_s = time.perf_counter()
            loads = [self._load(turn, number, tensors, digests) for turn in turns]
            packed_s = time.perf_counter()
            channel.begin([slot for load in loads for slot in load.slots])
            seconds.pack += packed_s - begin_s
            seconds.wire += time.perf_counter() - packed_s
            under_way.append(loads)
        while under_way:
            done = under_way.popleft()
            self._end(done, len(under_way), tensors, digests, seconds)
        return {root: [[int(n) for n in one] for one in each] for root, each in digests.items()}

    def _load(
        self, turn: Turn, number: int, tensors: Mapping[str, Memory], digests: _Unread
    ) -> _Load:
        """The memory of a bucket: that of its tensors where they are large, else an arena.

        The root digests it here: what it reads now is in the caches when it is sent.
        """
        root = self._roots[turn.root]
        plan, place = self._plans[root], self._control.ranks.index(root)
        size = plan.bucket_size(turn.bucket)
        least = min(size, _OWN_SLOT_BYTES) if self._channel.takes_many_slots else size
        load, used = _Load(turn, [], None, []), 0
        for piece in plan.pieces(turn.bucket):
            if piece.num_bytes >= least:
                whole = tensors[plan.tensors[piece.tensor].name]
                begin = piece.tensor_offset
                load.direct.append(Slot(place, whole[begin : begin + piece.num_bytes]))
                continue
            load.packed.append(replace(piece, bucket_offset=used))
            used += -(-piece.num_bytes // ALIGNMENT) * ALIGNMENT
        if load.packed:
            last = load.packed[-1]
            arena = self._arena(turn.root, number % self._channel.depth)
            load.arena = Slot(place, arena[: last.bucket_offset + last.num_bytes])
        if root == self._control.rank:
            digests[root].append(self._digests_of(load, self._memory.pack, tensors))
        return load

    def _digests_of(
        self, load: _Load, copy: Callable[..., SupportsInt], tensors: Mapping[str, Memory]
    ) -> list[SupportsInt]:
        """One for each slot; `copy` packs or unpacks the pieces of the arena."""
        found: list[SupportsInt] = [
            self._memory.digest(slot.memory, [Piece(0, 0, 0, len(slot.memory))])
            for slot in load.direct
        ]
        if load.arena is not None:
            plan = self._plans[self._roots[load.turn.root]]
            own = [tensors[plan.tensors[piece.tensor].name] for piece in load.packed]
            found.append(copy(load.arena.memory, load.packed, own))
        return found

    def _end(
        self,
        done: list[_Load],
        num_left: int,
        tensors: Mapping[str, Memory],
        digests: _Unread,
        seconds: Seconds,
    ) -> None:
        begin_s = time.perf_counter()
        self._channel.finish(num_left)
        arrived_s = time.perf_counter()
        for load in done:
            root = self._roots[load.turn.root]
            if root != self._control.rank:
                digests[root].append(self._digests_of(load, self._memory.unpack, tensors))
        seconds.wire += arrived_s - begin_s
        seconds.unpack += time.perf_counter() - arrived_s

    def _arena(self, root: int, place: int) -> Memory:
        """Memory for one bucket, taken once and used again."""
        key = (root, place)
        if key not in self._arenas:
            plan = self._plans[self._roots[root]]
            size = min(plan.bucket_bytes, plan.num_bytes)
            found = self._of_channel(root, place, size)
            self._arenas[key] = self._memory.empty(size) if found is None else found
        return self._arenas[key]

    def _of_channel(self, root: int, place: int, size: int) -> Memory | None:
        """Memory of the channel at the same place on all ranks, if it is large enough for all."""
        arena = self._channel.arena
        whole = None if arena is None else self._memory.of_arena(arena)
        step = max(plan.bucket_bytes for plan in self._plans.values())
        begin = (root * self._channel.depth + place) * step
        if whole is None or len(whole) < len(self._roots) * self._channel.depth * step:
            return None
        return whole[begin : begin + size]

    def _check(self, tensors: Mapping[str, Memory]) -> None:
        for plan in self._plans.values():
            for tensor in plan.tensors:
                found = tensors.get(tensor.name)
                if found is None:
                    raise ValueError(f"tensor {tensor} of the plan is not among those given")
                if len(found) != tensor.num_bytes:
                    raise ValueError(f"tensor {tensor} is given with {len(found)} bytes")


def _with_causes(failure: ChannelError, failed: Mapping[int, str]) -> ChannelError:
    """A failure of the channel with the ranks that failed of something else, or are lost."""
    causes = {
        rank: text
        for rank, text in sorted(failed.items())
        if not text.startswith("ChannelError: ") and _SENDS not in text and text not in str(failure)
    }
    if not causes:
        return failure
    words = "; ".join(f"rank {rank}: {text}" for rank, text in causes.items())
    return ChannelError(f"{failure}; {words}", tuple(sorted({*failure.ranks, *causes})))
