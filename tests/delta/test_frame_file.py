"""Frames read from files section by section: as those in memory, and in bounded memory."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from delta_checkpoints import read, write
from delta_frames import section
from delta_weights import small_pair

import gymfast.delta as delta
from gymfast.delta import checkpoint, in_place
from gymfast.delta.checkpoint import apply_checkpoint, apply_checkpoint_in_place
from gymfast.delta.frame_file import inspect_file, verify_file
from gymfast.delta.parse import open_frame
from gymfast.delta.source import FileSource
from gymfast.errors import ChecksumError, FormatError, GymfastError, NotFoundError
from gymfast.testing.compare import assert_bits_equal

GOLDEN = Path(__file__).parents[1] / "golden"
VALID = sorted((GOLDEN / "valid").glob("*.gfd"))
INVALID = tomllib.loads((GOLDEN / "invalid" / "rules.toml").read_text())
KEY = b"sixteen bytes of"
MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs kernel feature /proc")


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the number of its FormatError."""
    try:
        return call()
    except FormatError as error:
        return error.number


@pytest.mark.parametrize("piece_bytes", [1, 13, 2**20])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_file_says_what_its_bytes_say(backend: str, piece_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr(FileSource, "PIECE_BYTES", piece_bytes)
    for path in VALID if piece_bytes > 1 else VALID[:3]:
        data = path.read_bytes()
        assert inspect_file(path) == delta.inspect(data)
        assert verify_file(path, backend=backend) == delta.verify(data, backend=backend)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", INVALID)
def test_a_file_is_refused_as_its_bytes_are(name: str, backend: str) -> None:
    path = GOLDEN / "invalid" / f"{name}.gfd"
    data = path.read_bytes()
    options = {"backend": backend, "threads": 1}
    assert outcome(lambda: inspect_file(path)) == outcome(lambda: delta.inspect(data))
    found = outcome(lambda: verify_file(path, **options))
    assert found == outcome(lambda: delta.verify(data, **options))


def test_every_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    old, new = small_pair()
    path = tmp_path / "frame"
    for key in (None, KEY):
        whole = delta.encode({"a": old["bias"]}, {"a": new["bias"]}, backend="cpu", key=key)
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(FormatError):
                verify_file(path, key=key)
        path.write_bytes(whole)
        verify_file(path, key=key)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        inspect_file(tmp_path / "nowhere")
    with pytest.raises(GymfastError, match="not a regular file"):
        inspect_file(tmp_path)


@pytest.fixture(params=[None, KEY], ids=["plain", "authenticated"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    return request.param


@pytest.fixture
def held(tmp_path: Path, key: bytes | None) -> Path:
    """A folder with `base.safetensors`, `new.safetensors` and `frame`."""
    old, new = small_pair()
    write(tmp_path / "base.safetensors", old)
    write(tmp_path / "new.safetensors", new)
    (tmp_path / "frame").write_bytes(delta.encode(old, new, backend="cpu", key=key))
    return tmp_path


def apply_file(base: Path, frame: Path, out: Path | None, key: bytes | None) -> None:
    """Applies to a new checkpoint, or in place if out is None."""
    if out is None:
        apply_checkpoint_in_place(base, frame, backend="cpu", key=key)
    else:
        apply_checkpoint(base, frame, out, backend="cpu", key=key)


@pytest.mark.parametrize("goes_in_place", [False, True])
@pytest.mark.parametrize("is_forged", [False, True])
def test_a_frame_that_changes_under_the_reader_is_refused_and_nothing_is_written(
    held: Path, key: bytes | None, goes_in_place: bool, is_forged: bool, monkeypatch
) -> None:
    if is_forged and key is None:
        return  # without a key any frame of right checks is as good as another
    base, frame, out = held / "base.safetensors", held / "frame", held / "out.safetensors"
    before = base.read_bytes()

    def change_then_plan(parsed, receiver):
        steps = plan_steps(parsed, receiver)
        data = bytearray(frame.read_bytes())
        at = 8
        while data[at] != 3:  # the first BLOCKS section
            at += 16 + int.from_bytes(data[at + 2 : at + 8], "little")
        end = at + 16 + int.from_bytes(data[at + 2 : at + 8], "little")
        data[end - 1] ^= 1
        if is_forged:
            data[at:end] = section(3, bytes(data[at + 16 : end]))
        frame.write_bytes(data)
        return steps

    plan_steps = checkpoint.plan_steps
    for where in (checkpoint, in_place):
        monkeypatch.setattr(where, "plan_steps", change_then_plan)
    monkeypatch.setattr(FileSource, "PIECE_BYTES", 64)
    write_to = None if goes_in_place else out
    with pytest.raises(ChecksumError, match="changed while it was read") as caught:
        apply_file(base, frame, write_to, key)
    assert caught.value.number == (22 if key is None else 64)
    assert base.read_bytes() == before
    assert {path.name for path in held.iterdir()} == {
        "base.safetensors",
        "new.safetensors",
        "frame",
    }


def test_a_file_cut_under_the_reader_is_an_error_and_no_signal(
    held: Path, key: bytes | None, monkeypatch
) -> None:
    monkeypatch.setattr(FileSource, "PIECE_BYTES", 64)
    with open_frame(held / "frame", "cpu", key) as parsed:
        with (held / "frame").open("r+b") as file:
            file.truncate(100)
        with pytest.raises(FormatError, match="ends at byte 100"):
            bytes(parsed.blocks[-1].body)


def test_a_frame_replaced_by_rename_is_read_as_it_was(held: Path, key: bytes | None) -> None:
    with open_frame(held / "frame", "cpu", key) as parsed:
        bodies = [bytes(record.body) for record in parsed.blocks]
        (held / "other").write_bytes(b"another frame")
        (held / "other").rename(held / "frame")
        assert [bytes(record.body) for record in parsed.blocks] == bodies


def test_frames_in_files_apply(held: Path, key: bytes | None, monkeypatch) -> None:
    monkeypatch.setattr(FileSource, "PIECE_BYTES", 100)
    base, frame, out = held / "base.safetensors", held / "frame", held / "out.safetensors"
    apply_checkpoint(base, frame, out, backend="cpu", key=key)
    apply_checkpoint_in_place(base, str(frame), backend="cpu", key=key)
    for path in (base, out):
        assert_bits_equal(read(path), read(held / "new.safetensors"))


PEAK = """
import json, re, sys
import numpy as np
import gymfast.delta as delta
from gymfast.cli import main
from gymfast.delta import checkpoint
def field(name):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(name + r":\\s+(\\d+)", file.read())[1])
warm = {"warm": np.ones(9)}
delta.apply({}, delta.encode(None, warm, threads=1), threads=1)
first = field("VmHWM")
assert main(sys.argv[1:]) == 0
print(json.dumps(field("VmHWM") - first))
"""
SIZE = 320 * MIB
MOST = 128 * MIB  # windows, the scratch of a thread, and what a journal plays at a time


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Checkpoints of 320 MiB, a frame between them that is as large, and a key."""
    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    for name in ("old", "new"):
        path = folder / f"{name}.safetensors"
        tensors = {f"t{i}": rng.integers(0, 256, SIZE // 4, np.uint8) for i in range(4)}
        write(path, {n: delta.as_tensor(t, n) for n, t in tensors.items()})
    (folder / "key").write_bytes(KEY)
    names = ("old.safetensors", "new.safetensors")
    run_cli(folder, "delta", "encode", *names, "-o", "frame", "--key-file", "key")
    assert (folder / "frame").stat().st_size >= SIZE
    return folder


def run_cli(folder: Path, *args: str) -> int:
    """Bytes that the peak of a process of its own rises by while it runs a command."""
    command = [sys.executable, "-c", PEAK, *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.splitlines()[-1])


@linux
@pytest.mark.parametrize("with_key", [False, True], ids=["plain", "authenticated"])
@pytest.mark.parametrize(
    "call",
    [
        ("apply", "old.safetensors", "frame", "-o", "out.safetensors", "--force"),
        ("apply", "copy.safetensors", "frame", "--in-place"),
        ("verify", "frame"),
        ("inspect", "frame"),
        ("inspect", "frame", "--bytes"),
    ],
    ids=" ".join,
)
def test_no_command_takes_memory_for_the_whole_frame(
    call: tuple[str, ...], with_key: bool, large: Path
) -> None:
    if call[0] == "inspect" and with_key:
        return  # it takes no key
    (large / "copy.safetensors").write_bytes((large / "old.safetensors").read_bytes())
    options = ("--key-file", "key") if with_key else ()
    options += () if call[0] == "inspect" else ("--threads", "1")
    assert run_cli(large, "delta", *call, *options) <= MOST
