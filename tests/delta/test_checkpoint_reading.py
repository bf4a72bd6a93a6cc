"""Checkpoints are read with strict limits: one clear error for what is damaged or hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from delta_checkpoints import entry, frame_of, raw, read, write, write_sharded
from delta_weights import small_pair
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import gymfast.delta as delta
from gymfast.delta import Tensor
from gymfast.delta.checkpoint import (
    Checkpoint,
    apply_checkpoint,
    apply_checkpoint_in_place,
)
from gymfast.errors import (
    FormatError,
    GymfastError,
    NotFoundError,
)
from gymfast.testing.compare import assert_bits_equal


def test_files_of_the_safetensors_library_are_read_and_written_for_it(tmp_path: Path) -> None:
    weights = {"a": np.arange(12.0).reshape(3, 4), "b": np.array(2, np.float32), "c": np.ones(0)}
    path = tmp_path / "w.safetensors"
    save_file(weights, path, metadata={"k": "v"})
    assert_bits_equal(read(path), weights)
    new = tmp_path / "new.safetensors"
    save_file({name: np.array(value + 1) for name, value in weights.items()}, new)
    apply_checkpoint(path, frame_of(path, new), tmp_path / "out.safetensors", backend="cpu")
    assert_bits_equal(load_file(tmp_path / "out.safetensors"), load_file(new))
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        assert file.metadata() == {"k": "v"}


BAD_HEADERS = {
    "no table": (b"[]", b"", "expected '{'"),
    "not JSON": (b'{"a":', b"", "no valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "no valid JSON"),
    "deep nesting": (b'{"a":' + b"[" * 200_000, b"", "no valid JSON"),
    "huge number": (b'{"a":' + b"9" * 5000 + b"}", b"", "no valid JSON"),
    "not a number": (b'{"a":NaN}', b"", "no JSON value"),
    "duplicate name": (b'{"a":1,"a":2}', b"", "'a' occurs twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "no fields": ({"a": {}}, b"", "other fields"),
    "extra field": ({"a": entry(0, 1) | {"x": 1}}, b"x", "other fields"),
    "unknown dtype": ({"a": entry(0, 1, "Q8")}, b"x", "dtype 'Q8' is unknown"),
    "dtype is a list": ({"a": entry(0, 1) | {"dtype": []}}, b"x", "is unknown"),
    "negative dim": ({"a": entry(0, 1, "U8", [-1])}, b"x", "expected up to 32 counts"),
    "float dim": ({"a": entry(0, 1, "U8", [1.0])}, b"x", "expected up to 32 counts"),
    "true dim": ({"a": entry(0, 1, "U8", [True])}, b"x", "expected up to 32 counts"),
    "too many dims": ({"a": entry(0, 1, "U8", [1] * 33)}, b"x", "expected up to 32 counts"),
    "overflow": ({"a": entry(0, 1, "F64", [2**61, 2**61])}, b"x", "above the limit"),
    "wrong size": ({"a": entry(0, 2, "U8", [3])}, b"xx", "has 3 bytes, its offsets give 2"),
    "backwards": ({"a": entry(2, 0, "U8", [0])}, b"xx", "its offsets give -2"),
    "hole": ({"a": entry(0, 1), "b": entry(2, 3)}, b"xxx", "hole before tensor 'b'"),
    "overlap": ({"a": entry(0, 2), "b": entry(1, 3)}, b"xxx", "overlap before tensor 'b'"),
    "start": ({"a": entry(1, 2)}, b"xx", "hole before tensor 'a'"),
    "trailing bytes": ({"a": entry(0, 1)}, b"xx", "bytes follow the last tensor"),
    "control character": ({"a\n": entry(0, 1)}, b"x", "control character"),
    "empty name": ({"": entry(0, 1)}, b"x", "0 bytes, expected 1..1024"),
    "lone surrogate": (b'{"\\ud800":{}}', b"", "not valid Unicode"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_I14_bad_headers_are_one_clear_error(case: str, tmp_path: Path) -> None:
    header, data, text = BAD_HEADERS[case]
    path = raw(tmp_path / "w.safetensors", header, data)
    with pytest.raises(FormatError) as error:
        Checkpoint.open(path)
    assert text in str(error.value)
    assert str(path) in str(error.value)


def test_I14_a_header_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little") + b"{}")
    with pytest.raises(FormatError, match="limit 100000000"):
        Checkpoint.open(path)


def test_I14_names_that_look_like_paths_are_names(tmp_path: Path) -> None:
    old = {"../../escape": Tensor("U8", (4,), np.arange(4, dtype=np.uint8))}
    base = write(tmp_path / "base.safetensors", old)
    new = {"../../escape": Tensor("U8", (4,), np.zeros(4, np.uint8))}
    out = tmp_path / "deep" / "out.safetensors"
    out.parent.mkdir()
    apply_checkpoint(base, delta.encode(old, new, backend="cpu"), out, backend="cpu")
    assert_bits_equal(read(out), new)
    assert {p.name for p in tmp_path.rglob("*")} == {"base.safetensors", "deep", "out.safetensors"}


@pytest.mark.parametrize("cut", ["0", "1", "8", "header", "header+1", "half", "size-1"])
def test_R49_a_truncated_file_is_one_error_with_both_sizes(cut: str, tmp_path: Path) -> None:
    old, new = small_pair()
    base = write(tmp_path / "base.safetensors", old)
    whole = base.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    size = {
        "header": header_bytes,
        "header+1": header_bytes + 1,
        "half": len(whole) // 2,
        "size-1": len(whole) - 1,
    }.get(cut) or int(cut)
    base.write_bytes(whole[:size])
    frame = delta.encode(old, new, backend="cpu")
    for use in (
        lambda: read(base),
        lambda: apply_checkpoint(base, frame, tmp_path / "out.safetensors", backend="cpu"),
        lambda: apply_checkpoint_in_place(base, frame, backend="cpu"),
    ):
        with pytest.raises(FormatError, match=rf"base\.safetensors: {size} bytes, expected") as e:
            use()
        assert str(len(whole)) in str(e.value) or size < header_bytes
    assert base.read_bytes() == whole[:size]
    assert [p.name for p in tmp_path.iterdir()] == ["base.safetensors"]


def test_R48_a_file_truncated_while_open_is_an_error_not_a_signal(tmp_path: Path) -> None:
    old, _ = small_pair()
    base = write(tmp_path / "base.safetensors", old)
    with Checkpoint.open(base) as checkpoint:
        os.truncate(base, base.stat().st_size - 30)
        with pytest.raises(FormatError, match=r"base\.safetensors: ends at byte \d+, expected at"):
            [checkpoint.read(name) for name in checkpoint.names]


@pytest.mark.parametrize(
    "file", ["../w.safetensors", "/etc/w.safetensors", "a/b.safetensors", "w.bin", ".w.safetensors",
             "..", "", "w\n.safetensors", "a\\b.safetensors", 3, None]
)  # fmt: skip
def test_I83_an_index_names_plain_files_only(file: object, tmp_path: Path) -> None:
    old, _ = small_pair()
    base = write_sharded(tmp_path / "base", old)
    write(tmp_path / "w.safetensors", {"embed": old["embed"]})
    index = base / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["embed"] = file
    index.write_text(json.dumps(table))
    with pytest.raises(FormatError, match="expected the plain name"):
        Checkpoint.open(base)


def test_I83_links_out_of_the_directory_are_refused_and_a_cache_is_not(tmp_path: Path) -> None:
    old, new = small_pair()
    base = write_sharded(tmp_path / "snapshots", old)
    rev = base / "rev"
    rev.mkdir()
    (tmp_path / "blobs").mkdir()
    for path in [p for p in base.iterdir() if p.is_file()]:
        (rev / path.name).symlink_to(path.rename(tmp_path / "blobs" / path.name))
    assert_bits_equal(read(rev), old)
    frame = delta.encode(old, new, backend="cpu")
    with pytest.raises(GymfastError, match="symbolic link, as in a download cache"):
        apply_checkpoint_in_place(rev, frame, backend="cpu")
    apply_checkpoint(rev, frame, tmp_path / "out", backend="cpu")
    assert_bits_equal(read(tmp_path / "out"), new)
    moved = (tmp_path / "blobs").rename(tmp_path / "elsewhere")
    for path in rev.iterdir():
        path.unlink()
        path.symlink_to(moved / path.name)
    with pytest.raises(FormatError, match="outside the checkpoint: refused"):
        Checkpoint.open(rev)


def test_an_index_and_its_shards_have_to_agree(tmp_path: Path) -> None:
    old, _ = small_pair()
    base = write_sharded(tmp_path / "base", old)
    index = base / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    first, second = sorted(set(table["weight_map"].values()))
    wrong = {
        "the index says": table["weight_map"] | {"embed": second},
        "in no shard": table["weight_map"] | {"more": first},
        "says nothing": {n: f for n, f in table["weight_map"].items() if n != "index"},
    }
    for text, weight_map in wrong.items():
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FormatError, match=text):
            Checkpoint.open(base)
    index.write_text('{"weight_map": {}}')
    with pytest.raises(FormatError, match="no table 'weight_map'"):
        Checkpoint.open(base)


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        Checkpoint.open(tmp_path / "missing")
    with pytest.raises(NotFoundError, match=r"no \*\.safetensors file"):
        Checkpoint.open(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        write(tmp_path / name, small_pair()[0])
    with pytest.raises(FormatError, match="name one file"):
        Checkpoint.open(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(FormatError, match="not a regular file"):
        Checkpoint.open(tmp_path / "pipe.safetensors")
    with pytest.raises(NotFoundError):
        apply_checkpoint_in_place(tmp_path / "missing", delta.encode(*small_pair()))
