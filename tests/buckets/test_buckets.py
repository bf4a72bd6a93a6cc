"""Buckets hold every byte of every tensor once, aligned, and both sides agree on where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymfast.buckets import (
    ALIGNMENT,
    BucketPlan,
    BucketTensor,
    Turn,
    difference,
    rounds,
    split_over_roots,
)

ITEMS = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8, "C128": 16}


def tensor(name: str, count: int, dtype: str = "BF16") -> BucketTensor:
    return BucketTensor(name, dtype, (count,), count * ITEMS[dtype])


TENSORS = st.lists(st.tuples(st.integers(0, 2000), st.sampled_from(list(ITEMS))), max_size=12).map(
    lambda rows: [tensor(f"t{i}", count, dtype) for i, (count, dtype) in enumerate(rows)]
)
BUCKETS = st.integers(1, 20).map(lambda n: n * ALIGNMENT)


@given(TENSORS, BUCKETS)
def test_packing_and_unpacking_gives_every_tensor_back(
    tensors: list[BucketTensor], bucket_bytes: int
) -> None:
    rng = np.random.default_rng(0)
    plan = BucketPlan(tensors, bucket_bytes)
    before = [rng.integers(0, 256, t.num_bytes, dtype=np.uint8) for t in tensors]
    after = [np.zeros(t.num_bytes, np.uint8) for t in tensors]
    num_written = [np.zeros(t.num_bytes, np.uint8) for t in tensors]
    for number in range(plan.num_buckets):
        bucket = np.zeros(plan.bucket_size(number), np.uint8)
        for p in plan.pieces(number):
            piece = before[p.tensor][p.tensor_offset : p.tensor_offset + p.num_bytes]
            bucket[p.bucket_offset : p.bucket_offset + p.num_bytes] = piece
        for p in plan.pieces(number):
            piece = bucket[p.bucket_offset : p.bucket_offset + p.num_bytes]
            after[p.tensor][p.tensor_offset : p.tensor_offset + p.num_bytes] = piece
            num_written[p.tensor][p.tensor_offset : p.tensor_offset + p.num_bytes] += 1
    for old, new, counts in zip(before, after, num_written, strict=True):
        assert (old == new).all()
        assert (counts == 1).all()


@given(TENSORS, BUCKETS)
def test_a_piece_of_any_dtype_is_aligned(tensors: list[BucketTensor], bucket_bytes: int) -> None:
    plan = BucketPlan(tensors, bucket_bytes)
    for number in range(plan.num_buckets):
        last_end = 0
        for p in plan.pieces(number):
            item = ITEMS[plan.tensors[p.tensor].dtype]
            assert p.tensor_offset % ALIGNMENT == p.bucket_offset % ALIGNMENT == 0
            assert p.num_bytes % item == 0
            assert last_end <= p.bucket_offset
            last_end = p.bucket_offset + p.num_bytes
        assert last_end <= plan.bucket_size(number) <= bucket_bytes


def test_R72_a_tensor_larger_than_a_bucket_is_split() -> None:
    plan = BucketPlan([tensor("embed", 5 << 20)], 1 << 20)
    assert plan.num_buckets == 10
    assert [next(iter(plan.pieces(n))).tensor_offset for n in range(10)] == [
        n << 20 for n in range(10)
    ]


def test_R76_positions_beyond_four_gigabytes_are_exact() -> None:
    big = tensor("big", (1 << 33) + 5, "U8")
    plan = BucketPlan([tensor("a", 3), big, tensor("z", 7)], 1 << 30)
    assert plan.num_buckets == 9
    last = list(plan.pieces(8))
    assert [(p.tensor, p.tensor_offset, p.num_bytes) for p in last] == [
        (1, (1 << 33) - 256, 261),
        (2, 0, 14),
    ]
    assert last[1].bucket_offset == 512


@pytest.mark.parametrize(
    "size", [(1 << power) + more for power in (31, 32, 33) for more in (-1, 0)]
)
@pytest.mark.parametrize("bucket_bytes", [1 << 20, (1 << 31) - 256, 1 << 32])
def test_R76_no_position_near_a_limit_of_an_integer_is_off(size: int, bucket_bytes: int) -> None:
    plan = BucketPlan([tensor("big", size, "U8"), tensor("z", 7, "U8")], bucket_bytes)
    starts = [0, (size + 255) // 256 * 256]
    numbers = {0, plan.num_buckets // 2, max(plan.num_buckets - 2, 0), plan.num_buckets - 1}
    for number in sorted(numbers):
        for piece in plan.pieces(number):
            begin = number * bucket_bytes + piece.bucket_offset
            assert begin == starts[piece.tensor] + piece.tensor_offset
    assert begin + piece.num_bytes == plan.num_bytes == starts[1] + 7


@pytest.mark.parametrize("tensors", [[], [tensor("a", 0)], [tensor("a", 0), tensor("b", 0)]])
def test_I55_R74_nothing_to_send_is_a_plan_without_buckets(tensors: list[BucketTensor]) -> None:
    plan = BucketPlan(tensors, 256)
    assert (plan.num_buckets, plan.num_bytes) == (0, 0)
    with pytest.raises(IndexError, match="bucket 0 is asked for, the plan has 0"):
        plan.bucket_size(0)


@pytest.mark.parametrize("size", [0, -256, 1, 255, 257, 1000])
def test_a_bucket_that_would_misalign_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_bytes is {size}, expected a multiple of 256"):
        BucketPlan([], size)


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is in the plan twice"):
        BucketPlan([tensor("a", 1), tensor("a", 2)], 256)


OTHERS = {
    "size": (BucketPlan([tensor("a", 9)], 512), "256 bytes here, 512 there"),
    "name": (BucketPlan([tensor("b", 9)], 256), "tensor 0 is 'a' BF16 [9] of 18 bytes here, 'b'"),
    "dtype": (
        BucketPlan([BucketTensor("a", "F16", (9,), 18)], 256),
        "'a' F16 [9] of 18 bytes there",
    ),
    "shape": (BucketPlan([BucketTensor("a", "BF16", (3, 3), 18)], 256), "BF16 [3, 3] of 18"),
    "more": (BucketPlan([tensor("a", 9), tensor("b", 1)], 256), "tensor 1 is missing here, 'b'"),
    "fewer": (BucketPlan([], 256), "tensor 0 is 'a' BF16 [9] of 18 bytes here, missing there"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_plans_that_differ_have_other_digests_and_say_in_what(kind: str) -> None:
    ours, (theirs, words) = BucketPlan([tensor("a", 9)], 256), OTHERS[kind]
    assert ours.digest != theirs.digest
    assert words in difference(ours, theirs)


def test_equal_plans_have_one_digest() -> None:
    one, other = (BucketPlan([tensor("a", 9), tensor("b", 2)], 256) for _ in range(2))
    assert one.digest == other.digest
    assert difference(one, other) == ""


def test_names_cannot_be_shifted_into_each_other() -> None:
    one = BucketPlan([tensor("a", 1), tensor("b", 1)], 256)
    other = BucketPlan([tensor("ab", 1), tensor("", 1)], 256)
    assert one.digest != other.digest


@given(st.lists(st.integers(0, 9), max_size=8))
def test_a_round_has_at_most_one_bucket_of_each_root(counts: list[int]) -> None:
    turns = list(rounds(counts))
    for turn in turns:
        assert turn
        assert len({t.root for t in turn}) == len(turn)
    flat = [t for turn in turns for t in turn]
    assert sorted(flat, key=lambda t: (t.root, t.bucket)) == [
        Turn(root, bucket) for root, count in enumerate(counts) for bucket in range(count)
    ]


@given(TENSORS, st.integers(1, 5))
def test_roots_share_all_tensors_about_evenly(tensors: list[BucketTensor], num_roots: int) -> None:
    shares = split_over_roots(tensors, num_roots)
    names = [t.name for share in shares for t in share]
    assert sorted(names) == sorted(t.name for t in tensors)
    loads = [sum(t.num_bytes for t in share) for share in shares]
    assert max(loads) - min(loads) <= max((t.num_bytes for t in tensors), default=0)
    assert shares == split_over_roots(tensors, num_roots)
