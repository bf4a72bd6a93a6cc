"""Tensors laid out in flat buckets: which bytes of which tensor lie where; pure.

Tensors follow each other, each at a multiple of ALIGNMENT, and are cut where a bucket ends. So a
piece of any dtype is aligned in its bucket and in its tensor, whatever came before it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

ALIGNMENT = 256  # bytes: what a GPU copies at full speed, and a multiple of every element


@dataclass(frozen=True)
class BucketTensor:
    """One tensor of a plan; `dtype` is a safetensors tag."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} {list(self.shape)} of {self.num_bytes} bytes"


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor in one bucket; offsets are those of their first byte."""

    tensor: int  # its number in the plan
    tensor_offset: int
    bucket_offset: int
    num_bytes: int


class BucketPlan:
    """The layout of some tensors in buckets of one size; the last may be smaller.

    Empty tensors are in the plan and in no bucket. Without bytes there are no buckets.
    """

    def __init__(self, tensors: Iterable[BucketTensor], bucket_bytes: int) -> None:
        """Raises ValueError for a bucket that is no multiple of ALIGNMENT, or a name twice."""
        if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
            raise ValueError(
                f"bucket_bytes is {bucket_bytes}, expected a multiple of {ALIGNMENT}: tensors are "
                "split, so a bucket need not hold the largest of them"
            )
        self.tensors = tuple(tensors)
        self.bucket_bytes = bucket_bytes
        self._starts: list[int] = []
        end, names = 0, set[str]()
        for tensor in self.tensors:
            if tensor.num_bytes < 0:
                raise ValueError(f"tensor {tensor} has fewer than 0 bytes")
            if tensor.name in names:
                raise ValueError(f"tensor {tensor.name!r} is in the plan twice: leave one out")
            names.add(tensor.name)
            self._starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
            end = self._starts[-1] + tensor.num_bytes
        self.num_bytes = end
        self.num_buckets = -(-end // bucket_bytes)

    def bucket_size(self, bucket: int) -> int:
        """Bytes of a bucket, padding between tensors included."""
        self._check(bucket)
        return min(self.bucket_bytes, self.num_bytes - bucket * self.bucket_bytes)

    def pieces(self, bucket: int) -> Iterator[Piece]:
        """What a bucket holds, in order of its bytes."""
        self._check(bucket)
        begin = bucket * self.bucket_bytes
        end = begin + self.bucket_size(bucket)
        number = max(bisect_right(self._starts, begin) - 1, 0)
        while number < len(self.tensors) and self._starts[number] < end:
            start, tensor = self._starts[number], self.tensors[number]
            first, last = max(start, begin), min(start + tensor.num_bytes, end)
            if first < last:
                yield Piece(number, first - start, first - begin, last - first)
            number += 1

    @property
    def digest(self) -> str:
        """What both sides of a transfer compare: equal for equal plans only."""
        text = hashlib.sha256(f"gymfast buckets 1\n{self.bucket_bytes}\n".encode())
        for tensor in self.tensors:
            name = tensor.name.encode()
            text.update(f"{len(name)} {tensor.dtype} {tensor.shape} {tensor.num_bytes} ".encode())
            text.update(name)
        return text.hexdigest()

    def _check(self, bucket: int) -> None:
        if not 0 <= bucket < self.num_buckets:
            raise IndexError(f"bucket {bucket} is asked for, the plan has {self.num_buckets}")


def difference(ours: BucketPlan, theirs: BucketPlan) -> str:
    """The first thing in which two plans differ, in words; empty if they are equal."""
    if ours.bucket_bytes != theirs.bucket_bytes:
        return f"buckets have {ours.bucket_bytes} bytes here, {theirs.bucket_bytes} there"
    for number, (mine, other) in enumerate(zip_longest(ours.tensors, theirs.tensors)):
        if mine != other:
            here, there = mine or "missing", other or "missing"
            return f"tensor {number} is {here} here, {there} there"
    return ""


@dataclass(frozen=True)
class Turn:
    """One bucket in a round: its root sends it, all others receive it."""

    root: int
    bucket: int


def rounds(num_buckets: Sequence[int]) -> Iterator[list[Turn]]:
    """Groups of broadcasts in the order in which every rank issues them.

    `num_buckets` counts the buckets of each root's own plan. A round has at most one bucket of
    each root: NCCL fuses broadcasts of different roots, not several of one. Roots that are done,
    or have nothing, are left out.
    """
    for bucket in range(max(num_buckets, default=0)):
        yield [Turn(root, bucket) for root, count in enumerate(num_buckets) if bucket < count]


def split_over_roots(tensors: Iterable[BucketTensor], num_roots: int) -> list[list[BucketTensor]]:
    """Tensors of a model that every root holds, dealt out so that all send about the same.

    Largest first, each to the root with the fewest bytes; each share is in the given order.
    Raises ValueError without a root.
    """
    import heapq

    if num_roots < 1:
        raise ValueError(f"num_roots is {num_roots}, expected 1 or more")
    numbered = list(enumerate(tensors))
    shares: list[list[tuple[int, BucketTensor]]] = [[] for _ in range(num_roots)]
    loads = [(0, root) for root in range(num_roots)]
    for number, tensor in sorted(numbered, key=lambda pair: -pair[1].num_bytes):
        load, root = heapq.heappop(loads)
        shares[root].append((number, tensor))
        heapq.heappush(loads, (load + tensor.num_bytes, root))
    return [[tensor for _, tensor in sorted(share, key=lambda pair: pair[0])] for share in shares]
