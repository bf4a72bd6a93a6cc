"""TCP between nodes whose links are slow and lose packets; messages pass the payload."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packet_filter import lose, num_lost

from benchmarks.namespaces import Network, why_not

SCRIPT = Path(__file__).parents[1] / "channel_link.py"
SHAPED = pytest.mark.skipif(
    bool(why_not()), reason=f"needs kernel feature network namespaces: {why_not()}"
)


def run(network: Network, *, size: int, count: int, timeout_s: float) -> list[dict[str, Any]]:
    """What each node says at its end; node 0 sends."""
    ranks = []
    try:
        port = 0
        for rank in range(network.num_nodes):
            hosts = [network.address(rank), network.address(0)]
            arguments = map(str, [rank, network.num_nodes, *hosts, size, count])
            command = [*network.within(rank), sys.executable, "-P", str(SCRIPT), *arguments]
            pipe = subprocess.PIPE
            ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            if rank == 0:
                port = json.loads(ranks[0].stdout.readline())["port"]
            else:
                ranks[rank].stdin.write(f"{port}\n")
                ranks[rank].stdin.flush()
        return [json.loads(one.communicate(timeout=timeout_s)[0]) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.communicate()


def check(rate_gbps: float, percent: float, *, num_nodes: int, size: int, count: int) -> None:
    with Network(num_nodes, rate_gbps) as network:
        if percent:
            lose(network, percent)
        said = run(network, size=size, count=count, timeout_s=600)
        assert [one.get("right") for one in said] == [count] * num_nodes, said
        if percent:
            assert num_lost(network) > 0


@SHAPED
@pytest.mark.ci
def test_I53_every_byte_is_right_where_packets_are_lost() -> None:
    check(0.1, 5.0, num_nodes=2, size=300_000, count=2)


@SHAPED
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("percent", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("rate_gbps", [0.01, 0.1])
def test_I53_every_byte_is_right_in_20_transfers_to_two_nodes(
    rate_gbps: float, percent: float
) -> None:
    check(rate_gbps, percent, num_nodes=3, size=400_000, count=20)


def check_signs_of_life(seconds: float) -> None:
    """A link of 10 Mbit/s is full for so long; signs of life come hardly later than without."""
    size = int(0.01e9 / 8 * seconds * 0.97)
    with Network(2, 0.01) as network:
        said = run(network, size=size, count=1, timeout_s=3 * seconds + 60)
    assert [one.get("right") for one in said] == [1, 1], said
    for one in said:
        assert one["seconds"] > 0.8 * seconds
        assert len(one["delays"]) > 0.5 * seconds
        assert np.percentile(one["delays"], 99) < 2, one["delays"]


@SHAPED
@pytest.mark.ci
def test_I52_R82_signs_of_life_pass_a_full_link() -> None:
    check_signs_of_life(3)


@SHAPED
@pytest.mark.long
@pytest.mark.timeout(400)
def test_I52_R82_signs_of_life_pass_a_link_that_is_full_for_a_minute() -> None:
    check_signs_of_life(60)
