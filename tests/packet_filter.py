"""Nodes of a network that lose packets at random, or are cut off."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from benchmarks.namespaces import Network

LOSS = """table inet loss {{
  chain in {{
    type filter hook input priority 0
    iifname eth0 numgen random mod 1000 < {per_thousand} counter drop
  }}
}}
"""
CUT = """table inet cut {
  chain in {
    type filter hook input priority 0
    iifname eth0 drop
  }
}
"""


def nft(network: Network, node: int, *arguments: str, text: str = "") -> str:
    """What the packet filter of a node says. Raises OSError if it fails."""
    command = [*network.within(node), "nft", *arguments]
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if found.returncode:
        raise OSError(found.stderr.strip())
    return found.stdout


def lose(network: Network, percent: float) -> None:
    """Has each node lose that part of what reaches it, at random."""
    if shutil.which("nft") is None:
        pytest.skip("needs kernel feature packet filters: nft is not installed (package nftables)")
    try:
        nft(network, 0, "add", "table", "inet", "probe")
    except OSError as error:
        pytest.skip(f"needs kernel feature packet filters: {str(error).splitlines()[0]}")
    for node in range(network.num_nodes):
        nft(network, node, "-f", "-", text=LOSS.format(per_thousand=round(percent * 10)))


def num_lost(network: Network) -> int:
    """Packets that all nodes have lost."""
    total = 0
    for node in range(network.num_nodes):
        for entry in json.loads(nft(network, node, "--json", "list", "ruleset"))["nftables"]:
            parts = entry.get("rule", {}).get("expr", [])
            total += sum(part["counter"]["packets"] for part in parts if "counter" in part)
    return total


def cut_off(network: Network, node: int) -> None:
    """Nothing reaches a node any more, and nobody is told."""
    nft(network, node, "-f", "-", text=CUT)


def rejoin(network: Network, node: int) -> None:
    """Ends `cut_off`."""
    nft(network, node, "delete", "table", "inet", "cut")
