"""The channel over gloo fulfils the contract."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
from channel_group import Controls

from gymfast.channels import Channel, Slot
from gymfast.channels.gloo import GlooChannel, open_gloo
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
        words = "gloo makes no group of ranks (0, 1, 2): rank 1 is lost: it closed the line"
        assert (str(result), result.ranks) == (words, (1,))
    controls.close()


def test_I51_a_rank_that_cannot_make_the_group_is_named_on_all_others(monkeypatch) -> None:
    def made(store: Any, rank: int, *_: Any) -> object:
        if rank == 1:
            raise RuntimeError("no address of this host")
        return object()

    monkeypatch.setattr(dist, "ProcessGroupGloo", made)
    controls = Controls(2)
    results = in_threads([partial(open_gloo, c, timeout_s=20) for c in controls.all])
    words = "gloo makes no group of ranks (0, 1): rank 1 says: no address of this host"
    assert [(str(result), result.ranks) for result in results] == [(words, (1,))] * 2
    controls.close()
