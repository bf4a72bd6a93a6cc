"""Bad input to `gymfast delta`: one clear message, the right exit code, and no output file."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_commands import Gymfast, Result
from safetensors.numpy import load_file, save_file

OUT = "out.safetensors"


def assert_refused(result: Result, code: int, *words: str, out: str | Path = OUT) -> None:
    """The exit code, one line that has all words, and nothing left at `out` or beside it."""
    assert result.code == code, result
    message = result.err.split("Error: ")[1].strip()
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message, result
    assert not os.path.lexists(out)
    left = [p.name for p in Path().rglob("*") if ".gymfast-" in p.name or ".tmp" in p.name]
    assert left == []


def truncated(frame: bytes) -> bytes:
    return frame[: len(frame) // 2]


def flipped(frame: bytes) -> bytes:
    return frame[:200] + bytes([frame[200] ^ 8]) + frame[201:]


def extended(frame: bytes) -> bytes:
    return frame + b"x"


def without_start(frame: bytes) -> bytes:
    return frame[1:]


def empty(frame: bytes) -> bytes:
    return b""


def newer(frame: bytes) -> bytes:
    return frame[:7] + b"\x02" + frame[8:]


@pytest.mark.parametrize("call", ["apply", "inspect", "verify"])
@pytest.mark.parametrize(
    "damage", [truncated, flipped, extended, without_start, empty, newer], ids=lambda f: f.__name__
)
def test_a_damaged_frame_is_refused(
    damage: Callable[[bytes], bytes], call: str, frame: Path, gymfast: Gymfast
) -> None:
    frame.write_bytes(damage(frame.read_bytes()))
    words = {
        "apply": ("delta", "apply", "old.safetensors", frame, "-o", OUT),
        "inspect": ("delta", "inspect", frame),
        "verify": ("delta", "verify", frame),
    }[call]
    before = Path("old.safetensors").read_bytes()
    assert_refused(gymfast(*words), 3)
    assert Path("old.safetensors").read_bytes() == before


def test_I31_the_wrong_base_is_refused_before_any_write(frame: Path, gymfast: Gymfast) -> None:
    base = load_file("old.safetensors")
    base["embed.weight"][5, 5] ^= 1
    save_file(base, "wrong.safetensors")
    before = Path("wrong.safetensors").read_bytes()
    assert_refused(gymfast("delta", "apply", "wrong.safetensors", frame, "-o", OUT), 3, "embed")
    assert_refused(gymfast("delta", "apply", "wrong.safetensors", frame, "--in-place"), 3, "embed")
    assert Path("wrong.safetensors").read_bytes() == before


def test_a_base_of_another_dtype_is_refused(frame: Path, gymfast: Gymfast) -> None:
    base = load_file("old.safetensors")
    base["embed.weight"] = base["embed.weight"].view(np.int16)
    save_file(base, "wrong.safetensors")
    result = gymfast("delta", "apply", "wrong.safetensors", frame, "-o", OUT)
    assert_refused(result, 3, "embed.weight", "I16", "U16")


def test_missing_and_unknown_tensors_are_refused_by_name(frame: Path, gymfast: Gymfast) -> None:
    base = load_file("old.safetensors")
    base["embed.weights"] = base.pop("embed.weight")
    save_file(base, "wrong.safetensors")
    result = gymfast("delta", "apply", "wrong.safetensors", frame, "-o", OUT)
    assert_refused(result, 3, "embed.weight", "embed.weights")


@pytest.mark.parametrize("is_forced", [False, True])
def test_an_output_that_exists_needs_force(is_forced: bool, frame: Path, gymfast: Gymfast) -> None:
    force = ["--force"] if is_forced else []
    Path(OUT).write_bytes(b"precious")
    calls = [
        ("delta", "apply", "old.safetensors", frame, "-o", OUT, *force),
        ("delta", "encode", "old.safetensors", "new.safetensors", "-o", OUT, *force),
    ]
    for call in calls:
        result = gymfast(*call)
        assert result.code == (0 if is_forced else 1), result
        if not is_forced:
            assert OUT in result.err
            assert "--force" in result.err
            assert Path(OUT).read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["old.safetensors", "./old.safetensors", "link.safetensors"])
def test_an_output_that_is_an_input_is_refused_even_with_force(
    name: str, frame: Path, gymfast: Gymfast
) -> None:
    Path("link.safetensors").symlink_to("old.safetensors")
    before = Path("old.safetensors").read_bytes()
    result = gymfast("delta", "apply", "old.safetensors", frame, "-o", name, "--force")
    assert result.code == 1
    assert "--in-place" in result.err
    result = gymfast("delta", "encode", "old.safetensors", "new.safetensors", "-o", name, "--force")
    assert result.code == 1
    assert Path("old.safetensors").read_bytes() == before


def test_neither_or_both_of_out_and_in_place_is_a_usage_error(
    frame: Path, gymfast: Gymfast
) -> None:
    assert gymfast("delta", "apply", "old.safetensors", frame).code == 2
    both = gymfast("delta", "apply", "old.safetensors", frame, "-o", OUT, "--in-place")
    assert_refused(both, 2, "--in-place")


def test_a_missing_file_is_a_usage_error(files: Path, gymfast: Gymfast) -> None:
    assert_refused(gymfast("delta", "inspect", "nothing.gfd"), 2, "nothing.gfd")


def test_an_output_directory_that_is_not_empty_is_refused(frame: Path, gymfast: Gymfast) -> None:
    result = gymfast("delta", "apply", "old", frame, "-o", "new")
    assert_refused(result, 1, "new", "not empty", "--force")
    Path("empty").mkdir()
    assert gymfast("delta", "apply", "old", frame, "-o", "empty").code == 0


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "forced"])
def test_an_output_of_another_sort_is_refused_before_anything_is_read(
    force: tuple[str, ...], frame: Path, gymfast: Gymfast, monkeypatch
) -> None:
    Path("file").write_bytes(b"mine")
    Path("empty").mkdir()
    Path("empty.safetensors").mkdir()
    Path("link").symlink_to("empty")
    Path("dangling").symlink_to("nowhere")
    for name in ("apply_checkpoint", "encode_checkpoint"):
        monkeypatch.setattr(f"gymfast.delta.checkpoint.{name}", None)
    for call, words in (
        (("apply", "old", frame, "-o", "file"), "not a directory, and the output is one"),
        (("apply", "old", frame, "-o", "link"), "not a directory"),
        (("apply", "old", frame, "-o", "dangling"), "not a directory"),
        (("apply", "old.safetensors", frame, "-o", "empty.safetensors"), "the output is a file"),
        (("encode", "old", "new", "-o", "empty"), "the output is a file"),
        (("encode", "old", "new", "-o", "new"), "is NEW itself"),
    ):
        result = gymfast("delta", *call, *force)
        assert_refused(result, 1, words, str(call[-1]))
    assert Path("file").read_bytes() == b"mine"


def test_an_output_that_could_not_be_read_again_is_refused(frame: Path, gymfast: Gymfast) -> None:
    result = gymfast("delta", "apply", "old.safetensors", frame, "-o", "out.bin")
    assert_refused(result, 2, "out.bin", ".safetensors", out="out.bin")


def test_a_missing_folder_of_the_output_is_named(frame: Path, gymfast: Gymfast) -> None:
    result = gymfast("delta", "apply", "old.safetensors", frame, "-o", "no/where/out.safetensors")
    assert_refused(result, 1, "no/where")


def test_an_unreadable_file_is_named(frame: Path, gymfast: Gymfast) -> None:
    """Reading /proc/self/mem at 0 is an EIO, for root too."""
    Path("bad.gfd").symlink_to("/proc/self/mem")
    assert_refused(gymfast("delta", "inspect", "bad.gfd"), 1, "Input/output error")
    result = gymfast("delta", "apply", "bad.gfd", frame, "-o", OUT)
    assert_refused(result, 1, "Input/output error")


def test_a_directory_without_index_is_refused(frame: Path, gymfast: Gymfast) -> None:
    Path("empty").mkdir()
    result = gymfast("delta", "apply", "empty", frame, "-o", OUT)
    assert_refused(result, 5, "empty", "model.safetensors.index.json")
    assert_refused(gymfast("delta", "inspect", "empty"), 2, "directory")


def test_an_index_that_names_a_missing_shard_is_refused(frame: Path, gymfast: Gymfast) -> None:
    Path("old/model-00002-of-00002.safetensors").unlink()
    result = gymfast("delta", "apply", "old", frame, "-o", OUT)
    assert result.code == 5
    assert "model-00002-of-00002.safetensors" in result.err
    assert not Path(OUT).exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_I83_an_index_that_leads_outside_is_refused(
    name: str, frame: Path, gymfast: Gymfast
) -> None:
    index = Path("old/model.safetensors.index.json")
    content = json.loads(index.read_text())
    content["weight_map"]["embed.weight"] = name
    index.write_text(json.dumps(content))
    assert_refused(gymfast("delta", "apply", "old", frame, "-o", OUT), 3)


@pytest.mark.parametrize("index", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_refused(index: str, frame: Path, gymfast: Gymfast) -> None:
    Path("old/model.safetensors.index.json").write_text(index)
    assert_refused(gymfast("delta", "apply", "old", frame, "-o", OUT), 3, "index.json")


@pytest.mark.parametrize("size", [0, 4, 8, 100, 5000])
def test_a_truncated_checkpoint_is_refused(size: int, frame: Path, gymfast: Gymfast) -> None:
    Path("cut.safetensors").write_bytes(Path("old.safetensors").read_bytes()[:size])
    result = gymfast("delta", "apply", "cut.safetensors", frame, "-o", OUT)
    assert_refused(result, 3, "cut.safetensors")


# Unpickling this calls posix.mkdir("exploded").
PICKLE = b"\x80\x02cposix\nmkdir\nX\x08\x00\x00\x00exploded\x85R."


def torch_zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", PICKLE)
    return stream.getvalue()


@pytest.mark.parametrize("content", [PICKLE, torch_zip()], ids=["pickle", "zip"])
def test_I80_R114_a_pickle_is_refused_unread(content: bytes, frame: Path, gymfast: Gymfast) -> None:
    Path("model.bin").write_bytes(content)
    calls = [
        ("delta", "inspect", "model.bin"),
        ("delta", "inspect", "model.bin", "--bytes"),
        ("delta", "verify", "model.bin"),
        ("delta", "verify", frame, "--base", "model.bin"),
        ("delta", "apply", "model.bin", frame, "-o", OUT),
        ("delta", "apply", "old.safetensors", "model.bin", "-o", OUT),
        ("delta", "encode", "model.bin", "new.safetensors", "-o", OUT),
        ("delta", "encode", "old.safetensors", "model.bin", "-o", OUT),
    ]
    for call in calls:
        assert_refused(gymfast(*call), 3, "model.bin", "torch.save", "safetensors")
    Path("torch").mkdir()
    Path("torch/pytorch_model.bin").write_bytes(content)
    result = gymfast("delta", "apply", "torch", frame, "-o", OUT)
    assert_refused(result, 5, "pytorch_model.bin", "safetensors")
    assert not Path("exploded").exists()


def test_swapped_arguments_are_told(frame: Path, gymfast: Gymfast) -> None:
    result = gymfast("delta", "apply", frame, "old.safetensors", "-o", OUT)
    assert_refused(result, 3, "old.safetensors", "looks like a safetensors file")
    result = gymfast("delta", "encode", frame, "new.safetensors", "-o", OUT)
    assert_refused(result, 3, "step.gfd", "looks like a frame")


def test_I25_a_full_disk_is_one_error_and_leaves_nothing(
    frame: Path, small_disk: Path, gymfast: Gymfast
) -> None:
    rng = np.random.default_rng(0)
    big = {"a": rng.integers(0, 2**16, (256, 1024), dtype=np.uint16)}
    save_file(big, "big.safetensors")
    save_file({"a": big["a"] ^ 0x5555}, "other.safetensors")
    assert gymfast("delta", "encode", "big.safetensors", "other.safetensors", "-o", "f").code == 0
    out = small_disk / "out.safetensors"
    for call in (
        ("delta", "encode", "big.safetensors", "other.safetensors", "-o", out),
        ("delta", "apply", "big.safetensors", "f", "-o", out),
    ):
        result = gymfast(*call)
        assert result.code in (1, 7), result
        assert "space" in result.err or "65536 free" in result.err
        assert list(small_disk.iterdir()) == []


def test_I25_a_full_disk_stops_an_update_in_place_before_the_first_write(
    frame: Path, small_disk: Path, gymfast: Gymfast
) -> None:
    rng = np.random.default_rng(0)
    before = {"a": rng.integers(0, 2**16, 20_000, dtype=np.uint16)}
    save_file(before, small_disk / "base.safetensors")
    save_file({"a": before["a"] ^ 0x5555}, "other.safetensors")
    base = small_disk / "base.safetensors"
    assert gymfast("delta", "encode", base, "other.safetensors", "-o", "f").code == 0
    content = base.read_bytes()
    result = gymfast("delta", "apply", base, "f", "--in-place")
    assert result.code in (1, 7), result
    assert "No space left" in result.err
    assert base.read_bytes() == content
    assert list(small_disk.iterdir()) == [base]
