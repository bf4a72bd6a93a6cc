"""The channel over NCCL fulfils the contract, on a double of NCCL in host memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from channel_group import Controls, in_threads
from nccl_doubles import Double

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Channel, Slot
from gymfast.channels.device_memory import DeviceMemory
from gymfast.channels.nccl import NcclChannel, Way, choose_way, open_nccl
from gymfast.errors import ChannelError
from gymfast.testing.channel_contract import ChannelContract, Make, noise
from gymfast.testing.channel_contract import in_threads as in_ranks


def channels_of(double: Double, num_ranks: int, **options: Any) -> list[NcclChannel]:
    library = double.load()
    channels = [NcclChannel(library, rank, num_ranks, **options) for rank in range(num_ranks)]
    unique_id = channels[0].new_id()
    joined = in_threads(*(partial(channel.join, unique_id) for channel in channels))
    assert joined == [None] * num_ranks
    return channels


class TestNccl(ChannelContract):
    @pytest.fixture
    def make(self, double: Double) -> Make:
        def channels(num_ranks: int, **options: Any) -> list[Channel]:
            return [*channels_of(double, num_ranks, **options)]

        return channels


@pytest.fixture
def controls() -> Iterator[Controls]:
    group = Controls(3)
    yield group
    group.close()


def opened(controls: Controls, double: Double, **options: Any) -> list[Any]:
    """Channels over the control plane, or what open_nccl raised."""
    options = {"path": double.path, "cuda_path": double.path, "timeout_s": 5, **options}
    return in_threads(*(partial(open_nccl, control, **options) for control in controls.all))


def close(*channels: NcclChannel) -> None:
    in_threads(*(channel.discard for channel in channels))


SIZES = [700, 5000, 0, 256, 31]


def tensors_of(rank: int) -> dict[str, np.ndarray]:
    return {f"r{rank}.{i}": noise(100 * rank + i, size) for i, size in enumerate(SIZES)}


def transfers_of(
    controls: Controls, channels: list[NcclChannel], roots: list[int], **options: Any
) -> tuple[list[BucketTransfer], list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Transfers, the memory of each rank, and what all of it has to be in the end."""
    own = {root: tensors_of(root) for root in roots}
    shares = {
        root: [BucketTensor(name, "U8", (len(t),), len(t)) for name, t in tensors.items()]
        for root, tensors in own.items()
    }
    transfers = [
        BucketTransfer(c, channel, shares, 512, environment=channel.environment, **options)
        for c, channel in zip(controls.all, channels, strict=True)
    ]
    every = {name: t for tensors in own.values() for name, t in tensors.items()}
    memory = [
        {n: (t.copy() if n in own.get(c.rank, ()) else np.zeros_like(t)) for n, t in every.items()}
        for c in controls.all
    ]
    return transfers, memory, every


def run(transfers: list[BucketTransfer], memory: list[Any]) -> list[Any]:
    return in_threads(*(partial(t.run, 1, m) for t, m in zip(transfers, memory, strict=True)))


def test_roots_are_grouped_and_all_ranks_issue_the_same_groups(
    controls: Controls, double: Double
) -> None:
    channels = opened(controls, double)
    transfers, memory, every = transfers_of(controls, channels, [0, 2])
    assert in_threads(*(transfer.agree for transfer in transfers)) == [None] * 3
    reports = run(transfers, memory)
    assert [report.failed for report in reports] == [{}, {}, {}]
    assert all((m[name] == every[name]).all() for m in memory for name in every)
    calls = double.calls()
    by_rank = [[c[3:] for c in calls if c.startswith(f"r{rank} ")] for rank in range(3)]
    # One bucket of each root in a group; 768 + 5120 + 256 + 31 bytes are 13 buckets of 512.
    assert by_rank[0] == ["init 3", *["group 0:512 2:512"] * 12, "group 0:31 2:31"]
    assert by_rank[1] == by_rank[2] == by_rank[0]
    assert calls.count("unique_id") == 1
    close(*channels)


def test_tensors_of_torch_go_through_the_memory_of_a_device(
    controls: Controls, double: Double
) -> None:
    torch = pytest.importorskip("torch")
    channels = opened(controls, double)
    transfers, arrays, every = transfers_of(controls, channels, [0, 2], memory=DeviceMemory("cpu"))
    memory = [{n: torch.from_numpy(t) for n, t in one.items()} for one in arrays]
    for version in range(3):
        assert [report.failed for report in run(transfers, memory)] == [{}, {}, {}]
        assert all((m[name] == every[name]).all() for m in arrays for name in every), version
    close(*channels)


def test_digests_of_different_kinds_are_refused(controls: Controls, double: Double) -> None:
    channels = opened(controls, double)
    transfers, _, _ = transfers_of(controls, channels, [0])
    transfers[1] = transfers_of(controls, channels, [0], memory=DeviceMemory("cpu"))[0][1]
    errors = in_threads(*(transfer.agree for transfer in transfers))
    assert all("rank 1 cannot take part: the digest is 'weighted" in str(e) for e in errors), errors
    close(*channels)


def test_plans_that_differ_are_found_before_nccl_is_asked(
    controls: Controls, double: Double
) -> None:
    channels = opened(controls, double)
    double.calls()
    transfers, _, _ = transfers_of(controls, channels, [0])
    other = [BucketTensor("r0.0", "U8", (701,), 701)]
    transfers[1] = BucketTransfer(
        controls.all[1], channels[1], {0: other}, 512, environment=channels[1].environment
    )
    errors = in_threads(*(transfer.agree for transfer in transfers))
    assert all("rank 1 cannot take part: in the plan of root 0" in str(error) for error in errors)
    assert double.calls() == []
    close(*channels)


def test_settings_that_differ_are_found_before_nccl_is_asked(
    controls: Controls, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gymfast.channels import nccl_channel

    found = iter([{"NCCL": "2.30.7"}, {"NCCL": "2.30.7", "NCCL_ALGO": "Ring"}, {"NCCL": "2.30.7"}])
    monkeypatch.setattr(nccl_channel, "environment_of", lambda _: next(found))
    errors = opened(controls, double)
    assert len({str(error) for error in errors}) == 1
    assert "cannot take part: NCCL_ALGO is" in str(errors[0])
    assert double.calls() == []


def test_a_rank_without_nccl_is_named_on_all(controls: Controls, double: Double) -> None:
    works = [
        partial(open_nccl, c, path=double.path, cuda_path=double.path, device=device, timeout_s=5)
        for c, device in zip(controls.all, (0, 7, 0), strict=True)
    ]
    begin_s = time.monotonic()
    errors = in_threads(*works)
    assert time.monotonic() - begin_s < 4
    words = "rank 1 cannot take part: NCCL is 'cudaSetDevice: an error of the double (result 101)'"
    assert all(words in str(error) for error in errors), errors


def test_R84_a_rank_that_does_not_get_into_the_communicator_is_an_error_on_all(
    controls: Controls, double: Double
) -> None:
    double.set("init_hangs", 1, rank=1)
    begin_s = time.monotonic()
    errors = opened(controls, double, timeout_s=0.5)
    assert time.monotonic() - begin_s < 5
    words = "rank 1: ncclCommInitRankConfig was not complete within 0.5 s: another rank does not"
    assert all(isinstance(error, ChannelError) for error in errors), errors
    assert all(words in str(error) for error in errors)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_is_lost_while_the_others_join_is_named_at_once(
    controls: Controls, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = NcclChannel.join

    def join_or_die(channel: NcclChannel, unique_id: bytes, **options: Any) -> None:
        if channel.rank == 2:
            controls.all[2].close()
            raise SystemExit
        join(channel, unique_id, **options)

    monkeypatch.setattr(NcclChannel, "join", join_or_die)
    begin_s = time.monotonic()
    results = opened(controls, double, timeout_s=30)
    assert time.monotonic() - begin_s < 10
    assert all("rank 2 is lost: it left" in str(error) for error in results[:2]), results


def test_an_error_of_nccl_has_its_rank_call_and_words(double: Double) -> None:
    channels = channels_of(double, 2, timeout_s=1)
    double.set("async_error", 2, rank=1)
    results = in_ranks(
        [lambda c=c: (c.begin([Slot(0, np.zeros(9, np.uint8))]), c.finish()) for c in channels]  # type: ignore[misc]
    )
    assert "rank 1: ncclBroadcast: unhandled system error (result 2)" in str(results[1])
    double.set("call_error", 3, rank=0)
    channels = channels_of(double, 2, timeout_s=0.5)
    with pytest.raises(
        ChannelError, match=r"rank 0: ncclBroadcast: internal error \(result 3\): an"
    ):
        channels[0].begin([Slot(0, np.zeros(9, np.uint8))])
    assert double.calls(0)[-1] == "revoke"
    close(*channels)


def test_I51_R78_a_rank_that_dies_is_named_on_all_others_by_the_deadline(
    controls: Controls, double: Double
) -> None:
    double.set("is_silent", 1, rank=2)  # NCCL does not notice: its kernels wait
    channels = opened(controls, double, timeout_s=20)
    transfers, memory, _ = transfers_of(controls, channels, [0], timeout_s=20)

    class Dies(dict):
        def __getitem__(self, name: str) -> Any:
            controls.all[2].close()
            raise SystemExit

    memory[2] = Dies(memory[2])

    def die() -> None:
        with pytest.raises(SystemExit):
            transfers[2].run(1, memory[2])

    begin_s = time.monotonic()
    results = in_threads(
        *(partial(t.run, 1, m) for t, m in zip(transfers[:2], memory, strict=False)), die
    )
    assert time.monotonic() - begin_s < 15
    for error in results[:2]:
        assert isinstance(error, ChannelError)
        assert "rank 2" in str(error)
    close(*channels)


def test_R78_an_abort_that_hangs_inside_nccl_holds_nobody_up(double: Double) -> None:
    channels = channels_of(double, 2, timeout_s=0.5)
    for name in ("abort_hangs", "is_silent"):
        double.set(name, 1, rank=0)
    begin_s = time.monotonic()
    channels[0].begin([Slot(0, np.zeros(9, np.uint8))])
    with pytest.raises(ChannelError, match="was not complete within"):
        channels[0].finish()
    close(channels[0])
    assert time.monotonic() - begin_s < 5
    double.reset()
    close(channels[1])


def test_R71_memory_with_gaps_is_refused(double: Double) -> None:
    channels = channels_of(double, 1)
    for memory in (np.zeros(9, np.uint8)[::2], np.zeros(9, np.uint16)):
        with pytest.raises(ValueError, match="not a contiguous array of bytes"):
            channels[0].begin([Slot(0, memory)])
    close(*channels)


def test_a_rank_that_fails_wakes_all_others(controls: Controls, double: Double) -> None:
    channels = opened(controls, double, timeout_s=30)
    transfers, memory, _ = transfers_of(controls, channels, [0])

    class Breaks(dict):
        def __getitem__(self, name: str) -> Any:
            raise RuntimeError("out of memory")

    memory[1] = Breaks(memory[1])
    begin_s = time.monotonic()
    results = run(transfers, memory)
    assert time.monotonic() - begin_s < 10
    assert str(results[1]) == "out of memory"
    assert all("RuntimeError: out of memory" in str(results[rank]) for rank in (0, 2)), results
    assert sorted(c for c in double.calls() if "revoke" in c) == [f"r{r} revoke" for r in range(3)]
    close(*channels)


def test_memory_of_the_host_is_refused(double: Double) -> None:
    channels = channels_of(double, 1)
    double.set("host_memory", 1)
    with pytest.raises(ValueError, match="rank 0: memory of a round is not on a GPU"):
        channels[0].begin([Slot(0, np.zeros(9, np.uint8))])
    close(*channels)


def test_a_gpu_that_is_not_there_is_refused(double: Double) -> None:
    with pytest.raises(ChannelError, match="cudaSetDevice: an error of the double"):
        NcclChannel(double.load(), 0, 1, device=3)


@pytest.mark.parametrize(
    ("offers", "way"),
    [
        ({0: ([], 0, 1), 1: ([], 0, 1)}, Way("make", (0, 1))),
        ({0: ([0, 1, 2], 1, 1), 1: ([0, 1, 2], 1, 1)}, Way("shrink", (0, 1))),
        ({0: ([0, 1, 2], 1, 1), 1: ([0, 1, 2], 0, 1)}, Way("make", (0, 1))),
        ({0: ([0, 2], 1, 1), 1: ([], 0, 1), 2: ([0, 2], 1, 1)}, Way("grow", (0, 2, 1))),
        ({0: ([0, 2], 1, 1), 1: ([], 0, 0), 2: ([0, 2], 1, 1)}, Way("make", (0, 1, 2))),
        ({0: ([0, 2], 1, 0), 1: ([], 0, 1), 2: ([0, 2], 1, 1)}, Way("make", (0, 1, 2))),
        ({0: ([0, 2], 1, 1), 1: ([], 0, 1)}, Way("make", (0, 1))),  # one left, another came
        ({0: ([0, 1], 1, 1), 1: ([], 1, 1)}, Way("make", (0, 1))),  # rank 1 came again
        ({0: ([0, 1], 1, 1), 1: ([0, 1], 1, 1)}, Way("make", (0, 1))),  # nobody is lost
        ({0: ([0, 1, 2], 1, 1), 1: None, 2: ([0, 1, 2], 1, 1)}, Way("make", (0, 1, 2))),
        ({0: ([], 0, 1), 1: ([1, 2], 1, 1), 2: ([1, 2], 1, 1)}, Way("make", (0, 1, 2))),
    ],
)
def test_the_way_to_a_communicator_is_one_that_all_ranks_can_go(
    offers: dict[int, Any], way: Way
) -> None:
    said = {rank: offer for rank, offer in offers.items() if offer}  # rank 1 may be lost again
    assert choose_way(tuple(offers), said) == way
