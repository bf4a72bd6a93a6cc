"""The receiver of version directories: memory, threads, tensors and offsets beyond 4 GiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from delta_checkpoints import read, write_sharded
from delta_weights import changed, random_tensor
from hf_delta_data import write_file, write_index, write_version

from gymfast.delta.hf_delta import pull
from gymfast.delta.safetensors_header import build_header
from gymfast.errors import ChecksumError
from gymfast.testing.compare import assert_bits_equal

MIB = 2**20
PULL = """
import re, sys
from gymfast.delta.hf_delta import pull
from gymfast.delta.hf_delta.digests import new_hasher
from gymfast.delta.hf_delta.zstd_frame import load_zstd
def peak():
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", file.read())[1])
new_hasher("xxh3-128"), load_zstd()
first = peak()
pull(*sys.argv[1:4], 1, threads=int(sys.argv[4]))
print(peak() - first)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs kernel feature /proc")
@pytest.mark.parametrize(("encoding", "density"), [("xor", 0.01), ("overwrite", 1.0)])
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path, encoding, density) -> None:
    rng = np.random.default_rng(0)
    old = {"w": random_tensor("BF16", (64 * MIB,), rng)}
    write_sharded(tmp_path / "base", old, num_shards=1)
    write_version(tmp_path / "v", 1, old, {"w": changed(old["w"], density, rng)}, encoding)
    words = [sys.executable, "-c", PULL, tmp_path / "local", tmp_path / "base", tmp_path / "v", "1"]
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * MIB  # of 128 MiB of weights


@pytest.mark.parametrize("threads", [1, 3])
def test_many_tensors_on_several_threads_give_the_same(tmp_path: Path, threads: int) -> None:
    rng = np.random.default_rng(1)
    old = {f"t{i:02}": random_tensor("BF16", (50 + i,), rng) for i in range(30)}
    new = {name: changed(tensor, 0.2, rng) for name, tensor in old.items()}
    write_sharded(tmp_path / "base", old)
    path = write_version(tmp_path / "v", 1, old, new, num_ranks=3)
    pull(tmp_path / "local", tmp_path / "base", tmp_path / "v", 1, threads=threads)
    assert_bits_equal(read(tmp_path / "local"), new)
    write_version(tmp_path / "v", 2, new, old)
    file = next((tmp_path / "v" / "weight_v000002").glob("*.safetensors"))
    text = file.read_bytes()
    at = text.index(b'"t20":"') + 7
    file.write_bytes(text[:at] + b"0123456789abcdef" * 2 + text[at + 32 :])
    with pytest.raises(ChecksumError, match="'t20' of the result"):
        pull(tmp_path / "local", tmp_path / "base", tmp_path / "v", 2, threads=threads)
    assert_bits_equal(read(tmp_path / "local"), new)
    assert path.exists()


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """A local checkpoint of the stock code: `big`, 4 GiB and a bit of zeros, and `tail`."""
    local = tmp_path / "local"
    (local / ".weight_sync").mkdir(parents=True)
    (local / ".weight_sync" / "state.json").write_text(json.dumps({"version": "000000"}))
    specs = [("big", "U8", (2**32 + MIB,)), ("tail", "U8", (100,))]
    start, header = build_header(specs, {})
    with (local / "model.safetensors").open("wb") as file:
        file.write(start)
        file.truncate(header.tensors[-1].start + 100)
    return tmp_path


def big_digest(places: dict[int, int]) -> str:
    hasher, zeros = xxhash.xxh3_128(), bytes(MIB)
    for at in range(0, 2**32 + MIB, MIB):
        inside = {place - at: value for place, value in places.items() if 0 <= place - at < MIB}
        piece = bytearray(zeros)
        for place, value in inside.items():
            piece[place] = value
        hasher.update(piece if inside else zeros)
    return hasher.hexdigest()


@pytest.mark.long
def test_bytes_beyond_4_gib_of_a_tensor_and_of_a_file_are_changed(huge: Path) -> None:
    """gym.md 2.7: slime cuts positions to 32 bits, and its receiver then writes elsewhere."""
    places = {3: 7, 2**32 - 1: 8, 2**32 + 3: 9, 2**32 + MIB - 1: 10}
    at = np.array(list(places), np.uint64).astype("<u4")
    content = len(places).to_bytes(4, "little") + at.tobytes() + bytes(places.values())
    tail = (100).to_bytes(4, "little") + np.arange(100, dtype="<u4").tobytes() + b"t" * 100
    path = huge / "v" / "weight_v000001"
    path.mkdir(parents=True)
    frames = {"big": zstandard.compress(content), "tail": zstandard.compress(tail)}
    digests = {"big": big_digest(places), "tail": xxhash.xxh3_128(b"t" * 100).hexdigest()}
    write_file(path / "model-00000-of-00001.safetensors", frames, digests)
    write_index(
        path, 1, dict.fromkeys(frames, "model-00000-of-00001.safetensors"), "overwrite", "xxh3-128"
    )
    report = pull(huge / "local", huge, huge / "v", 1)
    assert report.num_changed == len(places) + 100
    file = huge / "local" / "model.safetensors"
    start = file.stat().st_size - 100 - (2**32 + MIB)
    fd = os.open(file, os.O_RDONLY)
    for place, value in places.items():
        assert os.pread(fd, 1, start + place) == bytes([value])
    assert os.pread(fd, 100, start + 2**32 + MIB) == b"t" * 100
    os.close(fd)


@pytest.mark.long
def test_an_xor_beyond_4_gib_is_applied(huge: Path) -> None:
    place = 2**32 + 77
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=2**32 + MIB)
    frame = b"".join(compressor.compress(bytes(MIB)) for _ in range(2**12))
    frame += compressor.compress(bytes(77) + b"\5" + bytes(MIB - 78)) + compressor.flush()
    path = huge / "v" / "weight_v000001"
    path.mkdir(parents=True)
    file = "model-00000-of-00001.safetensors"
    write_file(path / file, {"big": frame}, {"big": big_digest({place: 5})})
    write_index(path, 1, {"big": file}, "xor", "xxh3-128")
    assert pull(huge / "local", huge, huge / "v", 1).num_changed == 1
