"""The channel between threads fulfils the contract of channels."""

from __future__ import annotations

from typing import Any

import pytest

from gymfast.channels import Channel, Loopback
from gymfast.testing.channel_contract import ChannelContract, Make


class TestLoopback(ChannelContract):
    @pytest.fixture
    def make(self) -> Make:
        def channels(num_ranks: int, **options: Any) -> list[Channel]:
            group = Loopback(num_ranks)
            return [group.channel(rank, **options) for rank in range(num_ranks)]

        return channels
