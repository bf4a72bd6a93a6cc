"""`gymfast delta` from end to end: files and sharded directories, exact results, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_commands import Gymfast
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

PAIRS = [("old.safetensors", "new.safetensors"), ("old", "new")]
OUT = {"old.safetensors": "out.safetensors", "old": "out"}


def read(path: Path) -> dict[str, bytes]:
    """Bits of all tensors of a file or directory."""
    shards = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {n: t.tobytes() for shard in shards for n, t in load_file(shard).items()}


@pytest.mark.parametrize("profile", ["fast", "small", "auto"])
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_encode_then_apply_is_exact(
    old: str, new: str, profile: str, files: Path, gymfast: Gymfast
) -> None:
    encoded = gymfast("delta", "encode", old, new, "-o", "f.gfd", "--profile", profile, "--json")
    assert encoded.code == 0, encoded
    assert encoded.json["schema"] == "gymfast.delta.encode/1"
    assert encoded.json["frame_bytes"] == (files / "f.gfd").stat().st_size
    applied = gymfast("delta", "apply", old, "f.gfd", "-o", OUT[old], "--json")
    assert applied.code == 0, applied
    assert read(files / OUT[old]) == read(files / new)
    assert gymfast("delta", "verify", "f.gfd", "--base", old, "--result", OUT[old]).code == 0


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_apply_in_place_is_exact_and_twice_is_once(
    old: str, new: str, files: Path, gymfast: Gymfast
) -> None:
    assert gymfast("delta", "encode", old, new, "-o", "f.gfd").code == 0
    changed = ["embed.weight", "layers.0.up.weight"]
    for skipped in ([], changed):
        result = gymfast("delta", "apply", old, "f.gfd", "--in-place", "--json")
        assert result.code == 0, result
        assert read(files / old) == read(files / new)
        assert sorted(result.json["skipped"]) == skipped
        assert (result.json["num_changed"] == 0) == bool(skipped)


def test_a_frame_between_layouts_is_the_same(files: Path, gymfast: Gymfast) -> None:
    gymfast("delta", "encode", "old.safetensors", "new", "-o", "a.gfd")
    gymfast("delta", "encode", "old", "new.safetensors", "-o", "b.gfd")
    roots = [gymfast("delta", "inspect", f, "--json").json["new_root"] for f in ("a.gfd", "b.gfd")]
    assert roots[0] == roots[1]


def test_added_removed_and_replaced_tensors(files: Path, gymfast: Gymfast) -> None:
    new = load_file("new.safetensors")
    del new["layers.0.ids"]
    new["layers.1.up.weight"] = np.ones((4, 4), np.float32)
    new["layers.0.scale"] = np.array([0.5], np.float32)
    save_file(new, "newer.safetensors")
    assert gymfast("delta", "encode", "old.safetensors", "newer.safetensors", "-o", "f").code == 0
    result = gymfast("delta", "apply", "old.safetensors", "f", "-o", "out.safetensors", "--json")
    assert result.json["added"] == ["layers.1.up.weight"]
    assert result.json["removed"] == ["layers.0.ids"]
    assert result.json["replaced"] == ["layers.0.scale"]
    assert read(files / "out.safetensors") == read(files / "newer.safetensors")


def test_metadata_of_a_checkpoint_file_survives(files: Path, gymfast: Gymfast) -> None:
    save_file(load_file("old.safetensors"), "old.safetensors", metadata={"format": "pt"})
    gymfast("delta", "encode", "old.safetensors", "new.safetensors", "-o", "f")
    assert gymfast("delta", "apply", "old.safetensors", "f", "-o", "out.safetensors").code == 0
    with safe_open("out.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_other_files_of_a_checkpoint_directory_survive(files: Path, gymfast: Gymfast) -> None:
    gymfast("delta", "encode", "old", "new", "-o", "f")
    assert gymfast("delta", "apply", "old", "f", "-o", "out").code == 0
    assert (files / "out" / "config.json").read_text() == "{}"


def test_force_replaces_a_checkpoint_directory(files: Path, gymfast: Gymfast) -> None:
    assert gymfast("delta", "encode", "old", "new", "-o", "step.gfd").code == 0
    call = ("delta", "apply", "old", "step.gfd", "-o", "out")
    assert gymfast(*call).code == 0
    assert gymfast(*call).code == 1
    before = {path.name for path in Path().iterdir()}
    assert gymfast(*call, "--force").code == 0
    assert read(Path("out")) == read(Path("new"))
    assert {path.name for path in Path().iterdir()} == before
    Path("out/notes.txt").write_text("mine")
    result = gymfast(*call, "--force")
    assert result.code == 1
    assert "notes.txt" in result.err
    assert Path("out/notes.txt").read_text() == "mine"


def test_threads_and_tiling_change_no_result(files: Path, gymfast: Gymfast) -> None:
    call = ("delta", "encode", "old.safetensors", "new.safetensors", "-o")
    assert gymfast(*call, "1.gfd", "--threads", "1").code == 0
    assert gymfast(*call, "2.gfd", "--threads", "2").code == 0
    assert gymfast(*call, "t.gfd", "--tiled").code == 0
    assert (files / "1.gfd").read_bytes() == (files / "2.gfd").read_bytes()
    assert gymfast("delta", "apply", "old.safetensors", "t.gfd", "-o", "out.safetensors").code == 0
    assert read(files / "out.safetensors") == read(files / "new.safetensors")


def test_inspect_tells_every_tensor(frame: Path, gymfast: Gymfast) -> None:
    info = gymfast("delta", "inspect", frame, "--json").json
    weights = load_file("new.safetensors")
    assert {t["name"]: tuple(t["shape"]) for t in info["tensors"]} == {
        name: value.shape for name, value in weights.items()
    }
    status = {t["name"]: t["status"] for t in info["tensors"]}
    assert status["embed.weight"] == "changed"
    assert status["layers.0.ids"] == "unchanged"
    text = gymfast("delta", "inspect", frame).out
    assert all(name in text for name in weights)


@pytest.mark.parametrize("profile", ["fast", "small", "auto"])
def test_inspect_bytes_covers_every_byte_once(profile: str, files: Path, gymfast: Gymfast) -> None:
    gymfast("delta", "encode", "old", "new", "-o", "f.gfd", "--profile", profile)
    lines = gymfast("delta", "inspect", "f.gfd", "--bytes", "--json").out.splitlines()
    position = 0
    for field in map(json.loads, lines):
        assert field["schema"] == "gymfast.delta.inspect/1"
        assert field["offset"] == position
        position += field["size"]
    assert position == (files / "f.gfd").stat().st_size
    text = gymfast("delta", "inspect", "f.gfd", "--bytes").out
    assert "SECTION: 4 END" in text
    assert "bytes without a meaning" not in text


def test_inspect_bytes_shows_a_cut_frame_up_to_the_cut(frame: Path, gymfast: Gymfast) -> None:
    frame.write_bytes(frame.read_bytes()[:100])
    result = gymfast("delta", "inspect", frame, "--bytes")
    assert result.code == 3
    assert "num_tensors: 5" in result.out
    assert "cut" in result.err


def test_verify_names_the_first_tensor_that_differs(frame: Path, gymfast: Gymfast) -> None:
    weights = load_file("old.safetensors")
    weights["layers.0.ids"][3] ^= 4
    save_file(weights, "wrong.safetensors")
    result = gymfast("delta", "verify", frame, "--base", "wrong.safetensors", "--json")
    assert result.code == 3
    assert result.json["error"]["number"] == 60
    assert "layers.0.ids" in result.err
    swapped = gymfast("delta", "verify", frame, "--result", "old.safetensors", "--json")
    assert swapped.json["error"]["number"] == 61
