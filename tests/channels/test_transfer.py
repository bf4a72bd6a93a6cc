"""Tensors over a channel: all of them, exactly, or an error with names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from channel_group import Controls, in_threads

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Loopback
from gymfast.errors import ChannelError

Tensors = dict[str, Any]


def make_tensors(seed: int, sizes: list[int], prefix: str = "t") -> Tensors:
    rng = np.random.default_rng(seed)
    return {f"{prefix}{i}": rng.integers(0, 256, n, dtype=np.uint8) for i, n in enumerate(sizes)}


def share_of(tensors: Tensors) -> list[BucketTensor]:
    return [BucketTensor(name, "U8", (len(t),), len(t)) for name, t in tensors.items()]


def zeros_like(tensors: Tensors) -> Tensors:
    return {name: np.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def controls() -> Iterator[Controls]:
    group = Controls(3)
    yield group
    group.close()


def transfers(
    controls: Controls, shares: dict[int, list[BucketTensor]], bucket_bytes: int, **options: Any
) -> list[BucketTransfer]:
    loopback = Loopback(len(controls.all))
    return [
        BucketTransfer(
            control, loopback.channel(control.rank, timeout_s=5), shares, bucket_bytes, **options
        )
        for control in controls.all
    ]


def run(ranks: list[BucketTransfer], version: int, memory: list[Tensors]) -> list[Any]:
    return in_threads(*(partial(r.run, version, m) for r, m in zip(ranks, memory, strict=True)))


SIZES = [0, 1, 700, 5000, 0, 256, 31]


@pytest.mark.parametrize("bucket_bytes", [256, 512, 1024, 65536])
def test_I05_all_ranks_end_with_the_bytes_of_the_root(
    controls: Controls, bucket_bytes: int
) -> None:
    tensors = make_tensors(0, SIZES)
    ranks = transfers(controls, {0: share_of(tensors)}, bucket_bytes)
    memory = [tensors, zeros_like(tensors), zeros_like(tensors)]
    in_threads(*(t.agree for t in ranks))
    reports = run(ranks, 7, memory)
    assert [report.version for report in reports] == [7, 7, 7]
    assert reports[0].failed == {}
    for received in memory[1:]:
        assert all((received[name] == tensors[name]).all() for name in tensors)


def test_several_roots_send_what_they_own(controls: Controls) -> None:
    own = {rank: make_tensors(rank, SIZES[rank:], f"r{rank}.") for rank in (0, 2)}
    ranks = transfers(controls, {rank: share_of(t) for rank, t in own.items()}, 512)
    everything = own[0] | own[2]
    memory = [
        {
            n: (t if rank in own and n in own[rank] else np.zeros_like(t))
            for n, t in everything.items()
        }
        for rank in range(3)
    ]
    for version in range(3):
        reports = run(ranks, version, memory)
        assert [report.failed for report in reports] == [{}, {}, {}]
        for received in memory:
            assert all((received[name] == everything[name]).all() for name in everything)
        for tensor in everything.values():
            tensor ^= 1


def test_nothing_to_send_is_a_transfer_too(controls: Controls) -> None:
    ranks = transfers(controls, {0: share_of({"none": np.zeros(0, np.uint8)})}, 256)
    reports = in_threads(*(lambda t=t: t.run(1, {"none": np.zeros(0, np.uint8)}) for t in ranks))
    assert [report.failed for report in reports] == [{}, {}, {}]


def test_plans_that_differ_are_refused_on_all_ranks(controls: Controls) -> None:
    tensors = make_tensors(0, [10, 20])
    ranks = transfers(controls, {0: share_of(tensors)}, 512)
    loopback = Loopback(3)
    other = [BucketTensor("t0", "U8", (10,), 10), BucketTensor("t1", "BF16", (10,), 20)]
    ranks[2] = BucketTransfer(controls.all[2], loopback.channel(2), {0: other}, 512)
    errors = in_threads(*(t.agree for t in ranks))
    words = (
        "rank 2 cannot take part: in the plan of root 0, tensor 1 is 't1' U8 [20] of 20 bytes "
        "here, 't1' BF16 [10] of 20 bytes there (here: rank 0)"
    )
    assert [str(error) for error in errors] == [words] * 3
    assert all(isinstance(error, ChannelError) for error in errors)


def test_an_environment_that_differs_is_named(controls: Controls) -> None:
    tensors = make_tensors(0, [10])
    ranks = transfers(controls, {0: share_of(tensors)}, 512, environment={"NCCL_ALGO": "Ring"})
    ranks[1] = BucketTransfer(
        controls.all[1], Loopback(3).channel(1), {0: share_of(tensors)}, 512, environment={}
    )
    errors = in_threads(*(t.agree for t in ranks))
    assert {str(error) for error in errors} == {
        "rank 1 cannot take part: NCCL_ALGO is None there and 'Ring' on rank 0"
    }


def test_a_rank_with_a_tensor_of_another_size_stops_all_before_a_byte_moves(
    controls: Controls,
) -> None:
    tensors = make_tensors(0, SIZES)
    ranks = transfers(controls, {0: share_of(tensors)}, 512)
    memory = [tensors, zeros_like(tensors), zeros_like(tensors)]
    memory[1]["t2"] = np.zeros(699, np.uint8)
    results = run(ranks, 1, memory)
    assert "tensor 't2' U8 [700] of 700 bytes is given with 699 bytes" in str(results[1])
    assert isinstance(results[0], ChannelError)
    assert results[0].ranks == (1,)
    assert not any(memory[2][name].any() for name in tensors)


def test_a_plan_that_nobody_compared_stops_all_before_a_byte_moves(controls: Controls) -> None:
    tensors = make_tensors(0, [10, 20])
    ranks = transfers(controls, {0: share_of(tensors)}, 512)
    other = [BucketTensor("t0", "U8", (10,), 10), BucketTensor("t1", "BF16", (10,), 20)]
    ranks[2] = BucketTransfer(controls.all[2], Loopback(3).channel(2), {0: other}, 512)
    memory = [tensors, zeros_like(tensors), zeros_like(tensors)]
    words = "version 1: rank 2: its plan is not that of rank 0: agree() says in what"
    assert [str(error) for error in run(ranks, 1, memory)] == [words] * 3
    assert not any(received[name].any() for received in memory[1:] for name in tensors)


def test_a_version_that_differs_stops_all_before_a_byte_moves(controls: Controls) -> None:
    tensors = make_tensors(0, [10, 20])
    ranks = transfers(controls, {0: share_of(tensors)}, 512)
    memory = [tensors, zeros_like(tensors), zeros_like(tensors)]
    errors = in_threads(
        *(partial(r.run, 5 + i, m) for i, (r, m) in enumerate(zip(ranks, memory, strict=True)))
    )
    words = ("rank 1: it runs version 6, rank 0 runs 5", "rank 2: it runs version 7, rank 0 runs 5")
    assert all(isinstance(error, ChannelError) and error.ranks == (1, 2) for error in errors)
    assert all(word in str(error) for error in errors for word in words)
    assert not any(received[name].any() for received in memory[1:] for name in tensors)


class Breaks(dict):
    """Tensors of a rank that fails when one of them is touched."""

    def __getitem__(self, name: str) -> Any:
        if name == "t3":
            raise RuntimeError("out of memory")
        return super().__getitem__(name)


def test_R79_a_receiver_that_fails_is_named_at_the_sender_and_the_others_finish(
    controls: Controls,
) -> None:
    tensors = make_tensors(0, SIZES)
    ranks = transfers(controls, {0: share_of(tensors)}, 512)
    memory = [tensors, Breaks(zeros_like(tensors)), zeros_like(tensors)]
    results = run(ranks, 1, memory)
    assert str(results[1]) == "out of memory"
    assert results[0].failed == {1: "RuntimeError: out of memory"}
    assert results[2].failed == {1: "RuntimeError: out of memory"}
    assert all((memory[2][name] == tensors[name]).all() for name in tensors)
    with pytest.raises(ChannelError, match="version 1: rank 1: RuntimeError: out of memory"):
        results[0].require_all()


def test_damage_on_the_way_is_found_and_named(controls: Controls, monkeypatch) -> None:
    tensors = make_tensors(0, SIZES)
    ranks = transfers(controls, {0: share_of(tensors)}, 512)
    memory = [tensors, zeros_like(tensors), zeros_like(tensors)]
    damaged = ranks[2]._channel
    finish = damaged.finish

    def flip(num_left: int = 0) -> None:
        finish(num_left)
        for arena in ranks[2]._arenas.values():
            arena[0] ^= 1

    monkeypatch.setattr(damaged, "finish", flip)
    results = run(ranks, 1, memory)
    assert "bucket 0 of rank 0 came with other bytes than were sent; it holds 't1'" in str(
        results[2]
    )
    assert list(results[0].failed) == [2]
