"""The channel over gloo fulfils the contract."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from socket import SHUT_RDWR
from threading import Event, Semaphore
from typing import Any

import numpy as np
import pytest
from channel_group import Controls

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Channel, Slot
from gymfast.channels.gloo import GlooChannel, open_gloo
from gymfast.channels.stream import receive_stream, send_stream
from gymfast.errors import ChannelError
from gymfast.testing.channel_contract import ChannelContract, Make, in_threads, noise

dist = pytest.importorskip("torch.distributed")


class TestGloo(ChannelContract):
    @pytest.fixture
    def make(self) -> Make:
        def channels(num_ranks: int, **options: Any) -> list[Channel]:
            store = dist.HashStore()
            timeout = timedelta(seconds=30)

            def group(rank: int) -> Any:
                return dist.ProcessGroupGloo(store, rank, num_ranks, timeout)

            groups = in_threads([lambda r=rank: group(r) for rank in range(num_ranks)])
            return [GlooChannel(one, **options) for one in groups]

        return channels


@pytest.mark.ci
class TestGlooWithAgreedSizes(TestGloo):
    """The same where gloo compares no sizes, as in a transfer."""

    # Nobody may pass other sizes then: the caller has compared them.
    test_sizes_that_differ_are_an_error_and_never_a_short_read = None

    @pytest.fixture(autouse=True)
    def agreed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(GlooChannel, "sizes_agreed", True)


def tensors_of(seed: int) -> dict[str, Any]:
    sizes = [0, 5, 3 << 20, 1 << 20, 700, (5 << 20) + 3]
    return {f"t{i}": noise(seed + i, size) for i, size in enumerate(sizes)}


def test_transfers_and_streams_take_turns_on_a_channel() -> None:
    controls = Controls(3)
    channels = in_threads([partial(open_gloo, control, timeout_s=20) for control in controls.all])
    share = [BucketTensor(name, "U8", (len(t),), len(t)) for name, t in tensors_of(0).items()]
    memory = [{name: np.zeros_like(t) for name, t in tensors_of(0).items()} for _ in range(3)]

    def work(rank: int) -> list[Any]:
        found = []
        transfer = BucketTransfer(controls.all[rank], channels[rank], {0: share}, 2 << 20)
        for version in range(3):
            if rank == 0:
                memory[0] = tensors_of(version)
                send_stream(channels[0], [bytes([version]) * 9000], 4096)
            else:
                found.append(b"".join(map(bytes, receive_stream(channels[rank], 0, 4096))))
            transfer.run(version, memory[rank]).require_all()
            found.append({name: t.copy() for name, t in memory[rank].items()})
        return found

    results = in_threads([partial(work, rank) for rank in range(3)])
    for rank in (1, 2):
        assert results[rank][::2] == [bytes([version]) * 9000 for version in range(3)]
        for version, received in enumerate(results[rank][1::2]):
            assert all((received[n] == t).all() for n, t in tensors_of(version).items())
    in_threads([channel.close for channel in channels])
    controls.close()


def test_a_plan_of_other_sizes_is_refused_before_gloo_hears_of_it() -> None:
    """gloo would end the process of a rank that is sent more than it expects."""
    controls = Controls(2)
    channels = in_threads([partial(open_gloo, control, timeout_s=20) for control in controls.all])

    def work(rank: int) -> None:
        size = 1000 - rank
        share = [BucketTensor("t", "U8", (size,), size)]
        transfer = BucketTransfer(controls.all[rank], channels[rank], {0: share}, 512)
        transfer.run(1, {"t": np.ones(size, np.uint8)})

    words = "version 1: rank 1: its plan is not that of rank 0: agree() says in what"
    assert [str(error) for error in in_threads([partial(work, r) for r in (0, 1)])] == [words] * 2
    in_threads([channel.close for channel in channels])
    controls.close()


def test_a_group_is_made_over_the_control_plane() -> None:
    controls = Controls(3)
    channels = in_threads([partial(open_gloo, control, timeout_s=20) for control in controls.all])
    memory = [noise(0, 5000) if rank == 1 else np.zeros(5000, np.uint8) for rank in range(3)]

    def work(rank: int) -> None:
        channels[rank].begin([Slot(1, memory[rank])])
        channels[rank].finish()

    assert in_threads([partial(work, rank) for rank in range(3)]) == [None] * 3
    assert all((one == noise(0, 5000)).all() for one in memory)
    in_threads([channel.close for channel in channels])
    controls.close()


def test_I51_a_rank_that_is_lost_while_the_group_is_made_is_named_on_all_others() -> None:
    controls = Controls(3)
    controls.all[1].close()
    works = [partial(open_gloo, controls.all[rank], timeout_s=20) for rank in (0, 2)]
    for result in in_threads(works):
        assert isinstance(result, ChannelError)
        words = "gloo makes no group of ranks (0, 1, 2): rank 1 is lost: it left"
        assert (str(result), result.ranks) == (words, (1,))
    controls.close()


def test_I51_a_rank_that_cannot_make_the_group_is_named_on_all_others(monkeypatch) -> None:
    is_over = Event()

    def made(store: Any, rank: int, *_: Any) -> object:
        if rank == 1:
            raise RuntimeError("no address of this host")
        return is_over.wait()  # as torch waits for the other rank

    monkeypatch.setattr(dist, "ProcessGroupGloo", made)
    controls = Controls(2)
    results = in_threads([partial(open_gloo, c, timeout_s=20) for c in controls.all])
    words = "gloo makes no group of ranks (0, 1): rank 1 says: no address of this host"
    assert [(str(result), result.ranks) for result in results] == [(words, (1,))] * 2
    is_over.set()
    controls.close()


def test_I51_nobody_waits_in_torch_for_a_rank_that_is_lost_meanwhile(monkeypatch) -> None:
    """For much longer than this test may take: torch itself would wait for its time-out."""
    controls, num_waiting, is_over = Controls(3), Semaphore(0), Event()

    def made(store: Any, rank: int, *_: Any) -> object:
        if rank == 2:
            for _ in range(2):
                num_waiting.acquire()
            controls.all[0]._lines[2].sock.shutdown(SHUT_RDWR)
        else:
            num_waiting.release()
        return is_over.wait()

    monkeypatch.setattr(dist, "ProcessGroupGloo", made)
    works = [partial(open_gloo, control, timeout_s=600) for control in controls.all]
    *results, _ = in_threads(works)
    for result in results:
        words = "gloo makes no group of ranks (0, 1, 2): rank 2 is lost: it closed the line"
        assert (str(result), result.ranks) == (words, (2,))
    is_over.set()
    controls.close()


def test_another_depth_is_named_on_all_ranks() -> None:
    controls = Controls(2)
    works = [partial(open_gloo, c, depth=2 + c.rank, timeout_s=20) for c in controls.all]
    words = "rank 1 cannot take part: the depth of the channel is 3 there and 2 on rank 0"
    assert [(str(error), error.ranks) for error in in_threads(works)] == [(words, (1,))] * 2
    controls.close()
