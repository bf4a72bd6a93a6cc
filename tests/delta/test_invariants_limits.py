"""Lies about sizes (I11), and frames of other versions of the format (I13)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from delta_frames import (
    added,
    blocks,
    blocks_body,
    check_of,
    digest_of,
    frame,
    header,
    row,
    section,
    tensor,
    tensor_body,
    varint,
)
from golden_valid import VALID, lenient, lenient_state

from gymfast import _core
from gymfast.delta import State, apply, encode, inspect, restore, verify
from gymfast.delta.frame import Kind, parse_frame, root_of
from gymfast.errors import BudgetError, FormatError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "valid"
MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs kernel feature /proc")
NEW = bytes((0, 0, 0, 1, 0, 0, 0, 0))
HUGE = [2**31, 2**32 - 1, 2**50, 2**60, 2**63, 2**64 - 1]
PREAMBLE = f"""
import json, os, re, resource, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import numpy as np
import gymfast.delta as delta
from gymfast import _core
from gymfast.delta import checkpoint
from gymfast.delta.frame import parse_frame
from gymfast.errors import FormatError, GymfastError
def field(name):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(name + r":\\s+(\\d+)", file.read())[1])
def peak(): return field("VmHWM") - first
"""


def run(code: str, *arguments: str | Path) -> dict[str, int]:
    """What a fresh process prints as JSON."""
    command = [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def one(*parts: bytes, num_tensors: int = 1) -> bytes:
    """A frame of these sections with right checks; its END fits one added tensor NEW."""
    root = root_of([("t", "U8", (8,), digest_of(NEW))])
    return frame([header(num_tensors), *parts], [row(2, digest_of(NEW))], new_root=root)


def body_lies() -> Iterator[bytes]:
    """Bodies of sections whose fields state sizes that nothing here has."""
    raw = [(5, NEW, check_of(NEW))]
    for n in HUGE:
        yield section(2, tensor_body(num_bytes=n))
        yield section(2, tensor_body(shape=(n,), num_bytes=n % 2**64))
        yield section(2, tensor_body(shape=(n, n), num_bytes=8, tiles=(8, 1, 8)))
        yield section(2, tensor_body(ndim=n))
        yield from (
            section(2, tensor_body(tiles=(*(8, 1, 8)[:i], n, *(8, 1, 8)[i + 1 :])))
            for i in range(3)
        )
        body = tensor_body()
        yield section(2, body[:4] + varint(n) + body[5:])  # length of the name
        yield section(2, body[:6] + varint(n) + body[7:])  # length of the dtype
        yield section(2, tensor_body("u", kind=Kind.ALIAS, target=b"") + varint(n))
        for lie in ({"tensor": n}, {"first_block": n}, {"num_blocks": n}, {"payload_bytes": [n]}):
            yield tensor() + section(3, blocks_body(raw, **lie))
    for ending in (b"\xff" * 9 + b"\x01", b"\xff" * 10, b"\xff" * 9 + b"\x7f", b"\x80" * 9 + b"\0"):
        yield section(2, tensor_body()[:-4] + ending)
        yield tensor() + section(3, b"\0\0" + ending + b"\5\x08" + NEW)


def payload_lies() -> Iterator[bytes]:
    """Payloads whose counts, lengths and parameters lie; all sections are right."""
    for n in (9, 2**20, 2**31, 2**32, 2**60, 2**64 - 1):
        k = varint(n)
        yield added(NEW, 1, k + b"\0\0" + b"\0\x08")
        yield added(NEW, 1, b"\1\0\x20" + k + b"\0" + b"\0\x08")  # exceptions
        yield added(NEW, 1, b"\1\0\x80" + k + b"\0" + b"\0\x08")  # flips
        yield added(NEW, 2, k + b"\0\1\0" + k + b"\0" + b"\0\x08")
        yield added(NEW, 2, b"\1\0\1\0" + k + b"\0" + b"\0\x08")
        yield added(NEW, 3, b"\1\0" + k + b"\0\0" + b"\0\x08")
    for mode in (1, 2, 3, 5):
        yield added(NEW, mode, b"\xff" * 300)
        yield added(NEW, mode, b"\x1f" * 300)
    yield added(NEW, 4, bytes((1, 255)) + bytes(range(256)) + bytes(40), unit_bytes=2)


def section_lies() -> Iterator[bytes]:
    """Frames whose outer structure lies."""
    good = added(NEW, 5, NEW)
    for size in (2**31, 2**32, 2**40, 2**40 + 1, 2**48 - 1):
        yield good[:10] + size.to_bytes(6, "little") + good[16:]
        yield good[:8] + section(0x80, b"", body_bytes=size) + good[8:]
    for count in (2, 4_194_304, 4_194_305, 2**32, 2**63, 2**64 - 1):
        yield one(tensor(), blocks([(5, NEW, check_of(NEW))]), num_tensors=count)


def lies() -> list[bytes]:
    return [*section_lies(), *map(one, body_lies()), *payload_lies()]


def write_frames(path: Path, frames: list[bytes]) -> Path:
    path.write_text("\n".join(data.hex() for data in frames))
    return path


READ_ALL = """
frames = [bytes.fromhex(line) for line in open(sys.argv[1])]
readers = {
    "native": _core.parse_frame, "python": parse_frame, "inspect": delta.inspect,
    "verify": lambda data: delta.verify(data, threads=1),
    "apply": lambda data: delta.apply(delta.State.empty(threads=1), data),
    "reference": lambda data: delta.apply({}, data, backend="reference"),
    "restore": lambda data: delta.restore({"t": np.zeros(8, np.uint8)}, data, threads=1),
    "checkpoint": lambda data: checkpoint.apply_checkpoint(None, data, sys.argv[2], threads=1),
}
good = bytes.fromhex(sys.argv[3])
for name, read in readers.items():
    read(good)
if os.path.exists(sys.argv[2]): os.remove(sys.argv[2])
first = field("VmHWM")
limit = field("VmSize") + 64 * 2**20  # memory that is asked for and never touched counts as well
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
refused = dict.fromkeys(readers, 0)
for data in frames:
    for name, read in readers.items():
        try:
            read(data)
        except FormatError:
            refused[name] += 1
print(json.dumps(refused | {"peak": peak()}))
"""


@linux
def test_I11_no_lie_about_a_size_makes_a_reader_ask_for_memory(tmp_path: Path) -> None:
    frames = lies()
    path = write_frames(tmp_path / "frames", frames)
    seen = run(READ_ALL, path, tmp_path / "out.safetensors", added(NEW, 5, NEW).hex())
    assert seen.pop("peak") <= 16 * MIB
    num_payload_lies = len(list(payload_lies()))
    parsers = {"native", "python", "inspect"}  # these do not look into payloads
    for reader, num_refused in seen.items():
        least = len(frames) - (num_payload_lies if reader in parsers else 0)
        assert num_refused == least, reader
    assert len(frames) > 100


def bomb(n: int, tile_cols: int, dtype: str = "U8") -> bytes:
    """A valid frame of a hundred bytes that adds n zeros."""
    parts = [header(), tensor("t", dtype=dtype, shape=(n,), tiles=(n, 1, tile_cols))]
    return frame(parts, [row(2, (0, 0))], new_root=root_of([("t", dtype, (n,), (0, 0))]))


@pytest.mark.parametrize("tile_cols", [1024, 2**20])
@pytest.mark.parametrize("n", [2**50, 2**60])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_I11_a_declared_size_that_no_machine_has_is_one_clear_error(
    backend: str, n: int, tile_cols: int
) -> None:
    data = bomb(n, tile_cols)
    assert inspect(data).tensors[0].num_bytes == n
    for read in (
        lambda: verify(data, backend=backend),
        lambda: apply({}, data, backend=backend),
        lambda: apply(State.empty(backend=backend), data),
        lambda: restore({"t": np.ones(3)}, data, allow_new_names=True, backend=backend),
    ):
        with pytest.raises(BudgetError, match=r"'t'.*\d bytes"):
            read()


def test_I11_a_checkpoint_of_a_declared_size_that_no_disk_has_is_refused(tmp_path: Path) -> None:
    from gymfast.delta.checkpoint import apply_checkpoint

    for n in (2**46, 2**50, 2**60):
        with pytest.raises(BudgetError, match=str(n)[:5]):
            apply_checkpoint(None, bomb(n, 2**20), tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []


@linux
def test_I11_restore_asks_for_all_digests_before_it_writes() -> None:
    code = """
n = 2**28
held = {"t": np.ones(n, np.uint8)}
state = delta.State.attach(held, threads=1)
limit = field("VmSize") + 2**21  # the digests need twice as much
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
error = ""
try:
    delta.restore(state, bytes.fromhex(sys.argv[1]))
except GymfastError as found:
    error = type(found).__name__
print(json.dumps({"error": error, "sum": int(held["t"].sum())}))
"""
    seen = run(code, bomb(2**28, 1024).hex())
    assert seen == {"error": "BudgetError", "sum": 2**28}


TINY_BLOCKS = """
n = 2**26
held = {"t": np.ones(n, np.uint8)}
states = [delta.State.attach(held, threads=1), delta.State.attach(held, backend="reference")]
frames = [bytes.fromhex(text) for text in sys.argv[1:]]
delta.inspect(bytes.fromhex(sys.argv[1]))
limit = field("VmSize") + 16 * 2**20  # sixteen times the tensor is 1 GiB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
numbers = []
for data in frames[1:]:
    for state in states:
        for use in (delta.apply, delta.restore):
            try:
                use(state, data)
            except FormatError as error:
                numbers.append(error.number)
seen = {"numbers": sorted(set(numbers)), "count": len(numbers), "sum": int(held["t"].sum())}
print(json.dumps(seen))
"""


@linux
def test_I11_blocks_of_one_unit_cannot_cost_many_times_the_tensor() -> None:
    n = 2**26
    digests = (digest_of(bytes(1)), digest_of(bytes(1)))
    sections = [header(), tensor("t", kind=Kind.DELTA, shape=(n,), tiles=(n, 1, 1))]
    patch = frame([*sections, blocks([(5, b"\0", 0)])], [row(1, *digests)])
    square = [header(), tensor("t", shape=(2**13, 2**13), tiles=(2**13, 1, 1))]
    tiled = frame(square, [row(2, (0, 0))])
    seen = run(
        TINY_BLOCKS, added(NEW, 5, NEW).hex(), *(d.hex() for d in (bomb(n, 1), patch, tiled))
    )
    assert seen == {"numbers": [30], "count": 12, "sum": n}


DECLARED = """
data = open(sys.argv[1], "rb").read()
small = bytes.fromhex(sys.argv[2])
delta.apply(delta.State.empty(threads=1), small)
first = field("VmHWM")
if sys.argv[3] == "apply":
    delta.apply(delta.State.empty(threads=1), data)
elif sys.argv[3] == "verify":
    delta.verify(data, threads=1)
else:
    for parse in (delta.inspect, delta.verify, lambda data: delta.apply({}, data)):
        try:
            parse(data)
        except FormatError:
            pass
print(json.dumps({"peak": peak()}))
"""


def anchor(num_bytes: int) -> bytes:
    """A full state of four tensors in blocks of 2^14 units, whose scratch is under 1 MiB."""
    rng = np.random.default_rng(4)
    new = {f"t{i}": rng.integers(0, 256, num_bytes // 4, np.uint8) for i in range(4)}
    return encode(State.empty(block_units=2**14, threads=1), new, threads=1)


@linux
@pytest.mark.parametrize(("call", "share"), [("apply", 1), ("verify", 0.25), ("damaged", 0)])
def test_I11_decoding_takes_what_the_frame_declares_and_16_MiB(
    call: str, share: float, tmp_path: Path
) -> None:
    num_bytes = 96 * MIB
    data = anchor(num_bytes)
    if call == "damaged":
        data = data[:-40] + bytes((data[-40] ^ 1,)) + data[-39:]
    (tmp_path / "frame").write_bytes(data)
    seen = run(DECLARED, tmp_path / "frame", added(NEW, 5, NEW).hex(), call)
    assert seen["peak"] <= share * num_bytes + 16 * MIB


@linux
def test_I11_many_sections_take_memory_in_proportion_to_the_frame(tmp_path: Path) -> None:
    n = 20_000
    parts = [header(n)]
    for i in range(n):
        parts.append(tensor(f"{i}", shape=(1,), num_bytes=1))
    entries = [(f"{i}", "U8", (1,), (0, 0)) for i in range(n)]
    data = frame(parts, [row(2, (0, 0))] * n, new_root=root_of(entries))
    (tmp_path / "frame").write_bytes(data)
    seen = run(DECLARED, tmp_path / "frame", added(NEW, 5, NEW).hex(), "verify")
    assert seen["peak"] <= 100 * len(data)


@pytest.mark.parametrize("version", [0, 2, 3, 255])
def test_I13_a_newer_version_is_named_with_what_to_do(version: int) -> None:
    data = added(NEW, 5, NEW)
    newer = data[:7] + bytes((version,)) + b"a layout of which nothing is known"
    held = {"t": np.zeros(8, np.uint8)}
    calls: tuple[Callable[[], object], ...] = (
        *(lambda: inspect(newer), lambda: verify(newer), lambda: parse_frame(newer)),
        *(lambda: apply(held, newer), lambda: restore(held, newer)),
        lambda: apply(held, newer, backend="reference"),
    )
    for call in calls:
        with pytest.raises(FormatError, match=rf"version {version}\b.*knows 1.*update") as caught:
            call()
        assert caught.value.number == 11
    with pytest.raises(FormatError, match=rf"found {version}, expected 1|version") as caught:
        _core.parse_frame(newer)
    assert caught.value.number == 11
    assert not held["t"].any()


@pytest.mark.parametrize("section_type", [0, 5, 0x3F, *range(0x40, 0x80)])
def test_I13_a_must_stop_section_stops_the_reader(section_type: int) -> None:
    data = added(NEW, 5, NEW)
    for at in boundaries(data):
        newer = data[:at] + section(section_type, b"a later version") + data[at:]
        for read in (parse_frame, _core.parse_frame, lambda d: apply({}, d)):
            with pytest.raises(FormatError) as caught:
                read(newer)
            assert caught.value.number == 12
        with pytest.raises(FormatError, match=f"{section_type:#04x}.*update gymfast"):
            inspect(newer)


def boundaries(data: bytes) -> list[int]:
    """Where the sections of a frame start."""
    starts, at = [], 8
    while at < len(data):
        starts.append(at)
        at += 16 + int.from_bytes(data[at + 2 : at + 8], "little")
    return starts


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_I13_a_skippable_section_of_any_type_is_skipped(backend: str) -> None:
    state = {name: t.data.tobytes() for name, t in lenient_state().items()}
    template = lenient()
    at = boundaries(template)[1]
    assert template[at] == 0xC3
    for section_type in range(0x80, 0x100):
        parts = [header(), section(section_type, bytes(section_type)), tensor()]
        parts += [section(section_type, b""), blocks([(5, NEW, check_of(NEW))])]
        root = root_of([("t", "U8", (8,), digest_of(NEW))])
        held: dict[str, np.ndarray] = {}
        apply(held, frame(parts, [row(2, digest_of(NEW))], new_root=root), backend=backend)
        assert held["t"].tobytes() == NEW
    receiver = State.empty(backend=backend)
    apply(receiver, template)
    assert {name: t.data.tobytes() for name, t in receiver.tensors.items()} == state


def test_I13_every_released_golden_frame_is_read() -> None:
    names = {path.stem for path in GOLDEN.glob("*.gfd")}
    assert names >= {f"v1_{name}" for name in VALID}
    for name in sorted(names):
        data = (GOLDEN / f"{name}.gfd").read_bytes()
        assert parse_frame(data).frame_bytes == inspect(data).frame_bytes == len(data)
