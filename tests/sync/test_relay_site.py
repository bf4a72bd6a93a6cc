"""Relays whose way to the store is slow, loses packets, breaks or is cut: sites in namespaces.

The store is in one network namespace, each site with its relay and engines in another; what the one
link of a site carried is read from its counters.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from packet_filter import cut_off, lose, num_lost, rejoin

from benchmarks.namespaces import Network, why_not
from benchmarks.site import RUN, Process, Said, Sites, tell_all
from benchmarks.site_process import TENSOR
from gymfast.stores import FileStore
from gymfast.sync import Publisher

PROXY = Path(__file__).parents[1] / "relay_proxy.py"
pytestmark = [
    pytest.mark.skipif(
        bool(why_not()), reason=f"needs kernel feature network namespaces: {why_not()}"
    ),
    pytest.mark.timeout(1800),
]
HEADS = 1.05
"""Bytes on a link for each byte of objects: heads of packets, requests and records."""


class Run:
    """A publisher beside the store; every version is new in every byte, and comes as an anchor."""

    def __init__(self, sites: Sites, num_bytes: int) -> None:
        self.sites, self.num_bytes, self.version = sites, num_bytes, -1
        self.store = FileStore(sites.root)
        self.publisher = Publisher(self.store, RUN, threads=1, keep=1000)
        self.sha256 = ""
        self._rng = np.random.default_rng(0)

    def publish(self) -> int:
        """A version; returns the bytes of its objects."""
        before = self._stored_bytes()
        weights = self._rng.integers(0, 1 << 16, self.num_bytes // 2, dtype=np.uint16)
        self.version = self.publisher.publish({TENSOR: weights}, anchor=True).version
        self.sha256 = hashlib.sha256(weights).hexdigest()
        return self._stored_bytes() - before

    def _stored_bytes(self) -> int:
        return sum(self.store.size(key) for key in self.store.list(f"{RUN}/objects/"))

    def require_exact(self, said: Sequence[Said]) -> None:
        for one in said:
            assert (one.error, one.version, one.sha256) == ("", self.version, self.sha256)

    def deliver(self, engines: Sequence[Process]) -> None:
        """Publishes a version that all engines then have, exactly."""
        self.publish()
        self.require_exact(tell_all(engines, self.version))


class Meter:
    """Bytes that reach sites from now on."""

    def __init__(self, sites: Sites, nodes: Sequence[int]) -> None:
        self._sites = sites
        self._before = {node: sites.received_bytes(node) for node in nodes}

    def bytes(self, node: int) -> int:
        return self._sites.received_bytes(node) - self._before[node]


def engines_of(
    sites: Sites, node: int, url: str, run: Run, num_engines: int, *, patience_s: float = 30.0
) -> list[Process]:
    options = {"relay_timeout_s": patience_s, "retry_after_s": 0.5}
    return [sites.engine(node, url, run.num_bytes, **options) for _ in range(num_engines)]


@contextmanager
def one_site(
    folder: Path, *, num_engines: int = 3, num_bytes: int = 4 << 20, rate_gbps: float = 0.1
) -> Iterator[tuple[Sites, Run, Process, list[Process]]]:
    """A relay and engines that read from the store themselves where it fails."""
    with Sites(folder, 1, rate_gbps) as sites:
        run = Run(sites, num_bytes)
        relay = sites.relay(1)
        url = f"{relay.first['url']},{sites.store_url}"
        yield sites, run, relay, engines_of(sites, 1, url, run, num_engines, patience_s=3.0)


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.002)


@pytest.mark.ci
def test_R115_a_relay_with_defaults_is_not_reached_from_other_hosts(tmp_path: Path) -> None:
    with Network(2, 1.0) as network:
        relay = [sys.executable, "-P", "-m", "gymfast", "relay", str(tmp_path), "--port", "0"]
        with_port = Process([*network.within(1), *relay, "--json"], dict(os.environ))
        try:
            host, port = with_port.first["url"].removeprefix("relay://").split(":")
            assert host == "127.0.0.1"
            call = "import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), 20)"
            for node, address, is_let_in in ((1, host, True), (0, network.address(1), False)):
                command = [*network.within(node), sys.executable, "-c", call, address, port]
                found = subprocess.run(command, capture_output=True, text=True, check=False)
                assert (found.returncode == 0) is is_let_in, found.stderr
                assert is_let_in or "ConnectionRefusedError" in found.stderr
        finally:
            with_port.end()
        for_all = [*network.within(1), *relay, "--host", "0.0.0.0"]
        refused = subprocess.run(for_all, capture_output=True, text=True, check=False)
        assert refused.returncode != 0
        assert "give a key (--key-file)" in refused.stderr


# One copy for each site


def check_one_copy(
    folder: Path, *, num_versions: int, percent_lost: float, num_bytes: int, rate_gbps: float
) -> None:
    """Two sites of three engines; each link carries each object once."""
    with Sites(folder, 2, rate_gbps) as sites:
        if percent_lost:
            lose(sites.network, percent_lost)
        run = Run(sites, num_bytes)
        engines = []
        for node in (1, 2):
            url = f"{sites.relay(node).first['url']},{sites.store_url}"
            engines += engines_of(sites, node, url, run, 3)
        run.deliver(engines)  # how long connecting takes is not what is measured
        meter, objects = Meter(sites, (1, 2)), 0
        for _ in range(num_versions):
            objects += run.publish()
            run.require_exact(tell_all(engines, run.version))
        for node in (1, 2):
            copies = meter.bytes(node) / objects
            print(f"site {node}: {copies:.3f} copies of {objects} bytes, {percent_lost} % lost")
            assert 1 <= copies < HEADS + 3 * percent_lost / 100
        assert not percent_lost or num_lost(sites.network) > 0


@pytest.mark.ci
def test_each_site_gets_one_copy_where_packets_are_lost(tmp_path: Path) -> None:
    check_one_copy(tmp_path, num_versions=2, percent_lost=1, num_bytes=4 << 20, rate_gbps=0.1)


@pytest.mark.long
@pytest.mark.parametrize("percent_lost", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("rate_gbps", [0.1, 1.0])
def test_each_site_gets_one_copy_of_20_versions(
    tmp_path: Path, rate_gbps: float, percent_lost: float
) -> None:
    options = {"percent_lost": percent_lost, "rate_gbps": rate_gbps, "num_bytes": 20 << 20}
    check_one_copy(tmp_path, num_versions=20 if rate_gbps == 1.0 else 5, **options)


@pytest.mark.long
def test_a_tree_of_relays_takes_one_copy_from_the_store(tmp_path: Path) -> None:
    """The relay of site 1 is what those of sites 2 and 3 fetch from."""
    with Sites(tmp_path, 3, 0.2) as sites:
        run = Run(sites, 12 << 20)
        far = sites.relay(1)
        urls = [far.first["url"]]
        urls += [sites.relay(node, urls[0], options="--timeout 40").first["url"] for node in (2, 3)]
        engines = []
        for node, url in enumerate(urls, 1):
            engines += engines_of(sites, node, url, run, 2)
        run.deliver(engines)
        meter, sent, objects = Meter(sites, (1, 2, 3)), sites.sent_bytes(0), 0
        for _ in range(10):
            objects += run.publish()
            run.require_exact(tell_all(engines, run.version))
        assert 1 <= (sites.sent_bytes(0) - sent) / objects < HEADS
        for node in (1, 2, 3):
            assert 1 <= meter.bytes(node) / objects < HEADS


# A relay that fails


def fail_while_fetching(sites: Sites, run: Run, engines: list[Process], act: Callable[[], object]):
    """Has something done in the middle of a fetch; returns what the engines say afterwards."""
    meter = Meter(sites, (1,))
    objects = run.publish()
    for engine in engines:
        engine.tell(run.version)
    wait_until(lambda: meter.bytes(1) > random.Random(run.version).uniform(0.1, 0.6) * objects)
    act()
    said = [Said(**engine.hear()) for engine in engines]
    run.require_exact(said)


def require_one_copy_again(sites: Sites, run: Run, engines: list[Process]) -> None:
    """Engines are back at their relay soon after it is back."""

    def is_one_copy() -> bool:
        time.sleep(0.5)
        meter, objects = Meter(sites, (1,)), run.publish()
        run.require_exact(tell_all(engines, run.version))
        return meter.bytes(1) < HEADS * objects

    wait_until(is_one_copy)


def check_killed(folder: Path, num_kills: int) -> None:
    with one_site(folder) as (sites, run, relay, engines):
        port = int(relay.first["url"].rpartition(":")[2])
        run.deliver(engines)
        for _ in range(num_kills):
            fail_while_fetching(sites, run, engines, relay.popen.kill)
            relay.popen.wait()
            run.deliver(engines)  # without a relay
            relay = sites.relay(1, port=port)
            require_one_copy_again(sites, run, engines)


@pytest.mark.ci
def test_engines_read_from_the_store_while_their_relay_is_dead_and_come_back(
    tmp_path: Path,
) -> None:
    check_killed(tmp_path, 1)


@pytest.mark.long
def test_engines_come_back_after_each_of_20_kills(tmp_path: Path) -> None:
    check_killed(tmp_path, 20)


@pytest.mark.long
def test_a_relay_that_is_stopped_is_given_up_and_used_again(tmp_path: Path) -> None:
    with one_site(tmp_path) as (sites, run, relay, engines):
        run.deliver(engines)
        for _ in range(5):
            fail_while_fetching(
                sites, run, engines, lambda: os.kill(relay.popen.pid, signal.SIGSTOP)
            )
            run.deliver(engines)
            os.kill(relay.popen.pid, signal.SIGCONT)
            require_one_copy_again(sites, run, engines)


# A long way that fails


def check_partition(folder: Path, num_times: int) -> None:
    """While the site is cut off no look succeeds, whoever has looked before; nothing is changed."""
    with Sites(folder, 1, 0.1) as sites:
        run = Run(sites, 1 << 20)
        lose(sites.network, 0)
        upstream = sites.store_url
        relay = sites.relay(1, upstream, options="--timeout 0.4")
        engines = engines_of(sites, 1, relay.first["url"], run, 2)
        for _ in range(num_times):
            run.deliver(engines)
            cut_off(sites.network, 1)
            held = run.sha256, run.version
            run.publish()
            time.sleep(0.5)
            fresh = engines_of(sites, 1, relay.first["url"], run, 1)
            for said in tell_all([*engines, *fresh], "pull"):
                assert "StoreError" in said.error or "DeadlineError" in said.error, said
                assert sites.network.address(0) in said.error, "it names the store"
                assert (said.sha256, said.version) == held or said.version is None
            rejoin(sites.network, 1)
            run.require_exact(tell_all([*engines, *fresh], run.version))


@pytest.mark.ci
def test_a_relay_that_is_cut_off_says_so_and_shows_no_old_log(tmp_path: Path) -> None:
    check_partition(tmp_path, 1)


@pytest.mark.long
def test_a_relay_that_is_cut_off_ten_times_shows_no_old_log(tmp_path: Path) -> None:
    check_partition(tmp_path, 10)


FAULTS: dict[str, dict[str, object]] = {
    "delay": {"delay_s": 0.03, "late_s": 0.1},
    "resets": {"resets": True},
    "cuts": {"cuts": True},
    "half-open": {"half_open": True, "most": 4},
    "flips": {"flips": True},
}


def check_line(folder: Path, faults: dict[str, object], num_versions: int) -> int:
    """The relay reaches the store over a line with faults; all engines end exact."""
    with Sites(folder, 1, 0.2) as sites:
        run = Run(sites, 2 << 20)
        host, _, port = sites.store_url.removeprefix("relay://").rpartition(":")
        fields = json.dumps({"period_bytes": 4_000_000, **faults})
        line = sites.start(1, sys.executable, str(PROXY), host, port, fields, "7")
        upstream = f"relay://{line.first['address']}"
        relay = sites.relay(1, upstream, options="--timeout 1")
        url = f"{relay.first['url']},{sites.store_url}"
        engines = engines_of(sites, 1, url, run, 3, patience_s=10.0)
        meter, objects = Meter(sites, (1,)), 0
        for _ in range(num_versions):
            objects += run.publish()
            run.require_exact(tell_all(engines, run.version))
        line.tell("")
        num_faults: int = line.hear()["faults"]
        print(f"{num_faults} faults, {meter.bytes(1) / objects:.2f} copies")
        return num_faults


@pytest.mark.long
def test_engines_are_exact_where_the_line_to_the_store_flips_a_bit_of_most_objects(
    tmp_path: Path,
) -> None:
    assert check_line(tmp_path, {**FAULTS["flips"], "period_bytes": 2_000_000}, 3) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_engines_are_exact_over_a_bad_line_to_the_store(tmp_path: Path, name: str) -> None:
    num_faults = check_line(tmp_path, FAULTS[name], 30)
    assert num_faults > 0 or name == "delay"
