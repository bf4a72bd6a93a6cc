"""Memory, files and threads of versions over live TCP connections (I60, I61; R90, R94).

Publisher and receiver are processes of their own, and each measures itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs kernel feature /proc")
MIB = 2**20
SCRATCH = 48 * MIB  # of one thread: docs/wire-format.md section 9
THREADS = 2

RANKS = """
import gc, json, os, re, sys, time
import numpy as np
import gymfast.delta as delta
from gymfast.channels import Hub, connect
from gymfast.channels.tcp import open_tcp
from gymfast.errors import FormatError, GymfastError
from gymfast.sync.live import LivePublisher, LiveSubscriber
def field(name):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(name + r":\\s+(\\d+)", file.read())[1])
port_out, port_in = os.pipe()
seen_out, seen_in = os.pipe()
rank = int(os.fork() == 0)
if rank == 0:
    hub = Hub()
    os.write(port_in, b"%d\\n" % hub.port)
    control = hub.control
    control.wait_for(2, 60)
else:
    with open(port_out) as pipe:
        control = connect(("127.0.0.1", int(pipe.readline())), 1, timeout_s=60)
control.form(60)
channel = open_tcp(control)
def tell(seen):
    # The receiver hands what it saw to the publisher, which prints both.
    if rank == 1:
        os.write(seen_in, json.dumps(seen).encode() + b"\\n")
        channel.close()
        control.close()
        os._exit(0)
    with open(seen_out) as pipe:
        print(json.dumps([seen, json.loads(pipe.readline())]))
    channel.close()
    hub.close()
    assert os.wait()[1] == 0
"""

LEAKS = """
def num_tasks():
    time.sleep(0.02)
    return len(os.listdir("/proc/self/task"))
def counts():
    # A thread that was joined is still listed for a moment; one that leaks stays.
    tasks = min(num_tasks() for _ in range(25))
    return field("VmRSS"), len(os.listdir("/proc/self/fd")), tasks
num_syncs, rng = int(sys.argv[1]), np.random.default_rng(0)
weights, kinds = {f"w{i}": np.zeros(2**14, np.uint16) for i in range(8)}, {}
if rank == 0:
    side = LivePublisher(control, channel, threads=2, timeout_s=60)
else:
    side = LiveSubscriber(control, channel, {}, threads=2, timeout_s=60)
for step in range(num_syncs):
    if step == 20:
        before = counts()
    if step % 25 == 10:  # as after a loss: a new formation with a channel of its own
        channel.close()
        control.form(60)
        channel = open_tcp(control)
        side.rejoin(control, channel)
    if rank == 1:
        report = side.receive()
    else:
        for array in weights.values():
            array[rng.integers(0, array.size, array.size if step % 10 == 9 else 200)] ^= 1
        report = side.publish(weights)
    report.require_all()
    kinds[report.kind] = kinds.get(report.kind, 0) + 1
after = counts()
tell(dict(zip(("memory", "files", "tasks"), (b - a for a, b in zip(before, after)))) | kinds)
"""


def run(code: str, *arguments: int) -> list[dict[str, int]]:
    """What publisher and receiver saw."""
    command = [sys.executable, "-c", RANKS + code, *map(str, arguments)]
    # One arena: those of glibc grow with each new thread for a while, and leak nothing.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found


def check_leaks(num_syncs: int, noise_bytes: int) -> None:
    for seen in run(LEAKS, num_syncs):
        assert seen["full"] == 1 + num_syncs // 10
        assert seen["delta"] == num_syncs - seen["full"]
        assert seen["files"] <= 0  # fewer where a line was just being closed at the first look
        assert seen["tasks"] <= 0
        assert seen["memory"] <= 10_000 * (num_syncs - 20) + noise_bytes


def test_I61_R94_a_hundred_live_versions_leave_nothing_behind() -> None:
    """A heap grows in steps of some 100 kB, which count in so short a run."""
    check_leaks(100, MIB)


@pytest.mark.long
def test_I61_R94_three_hundred_live_versions_leave_nothing_behind() -> None:
    check_leaks(300, 0)


PEAKS = """
size, n = int(sys.argv[1]), 8
rng = np.random.default_rng(0)
weights = {f"w{i}": rng.integers(0, 2**16, size // 2 // n, np.uint16) for i in range(n)}
if rank == 0:
    side = LivePublisher(control, channel, threads=2, timeout_s=60)
else:
    side = LiveSubscriber(control, channel, weights, threads=2, timeout_s=60)
seen = {}
for step, name in enumerate(("full", "delta", "delta", "again")):
    if rank == 0:
        for array in weights.values():
            some = rng.integers(0, array.size, array.size // (1 if name == "again" else 100))
            array[some] ^= 1
            del some
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts again from what is resident now
    begin = field("VmHWM")
    report = side.publish(weights) if rank == 0 else side.receive()
    report.require_all()
    assert report.kind == ("delta" if name == "delta" else "full")
    seen[name] = max(seen.get(name, 0), field("VmHWM") - begin)
    seen[name + " sent"] = report.sent_bytes
tell(seen)
"""


@pytest.mark.ci
def test_I60_R90_the_peak_of_a_live_version_is_what_the_docs_say() -> None:
    """docs/transfer.md, Memory."""
    size = 128 * MIB
    publisher, receiver = run(PEAKS, size)
    buckets = 3 * 4 * MIB
    scratch = THREADS * SCRATCH
    changed, frame = size // 2 // 100, publisher["delta sent"]
    assert publisher["full"] <= 1.1 * (size + buckets)
    assert publisher["again"] <= 1.1 * (size + buckets)
    assert publisher["delta"] <= 1.1 * (4 * changed + frame + scratch)
    assert receiver["full"] <= 1.1 * (size + buckets)
    assert receiver["again"] <= 1.1 * (size + buckets)
    assert receiver["delta"] <= 1.1 * (2 * frame + scratch)
    assert max(publisher["delta"], receiver["delta"]) < size / 2  # no second copy of the weights
    assert min(publisher["full"], receiver["full"]) > size / 2  # the measurement sees something
