"""Damaged and hostile version directories: one clear error each, and nothing read too far."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from delta_checkpoints import entry, raw
from hf_delta_data import CHAINS, digest, golden_chain, version_of, write_file, write_index

from gymfast.delta.hf_delta.digests import new_hasher
from gymfast.delta.hf_delta.patch import open_patch
from gymfast.delta.hf_delta.version import StoredTensor, open_version
from gymfast.delta.hf_delta.zstd_frame import load_zstd
from gymfast.errors import ChainError, FormatError, GymfastError, MissingDependencyError

FILE = "model-00000-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
NUM_BYTES = 1000
OLD = np.arange(NUM_BYTES, dtype=np.uint32).astype(np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound version 7 with the tensor `w`."""
    path = tmp_path / "weight_v000007"
    path.mkdir()
    put(path, zstandard.compress(bytes(NUM_BYTES), 1))
    return path


def put(path: Path, frame: bytes, encoding: str = "xor", digests: object = None) -> None:
    digests = {"w": digest("xxh3-128", OLD.tobytes())} if digests is None else digests
    write_file(path / FILE, {"w": frame}, digests)
    write_index(path, 7, {"w": FILE}, encoding, "xxh3-128")


def apply(path: Path, num_bytes: int = NUM_BYTES, window_bytes: int = 300) -> np.ndarray:
    version = open_version(path)
    assert version is not None
    with version:
        data = np.resize(OLD, num_bytes).copy()
        patch = open_patch(version, version.tensors["w"], num_bytes)
        for start in range(0, num_bytes, window_bytes):
            window = data[start : start + window_bytes]
            patch.apply(window, window, start)
        patch.finish()
    return data


def edit_index(path: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(index))


def set_metadata(key: str, value: object) -> Callable[[dict], object]:
    return lambda index: index["metadata"].update({key: value})


def test_the_sound_version_is_read(path: Path) -> None:
    assert np.array_equal(apply(path), OLD)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (set_metadata("version", "000008"), ChainError, "version 8, but the directory is weight"),
        (set_metadata("version", "seven"), FormatError, "version is 'seven', expected digits"),
        (set_metadata("version", None), FormatError, "version is None, expected digits"),
        (set_metadata("version", -7), FormatError, "version is -7, expected digits"),
        (set_metadata("version", "9" * 19), FormatError, "expected digits"),
        (set_metadata("base_version", "000005"), ChainError, "builds on 5, expected 6"),
        (set_metadata("delta_encoding", "add"), FormatError, "is 'add', expected xor or overw"),
        (set_metadata("delta_encoding", None), FormatError, "is None, expected xor or overwrite"),
        (set_metadata("compression_format", "lz4"), FormatError, "is 'lz4', expected zstd"),
        (set_metadata("checksum_format", "md5"), FormatError, "is 'md5', expected xxh3-128 or b"),
        (lambda i: i["metadata"].pop("checksum_format"), FormatError, "is None, expected xxh3"),
        (lambda i: i.update(metadata=[]), FormatError, "'metadata' is no table"),
        (lambda i: i.update(weight_map=[]), FormatError, "no table 'weight_map'"),
        (lambda i: i.update(weight_map={}), FormatError, "'w' of model-.* is not named"),
        (lambda i: i["weight_map"].update(w="../x.safetensors"), FormatError, "which is not ther"),
        (lambda i: i["weight_map"].update(w=3), FormatError, "is in 3, which is not there"),
        (lambda i: i["weight_map"].update(v=FILE), FormatError, "'v' is not in model-00000"),
    ],
)
def test_a_wrong_index_is_refused(path: Path, change, kind, text: str) -> None:
    edit_index(path, change)
    with pytest.raises(kind, match=text) as error:
        open_version(path)
    assert str(path) in str(error.value)


def test_numbers_without_quotes_are_read_as_the_stock_code_does(path: Path) -> None:
    edit_index(path, lambda index: index["metadata"].update(version=7, base_version=6))
    assert np.array_equal(apply(path), OLD)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a":1,"a":2}', "\xff", '{"metadata":NaN}'])
def test_an_index_that_is_no_table_is_refused(path: Path, text: str) -> None:
    (path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=INDEX):
        open_version(path)


def test_an_index_beyond_the_limit_is_not_read(path: Path) -> None:
    with (path / INDEX).open("r+b") as file:
        file.truncate(100_000_001)
    with pytest.raises(FormatError, match="100000001 bytes, limit 100000000"):
        open_version(path)


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (entry(0, 8, "F32", [2]), "F32 of shape"),
        (entry(0, 8, "U8", [2, 4]), r"of shape \[2, 4\], expected one row"),
        (entry(0, 0, "U8", [0]), r"of shape \[0\], expected one row"),
    ],
)
def test_a_tensor_that_cannot_be_a_frame_is_refused(path: Path, stored, text: str) -> None:
    raw(path / FILE, {"w": stored}, bytes(stored["data_offsets"][1]))
    with pytest.raises(FormatError, match=text):
        open_version(path)


@pytest.mark.parametrize(
    ("digests", "text"),
    [
        ({}, "no digest, expected 32"),
        ({"w": "ab"}, "digest 'ab', expected 32"),
        ({"w": "AB" * 16}, "expected 32 lower-case"),
        ({"w": "xy" * 16}, "expected 32 lower-case"),
    ],
)
def test_a_missing_or_impossible_digest_is_refused(path: Path, digests, text: str) -> None:
    put(path, b"frame", digests=digests)
    with pytest.raises(FormatError, match=text):
        open_version(path)


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 100, -1])
def test_a_file_that_is_cut_off_is_refused(path: Path, num_bytes: int) -> None:
    """reports.md R49."""
    whole = (path / FILE).read_bytes()
    (path / FILE).write_bytes(whole[:num_bytes])
    with pytest.raises(FormatError, match="truncated"):
        open_version(path)


def test_links_out_of_the_directory_and_pipes_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes((path / FILE).read_bytes())
    (path / FILE).unlink()
    (path / FILE).symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(FormatError, match="symbolic link"):
        open_version(path)
    (path / FILE).unlink()
    import os

    os.mkfifo(path / FILE)
    with pytest.raises(FormatError, match="not a regular file"):
        open_version(path)


def test_half_written_files_of_the_stock_writer_are_not_read(path: Path) -> None:
    (path / (FILE + ".tmp")).write_bytes(b"half")
    assert np.array_equal(apply(path), OLD)


def compress(data: bytes, **options) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"\0" * 40, "no sound zstd frame"),
        (compress(bytes(NUM_BYTES))[:-3], "no sound zstd frame"),
        (compress(bytes(NUM_BYTES)) + b"x", "1 bytes follow it"),
        (compress(bytes(NUM_BYTES)) * 2, "bytes follow it"),
        (compress(bytes(NUM_BYTES - 1)), "999 bytes of content, but the tensor has 1000"),
        (compress(bytes(NUM_BYTES + 1)), "1001 bytes of content, but the tensor has 1000"),
        (compress(bytes(NUM_BYTES - 1), write_content_size=False), "ends 1 bytes too early"),
        (compress(bytes(NUM_BYTES + 1), write_content_size=False), "more content than the tens"),
        (struct.pack("<IBIQ", 0xFD2FB528, 0xE3, 77, NUM_BYTES), "needs dictionary 77"),
        (struct.pack("<II", 0x184D2A50, 4) + b"skip", "0 bytes of content|no sound zstd frame"),
    ],
)
def test_an_unsound_xor_frame_is_refused(path: Path, frame: bytes, text: str) -> None:
    put(path, frame)
    with pytest.raises(FormatError, match=text) as error:
        apply(path)
    assert f"{path / FILE}: tensor 'w'" in str(error.value)


def overwrite(positions: list[int], num_values: int | None = None, count: int | None = None):
    count = len(positions) if count is None else count
    num_values = len(positions) if num_values is None else num_values
    at = np.array(positions, np.uint64).astype("<u4")
    return struct.pack("<I", count) + at.tobytes() + b"\xee" * num_values


@pytest.mark.parametrize("has_size", [True, False])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\1\0", "too early|2 bytes of content"),
        (overwrite([3, 5], num_values=1), "positions need 14|too early"),
        (overwrite([3, 5], num_values=3), "positions need 14|more content"),
        (overwrite([3], count=NUM_BYTES + 1), "1001 positions, the tensor has 1000"),
        (overwrite([5, 5]), "position 5 is not above the one before it"),
        (overwrite([5, 3]), "position 3 is not above the one before it"),
        (overwrite([5, NUM_BYTES]), "position 1000 is not above"),
        (overwrite([2**32 - 1]), "position 4294967295 is not above"),
    ],
)
def test_an_unsound_overwrite_is_refused(path, content: bytes, text: str, has_size: bool) -> None:
    put(path, compress(content, write_content_size=has_size), "overwrite")
    with pytest.raises(FormatError, match=text):
        apply(path)


def test_positions_beyond_4_gib_that_a_writer_cut_to_32_bits_are_understood(path: Path) -> None:
    """gym.md 2.7: slime's writer takes them modulo 2^32, and its own reader fails on them."""
    real = [5, 2**31, 2**32 + 4, 2**32 + 99, 2 * 2**32 + 1, 2 * 2**32 + 2**31]
    num_bytes = 3 * 2**32
    put(path, compress(overwrite(real)), "overwrite")
    version = open_version(path)
    assert version is not None
    with version:
        patch = open_patch(version, version.tensors["w"], num_bytes)
        for at in real:  # windows at and beside the positions, not 12 GiB of them
            window = np.zeros(16, np.uint8)
            patch.apply(np.zeros(16, np.uint8), window, at - 4)
            assert list(np.flatnonzero(window)) == [p - at + 4 for p in real if 0 <= p - at < 12]
        patch.finish()


def test_a_frame_whose_window_is_huge_is_not_allocated(path: Path) -> None:
    """A window of 2 GiB in the header, for a content of 1000 bytes."""
    magic, descriptor, window = b"\x28\xb5\x2f\xfd", b"\x40", bytes([(31 - 10) << 3])
    put(path, magic + descriptor + window + struct.pack("<H", NUM_BYTES - 256) + b"\x01\0\0")
    with pytest.raises(FormatError, match="no sound zstd frame"):
        apply(path)


@pytest.mark.parametrize("name", CHAINS)
def test_no_flipped_bit_of_a_golden_version_goes_unnoticed(name: str, tmp_path: Path) -> None:
    """Header, frames and digests: an error, or exactly the tensors that are meant."""
    source = version_of(golden_chain(name), 1)
    path = tmp_path / source.name
    path.mkdir()
    (path / INDEX).write_bytes((source / INDEX).read_bytes())
    whole = (source / FILE).read_bytes()
    meant = stored_of(source)
    num_noticed = 0
    for bit in range(0, 8 * len(whole), 41):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / FILE).write_bytes(damaged)
        try:
            found = stored_of(path)
        except GymfastError:
            num_noticed += 1
            continue
        num_noticed += found != meant
    assert num_noticed > 0.95 * len(range(0, 8 * len(whole), 41))


def stored_of(path: Path) -> dict[str, tuple[StoredTensor, bytes]]:
    version = open_version(path)
    assert version is not None
    with version:
        blob = version.shards[0].path.read_bytes()
        return {
            t.name: (t, blob[t.start : t.start + t.num_bytes]) for t in version.tensors.values()
        }


def test_a_missing_package_names_the_extra(monkeypatch) -> None:
    import sys

    for name in ("backports", "backports.zstd", "compression", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"install gymfast\[interop\]"):
        load_zstd()
    for algorithm, package in (("xxh3-128", "xxhash"), ("blake3", "blake3")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingDependencyError, match=rf"{package}.*gymfast\[interop\]"):
            new_hasher(algorithm)
    with pytest.raises(ValueError, match="digest 'md5' is unknown"):
        new_hasher("md5")
