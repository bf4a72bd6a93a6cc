"""A long way on one machine: two network namespaces, and a link with a rate and a delay between.

Each side is a TUN device; this process carries packets from one to the other, as late as a link of
that rate, with a queue that holds one round trip, would. What sends and what receives is the TCP of
the kernel, with its windows and its slow start. Needs root (or CAP_NET_ADMIN), Linux and `ip`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import NoReturn

from benchmarks.namespaces import run

SIDES = ("store", "site")
MTU = 1500
_FRAME_BYTES = 14 + 24  # Ethernet: header; preamble, checksum and gap
_PAYLOAD_BYTES = MTU - 20 - 32  # without the headers of IP and TCP, the latter with time stamps
PAYLOAD_RATIO = _PAYLOAD_BYTES / (MTU + _FRAME_BYTES)
_SETTINGS = {
    "net.ipv4.tcp_wmem": "4096 65536 33554432",
    "net.ipv4.tcp_rmem": "4096 131072 33554432",
    "net.ipv4.tcp_no_metrics_save": "1",
}
_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_TUN = 0x0001 | 0x1000 | 0x4000  # a device of IP packets, without a prefix, with the header below
_OFFLOADS = 0x01 | 0x02  # checksums, and segments of TCP: up to 64 KiB of one stream at once
_HEADER = struct.Struct("<BBHHHH")  # flags, kind, bytes of headers, bytes of a segment, checksum
_MAX_PACKET_BYTES = _HEADER.size + 65536
_NEW_NETWORK = 0x40000000


class Link:
    """Two namespaces, `store` and `site`, with a link between: a context manager.

    `keeps_windows`: a connection that was idle goes on with the window it had. Linux does not
    do that by default.
    """

    def __init__(self, rate_gbps: float, delay_s: float, *, keeps_windows: bool = True) -> None:
        """A link of `rate_gbps` (1e9 bits a second) each way; `delay_s` is that of one way."""
        self.rate_gbps, self.delay_s = rate_gbps, delay_s
        self._settings = _SETTINGS | {
            "net.ipv4.tcp_slow_start_after_idle": "0" if keeps_windows else "1"
        }
        self._prefix = f"gw{os.getpid()}"
        self._made: list[str] = []
        self._carrier: subprocess.Popen[bytes] | None = None

    @property
    def payload_gbps(self) -> float:
        """What is left of the rate for the bytes that TCP carries."""
        return self.rate_gbps * PAYLOAD_RATIO

    def address(self, side: str) -> str:
        """Where the other side reaches this one."""
        return f"10.231.8.{SIDES.index(side) + 1}"

    def within(self, side: str) -> list[str]:
        """What a command has to begin with to run on that side."""
        return ["ip", "netns", "exec", self._name(side)]

    def __enter__(self) -> Link:
        try:
            for side in SIDES:
                run("ip", "netns", "add", self._name(side))
                self._made.append(self._name(side))
                run("ip", "-n", self._name(side), "link", "set", "lo", "up")
            names = [self._name(side) for side in SIDES]
            command = [sys.executable, "-m", "benchmarks.wan_link", *names]
            command += [str(self.rate_gbps), str(self.delay_s)]
            self._carrier = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert self._carrier.stdout is not None
            if self._carrier.stdout.readline() != b"ready\n":
                assert self._carrier.stderr is not None
                said = self._carrier.stderr.read().decode().strip().splitlines()
                raise OSError(f"no TUN device: {said[-1] if said else 'the carrier ended'}")
            for side, other in zip(SIDES, reversed(SIDES), strict=True):
                self._configure(side, other)
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

    def _configure(self, side: str, other: str) -> None:
        name = self._name(side)
        own, peer = self.address(side), self.address(other)
        run("ip", "-n", name, "address", "add", own, "peer", peer, "dev", "wan")
        run("ip", "-n", name, "link", "set", "wan", "mtu", str(MTU), "txqueuelen", "4000", "up")
        # The default of Linux, whatever this machine has: BBR takes too much with many connections.
        route = (peer, "dev", "wan", "src", own, "congctl", "cubic")
        run("ip", "-n", name, "route", "replace", *route)
        for key, value in self._settings.items():
            run("ip", "netns", "exec", name, "sysctl", "-qw", f"{key}={value}")

    def _remove(self) -> None:
        if self._carrier is not None:
            self._carrier.communicate()  # the end of its input is its end
        while self._made:
            run("ip", "netns", "delete", self._made.pop())

    def _name(self, side: str) -> str:
        return f"{self._prefix}{side}"


@cache
def why_not() -> str:
    """Why no such link can be made here; empty if it can."""
    try:
        with Link(1.0, 0.001):
            return ""
    except OSError as error:
        return str(error)


class _Direction:
    """Packets on their way, in the order in which they arrive."""

    def __init__(self, target: int, bytes_per_ns: float, delay_ns: int) -> None:
        self._target = target
        self._bytes_per_ns, self._delay_ns = bytes_per_ns, delay_ns
        self._queue_ns = max(2 * delay_ns, 20_000_000)
        self._free_at_ns = 0  # when the link can begin with the next packet
        self._packets: deque[tuple[int, bytes]] = deque()
        self.num_dropped = 0

    def take(self, packet: bytes, now_ns: int) -> None:
        """A packet enters the queue before the link, or is dropped if that is full."""
        start_ns = max(now_ns, self._free_at_ns)
        if start_ns - now_ns > self._queue_ns:
            self.num_dropped += 1
            return
        self._free_at_ns = start_ns + int(_wire_bytes(packet) / self._bytes_per_ns)
        self._packets.append((self._free_at_ns + self._delay_ns, packet))

    def deliver(self, now_ns: int) -> None:
        while self._packets and self._packets[0][0] <= now_ns:
            with suppress(OSError):  # the other side is not up yet: lost
                os.write(self._target, self._packets.popleft()[1])

    @property
    def next_ns(self) -> int | None:
        return self._packets[0][0] if self._packets else None


def _wire_bytes(packet: bytes) -> int:
    """What the packet, or the segments that it stands for, takes of an Ethernet."""
    _, kind, header_bytes, segment_bytes, _, _ = _HEADER.unpack_from(packet)
    num_bytes = len(packet) - _HEADER.size
    if kind == 0:
        return num_bytes + _FRAME_BYTES
    num_segments = -(-(num_bytes - header_bytes) // segment_bytes)
    return num_bytes + (num_segments - 1) * header_bytes + num_segments * _FRAME_BYTES


@contextmanager
def _inside(name: str):  # type: ignore[no-untyped-def]
    """Within, this process is in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        if libc.setns(descriptor, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns {path}")
        os.close(descriptor)

    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter(f"/run/netns/{name}")
    try:
        yield
    finally:
        libc.setns(home, _NEW_NETWORK)
        os.close(home)


def _device(name: str) -> int:
    with _inside(name):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", b"wan", _TUN))
        fcntl.ioctl(device, _SET_OFFLOAD, _OFFLOADS)
    return device


def _carry(names: list[str], rate_gbps: float, delay_s: float) -> NoReturn:
    """Carries packets until the standard input ends."""
    devices = [_device(name) for name in names]
    bytes_per_ns, delay_ns = rate_gbps / 8, int(delay_s * 1e9)
    directions = {
        device: _Direction(other, bytes_per_ns, delay_ns)
        for device, other in zip(devices, reversed(devices), strict=True)
    }
    print("ready", flush=True)
    inputs = [sys.stdin.fileno(), *devices]
    while True:
        due = [one.next_ns for one in directions.values() if one.next_ns is not None]
        wait_s = max(0, min(due) - time.monotonic_ns()) / 1e9 if due else None
        ready, _, _ = select.select(inputs, [], [], wait_s)
        if inputs[0] in ready:
            sys.exit(0)
        for device in ready:
            direction = directions[device]
            for _ in range(64):
                try:
                    packet = os.read(device, _MAX_PACKET_BYTES)
                except BlockingIOError:
                    break
                direction.take(packet, time.monotonic_ns())
        for direction in directions.values():
            direction.deliver(time.monotonic_ns())


if __name__ == "__main__":
    _carry(sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]))
