"""Nodes of a network on one machine: network namespaces at a switch, each with a shaped link.

Needs root (or CAP_NET_ADMIN) on Linux, `ip` and `tc`. What a node sends is limited by a token
bucket; what it receives is not, as every byte was sent by another node.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from types import TracebackType

MTU = 9000
_FRAME_BYTES = MTU + 14  # with the Ethernet header, which the token bucket counts
_PAYLOAD_BYTES = MTU - 20 - 32  # without those of IP and TCP, the latter with time stamps
PAYLOAD_RATIO = _PAYLOAD_BYTES / _FRAME_BYTES
_CONGESTION = "net.ipv4.tcp_congestion_control"
_SETTINGS = {
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_wmem": "4096 65536 8388608",
    "net.ipv4.tcp_rmem": "4096 131072 33554432",
    "net.ipv4.tcp_no_metrics_save": "1",
}


class Network:
    """Nodes 0 to num_nodes - 1 whose links carry `rate_gbps` (1e9 bits a second) each way.

    A context manager: all of it is gone at the end, whatever happens within.
    """

    def __init__(self, num_nodes: int, rate_gbps: float) -> None:
        if not 1 <= num_nodes <= 200:
            raise ValueError(f"num_nodes is {num_nodes}, expected 1 to 200")
        self.num_nodes, self.rate_gbps = num_nodes, rate_gbps
        self._prefix = f"gf{os.getpid()}"
        self._switch = f"{self._prefix}sw"
        self._made: list[str] = []

    @property
    def payload_gbps(self) -> float:
        """What is left of the rate for the bytes that TCP carries."""
        return self.rate_gbps * PAYLOAD_RATIO

    def address(self, node: int) -> str:
        """Where the others reach a node."""
        return f"10.231.7.{node + 1}"

    def within(self, node: int) -> list[str]:
        """What a command has to begin with to run on a node."""
        return ["ip", "netns", "exec", self._name(node)]

    def __enter__(self) -> Network:
        try:
            self._make(self._switch)
            run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", self._switch, "link", "set", "br0", "mtu", str(MTU), "up")
            for node in range(self.num_nodes):
                self._add(node)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _add(self, node: int) -> None:
        name, port = self._name(node), f"p{node}"
        self._make(name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        peer = ["peer", "name", port, "netns", self._switch]
        run("ip", "-n", name, "link", "add", "eth0", "mtu", str(MTU), "type", "veth", *peer)
        run("ip", "-n", self._switch, "link", "set", port, "mtu", str(MTU), "master", "br0", "up")
        run("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        rate = f"{self.rate_gbps * 1e9:.0f}bit"
        # The bucket holds 2 ms of the link, so that a start from rest gains no more than that.
        burst = f"{max(self.rate_gbps * 1e9 / 8 * 0.002, 128 << 10):.0f}b"
        shape = ["tbf", "rate", rate, "burst", burst, "limit", "8mb"]
        run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape)
        for key, value in _SETTINGS.items():
            self._set(name, key, value)
        try:
            self._set(name, _CONGESTION, "cubic")
        except OSError:  # not allowed in a namespace by every kernel; reno always is
            self._set(name, _CONGESTION, "reno")

    def _set(self, name: str, key: str, value: str) -> None:
        run("ip", "netns", "exec", name, "sysctl", "-qw", f"{key}={value}")

    def _make(self, name: str) -> None:
        run("ip", "netns", "add", name)
        self._made.append(name)

    def _remove(self) -> None:
        while self._made:  # with a namespace its devices go
            with suppress(OSError):
                run("ip", "netns", "delete", self._made.pop())

    def _name(self, node: int) -> str:
        return f"{self._prefix}n{node}"


@cache
def why_not() -> str:
    """Why no network can be made here; empty if it can."""
    for tool in ("ip", "tc", "sysctl"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package iproute2 or procps)"
    try:
        with Network(1, 1.0):
            return ""
    except OSError as error:
        return str(error)


def run(*command: str) -> None:
    """Raises OSError, with what the command said, if it fails."""
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise OSError(f"{' '.join(command)}: {found.stderr.strip() or found.stdout.strip()}")
