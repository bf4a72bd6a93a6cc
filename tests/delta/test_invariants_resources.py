"""Memory, handles and the GIL while versions are encoded and applied (I60, I61, I62)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gymfast import _core
from gymfast.delta import State, encode
from gymfast.delta.backends import BlockParams, select
from gymfast.delta.geometry import Geometry

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs kernel feature /proc")
MIB = 2**20
SCRATCH = 48 * MIB  # of one thread, with default blocks: docs/wire-format.md section 9
LARGEST_SCRATCH = 72 * MIB  # with blocks of 2^20 units of 4 bytes: csrc/cpu/codec.cpp, reserve()
PREAMBLE = """
import gc, json, os, re, sys, time
import numpy as np
import gymfast.delta as delta
from gymfast.errors import FormatError
def field(name):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(name + r":\\s+(\\d+)", file.read())[1])
def peak(): return field("VmHWM") - first
delta.apply({}, delta.encode(None, {"warm": np.ones(9)}), threads=2)
first = field("VmHWM")
size, threads = 2**28, int(sys.argv[1])
def made(dtype, density):
    rng = np.random.default_rng(0)
    n = size // 8 // np.dtype(dtype).itemsize
    new = {f"w{i}": rng.integers(0, 2**16, n, dtype) for i in range(8)}
    held = {name: array.copy() for name, array in new.items()}
    for array in new.values():
        array[rng.integers(0, n, int(density * n))] ^= 1
    return held, new
"""


def run(code: str, *arguments: str | int) -> dict[str, int]:
    """What a fresh process prints as JSON."""
    command = [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


APPLY = """
held, new = made(np.dtype(sys.argv[2]), float(sys.argv[3]))
read_end, write_end = os.pipe()
if os.fork() == 0:  # what encoding takes stays in a process of its own
    with open(write_end, "wb") as pipe:
        pipe.write(delta.encode(held, new, threads=threads))
    os._exit(0)
os.close(write_end)
with open(read_end, "rb") as pipe:
    frame = pipe.read()
assert os.wait()[1] == 0
state = delta.State.attach(held, threads=threads)
digests = sum(slot.rows.nbytes for slot in state.slots.values())
root = delta.State.attach(new, threads=threads).root
del new
gc.collect()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM starts again from what is resident now
before = field("VmHWM")
delta.apply(state, frame)
assert state.root == root
print(json.dumps({"peak": field("VmHWM") - before, "frame": len(frame), "digests": digests}))
"""


@linux
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize(("dtype", "density"), [("uint16", 0.01), ("uint32", 0.5)])
def test_I60_apply_in_place_takes_no_second_state(dtype: str, density: float, threads: int) -> None:
    seen = run(APPLY, threads, dtype, density)
    assert seen["peak"] <= 1.1 * (threads * SCRATCH + seen["digests"]) + MIB
    assert seen["frame"] > MIB
    assert seen["peak"] > 0  # the measurement sees something


ENCODE = """
held, new = made(np.uint16, 0.01)
state = delta.State.attach(held, threads=threads)
encoder = delta.Encoder(state, threads=threads)
frame = b"".join(encoder.encode(new))
changed = encoder.stats.num_changed
encoder.rollback()
print(json.dumps({"peak": peak(), "changed": changed, "frame": len(frame)}))
"""


@linux
@pytest.mark.parametrize("threads", [1, 8])
def test_I60_the_peak_of_an_encoder_is_its_plan_with_any_number_of_threads(threads: int) -> None:
    seen = run(ENCODE, threads)
    plan = 2 * 2**28 + 6 * seen["changed"] + seen["frame"] + threads * SCRATCH
    assert seen["peak"] <= 1.1 * plan


BLOCKS = """
from gymfast.delta.backends import BlockParams, select
from gymfast.delta.geometry import Geometry
backend, n = select("cpu"), 2**20
rng = np.random.default_rng(0)
flat, tiled = Geometry(n, 4, n, 1, n), Geometry(n, 4, 1024, 1024, 1024)
old = rng.integers(0, 2**32, n, np.uint32)
news = [old + rng.integers(0, high, n).astype(np.uint32) for high in (2, 2**8, 2**20)]
news += [rng.integers(0, 2**32, n, np.uint32), old ^ np.uint32(2**31)]
rest = field("VmRSS")
for geometry in (flat, tiled, Geometry(n, 4, 2048, 512, 2048)):
    for profile in (0, 1, 2):
        for new in news:
            for classes in ((0, 0), (4, 4)):
                params = BlockParams(profile, *classes, True)
                rows = backend.digest_blocks(old.view(np.uint8), geometry, 1)
                coded = backend.encode_blocks(
                    old.view(np.uint8), new.view(np.uint8), geometry, params, rows.copy(), 0, 1,
                    update=False, undo=False, threads=1)
                data = old.copy()
                backend.apply_blocks(
                    data.view(np.uint8), coded.body, geometry, params, rows, 0, 1, 1)
                assert np.array_equal(data, new)
                del coded, data
gc.collect()
print(json.dumps({"kept": field("VmRSS") - rest}))
"""


@linux
def test_I60_the_scratch_of_a_thread_is_bounded_for_the_largest_blocks() -> None:
    assert run(BLOCKS, 1)["kept"] <= LARGEST_SCRATCH


LEAKS = """
def num_tasks():
    time.sleep(0.02)
    return len(os.listdir("/proc/self/task"))
def counts():
    # A thread that was joined is still listed for a moment; one that leaks stays.
    tasks = min(num_tasks() for _ in range(50))
    return field("VmRSS"), len(os.listdir("/proc/self/fd")), tasks
rng = np.random.default_rng(0)
weights = {f"w{i}": rng.integers(0, 2**16, 2**14, np.uint16) for i in range(8)}
weights["tied"] = weights["w0"]
held = {name: array.copy() for name, array in weights.items()}
held["tied"] = held["w0"]
receiver = delta.State.attach(held, threads=2)
encoder = delta.Encoder(delta.State.copy_of(weights, threads=2), threads=2)
num_refused, num_syncs = 0, int(sys.argv[2])
for step in range(num_syncs):
    if step == 20:
        before = counts()
    for array in weights.values():
        array[rng.integers(0, array.size, 200)] ^= 1
    if step % 3 == 0:  # one tensor comes and goes, one changes its shape
        weights[f"new{step % 2}"] = np.ones(1000 + step % 5, np.uint8)
    elif step % 3 == 1:
        weights.pop("new0", None)
    frame = b"".join(encoder.encode(weights))
    if step % 5 == 4:
        encoder.rollback()
        frame = b"".join(encoder.encode(weights))
    newer = frame[:7] + bytes((2,)) + frame[8:]
    damaged = frame[:90] + bytes((frame[90] ^ 1,)) + frame[91:]
    for broken in (frame[:-1], damaged, frame + b"x", newer):
        try:
            delta.apply(receiver, broken)
        except FormatError:
            num_refused += 1
    delta.apply(receiver, frame)
    delta.apply(receiver, frame)
    delta.inspect(frame)
    encoder.commit()
    assert receiver.root == encoder.state.root
after = counts()
grown = dict(zip(("memory", "files", "tasks"), (b - a for a, b in zip(before, after))))
print(json.dumps(grown | {"refused": num_refused}))
"""


def check_leaks(num_syncs: int) -> None:
    seen = run(LEAKS, 2, num_syncs)
    assert seen["refused"] == 4 * num_syncs
    assert seen["files"] == seen["tasks"] == 0
    assert seen["memory"] <= 10_000 * (num_syncs - 20)


@linux
def test_I61_sixty_syncs_leave_nothing_behind() -> None:
    check_leaks(60)


@linux
@pytest.mark.long
def test_I61_three_hundred_syncs_leave_nothing_behind() -> None:
    check_leaks(300)


class OtherThread:
    """Counts how often it could run; it gives the GIL back by itself, and waits to be asked."""

    def __init__(self) -> None:
        self.num_turns = 0
        self._ask, self._is_done = threading.Semaphore(0), False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            self._ask.acquire()
            if self._is_done:
                return
            self.num_turns += 1

    def ran_during(self, call: Callable[[], object], most_calls: int) -> bool:
        """Whether the thread got a turn in one of so many calls, with no other chance for it."""
        before = self.num_turns
        self._ask.release()
        for _ in range(most_calls):
            call()
            if self.num_turns > before:
                return True
        return False

    def close(self) -> None:
        self._is_done = True
        self._ask.release()
        self._thread.join()


@pytest.fixture
def other() -> Iterator[OtherThread]:
    """A second thread, to which the interpreter never gives the GIL on its own account."""
    interval = sys.getswitchinterval()
    thread = OtherThread()
    sys.setswitchinterval(1000)
    yield thread
    sys.setswitchinterval(interval)
    thread.close()


def native_calls() -> dict[str, Callable[[], object]]:
    """Each native call of some milliseconds; every one may be repeated."""
    n = 2**23
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, n, np.uint16)
    new = old ^ (rng.random(n) < 0.02).astype(np.uint16)
    data, fresh = old.view(np.uint8), new.view(np.uint8)
    geometry, cpu = Geometry(n, 2, n, 1, 2**19), select("cpu")
    flat = (n, 2, n, 1, 2**19)
    rows = cpu.digest_blocks(data, geometry, 1)
    params, span = BlockParams(0, 0, 0, True), (0, geometry.num_blocks)

    def coded(update: bool) -> object:
        return cpu.encode_blocks(
            data if not update else data.copy(),
            *(fresh, geometry, params, rows.copy(), *span),
            update=update,
            undo=update,
            threads=1,
        )

    body, undo = coded(False).body, coded(True).undo
    changed, frame = fresh.copy(), encode(None, {"w": new}, threads=1)

    def applied() -> int:
        return cpu.apply_blocks(data.copy(), body, geometry, params, rows.copy(), *span, 1)

    return {
        "check64": lambda: _core.check64(data.data),
        "digest_blocks": lambda: _core.digest_blocks(data, *flat, 1),
        "encode_blocks": lambda: coded(False),
        "apply_blocks": applied,
        "rollback_blocks": lambda: _core.rollback_blocks(changed, undo, *flat),
        "parse_frame": lambda: _core.parse_frame(frame),
        "attach": lambda: State.attach({"w": new}, threads=1),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("check64", "digest_blocks", "encode_blocks", "apply_blocks", "rollback_blocks"),
        *("parse_frame", "attach"),
    ],
)
def test_I62_another_thread_runs_during_every_long_native_call(name, other: OtherThread) -> None:
    call = native_calls()[name]
    for _ in range(20):
        assert other.ran_during(call, most_calls=200)


def test_I62_the_other_thread_waits_for_a_call_that_keeps_the_gil(other: OtherThread) -> None:
    assert not other.ran_during(lambda: 7**20_000, most_calls=50)
