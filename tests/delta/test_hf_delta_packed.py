"""Packed files of versions: smaller than slime's files, and the same meaning again."""

from __future__ import annotations

import struct
import tracemalloc
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import zstandard
from delta_checkpoints import read
from hf_delta_data import (
    CHAINS,
    NUM_VERSIONS,
    apply_independently,
    difference,
    digest,
    expected_of,
    golden_chain,
    version_of,
    write_file,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from gymfast import _core
from gymfast.delta.hf_delta import packed_file, publish_delta, unpacked_file
from gymfast.delta.hf_delta.change_symbols import CHUNK_UNITS, Content
from gymfast.delta.hf_delta.packed_changes import pack, unpack
from gymfast.delta.hf_delta.packed_file import pack_file
from gymfast.delta.hf_delta.packed_table import carried, carry, read_table
from gymfast.delta.hf_delta.room import Room
from gymfast.delta.hf_delta.unpacked_file import unpack_file
from gymfast.errors import ConflictError, FormatError
from gymfast.testing.weights import rl_like_update, rl_like_weights

MODEL = "model-00000-of-00001.safetensors"


def through_frame(*contents: bytes) -> tuple[str, bytes, list[bytes]]:
    """The encoding, the gymfast frame and the zstd frames of contents."""
    found = [Content.read(BytesIO(content).read, len(content)) for content in contents]
    encoding = found[0].encoding
    frame = pack(found, 1)
    return encoding, frame, unpack(frame, encoding, [(c.num_bytes, c.num_units) for c in found], 1)


def repack(path: Path, out: Path, damage: tuple[int, int] | None = None) -> bytes:
    """Packs a file and unpacks it at out; the packed bytes. Damage: a byte and the bits in it."""
    packed = bytearray(b"".join(pack_file(path, threads=2)))
    if damage is not None:
        packed[damage[0]] ^= damage[1]

    def get(start: int, length: int) -> bytes:
        assert 0 <= start <= start + length <= len(packed)
        return bytes(packed[start : start + length])

    unpack_file(get, read_table(get, len(packed), "here"), out, "here", threads=2)
    return bytes(packed)


def bits(checkpoint: Path) -> dict[str, bytearray]:
    return {name: bytearray(tensor.data) for name, tensor in read(checkpoint).items()}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("density", [0.0003, 0.01, 0.3, 1.0])
def test_updates_like_those_of_training_come_back_as_the_frames_that_our_writer_makes(
    encoding: str, density: float
) -> None:
    old = rl_like_weights(400_000)
    new = rl_like_update(old, density, 1)
    for name in old:
        a, b = (side[name].reshape(-1).view(np.uint8) for side in (old, new))
        if np.array_equal(a, b):
            continue
        make = _core.zstd_xor_frame if encoding == "xor" else _core.zstd_overwrite_frame
        assert through_frame(difference(encoding, a, b))[::2] == (encoding, [make(a, b, 1)])


contents = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from([0, 0, 0, 0, 1, 255]), max_size=300).map(bytes),
    st.dictionaries(st.integers(0, 200), st.integers(0, 255)).map(
        lambda new: struct.pack(f"<I{len(new)}I", len(new), *sorted(new)) + bytes(new.values())
    ),
)


@given(contents)
@settings(max_examples=300, deadline=None)
def test_any_content_comes_back(content: bytes) -> None:
    _, _, frames = through_frame(content)
    assert [zstandard.decompress(frame) for frame in frames] == [content]


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_units_at_the_borders_of_chunks_come_back(offset: int) -> None:
    at = np.array([0, 1, 2, 5, 2 * CHUNK_UNITS + offset, 2 * CHUNK_UNITS + offset + 1], "<u4")
    more = np.arange(10 + offset, 10 + offset + CHUNK_UNITS, dtype="<u4") + 2 * CHUNK_UNITS
    at = np.concatenate([at, more])
    new = np.resize(np.arange(7, dtype=np.uint8), at.size)
    overwrite = struct.pack("<I", at.size) + at.tobytes() + new.tobytes()
    xor = bytearray(4 * CHUNK_UNITS + 3)
    xor[2 * CHUNK_UNITS + offset] = 7
    xor[-1] = 9
    for content in (overwrite, bytes(xor)):
        assert zstandard.decompress(*through_frame(content)[2]) == content


def test_more_symbols_than_there_are_ranks_are_listed() -> None:
    xor = np.repeat(np.arange(2**16, dtype=np.uint16), 2)
    content = np.random.default_rng(0).permutation(xor).tobytes()
    assert zstandard.decompress(*through_frame(content)[2]) == content


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_contents_of_any_sizes_share_a_frame(encoding: str) -> None:
    generator = np.random.default_rng(0)
    contents = []
    for size in (1, 2, 3, 8, 1001, 70_000, 5):
        old = generator.integers(0, 256, size, dtype=np.uint8)
        new = old.copy()
        new[:: 1 + size // 40] += generator.integers(1, 9, new[:: 1 + size // 40].size, np.uint8)
        contents.append(difference(encoding, old, new))
    found, frame, frames = through_frame(*contents)
    assert found == encoding
    assert [zstandard.decompress(one) for one in frames] == contents
    assert len(frame) < sum(len(through_frame(content)[1]) for content in contents) / 2


def test_positions_that_are_not_ascending_are_no_overwrite() -> None:
    content = struct.pack("<I2I2B", 2, 7, 7, 1, 2)
    encoding, _, frames = through_frame(content)
    assert (encoding, zstandard.decompress(*frames)) == ("xor", content)


@pytest.mark.parametrize("chain", CHAINS)
def test_the_golden_chains_keep_their_meaning_in_fewer_bytes(chain: str, tmp_path: Path) -> None:
    folder = golden_chain(chain)
    weights = bits(folder / "base")
    before = after = 0
    for number in range(1, NUM_VERSIONS + 1):
        version = version_of(folder, number)
        out = tmp_path / version.name
        out.mkdir()
        for file in version.iterdir():
            before += file.stat().st_size
            after += len(repack(file, out / file.name))
        apply_independently(out, weights)
        assert weights == bits(expected_of(folder, number))
    assert after < before


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version that gymfast wrote, with large, small and odd tensors."""
    old = rl_like_weights(600_000)
    new = rl_like_update(old, 0.02, 1)
    old["odd"], new["odd"] = (np.resize(np.arange(9, dtype=np.uint8), 3001) for _ in range(2))
    new["odd"][::50] += 1
    for name, weights in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_files_of_our_writer_come_back_byte_by_byte(version: Path, encoding: str) -> None:
    old, new = version / "old", version / "new"
    path = publish_delta(version / "run", 1, old, new, encoding=encoding).path
    for file in path.iterdir():
        packed = repack(file, version / file.name)
        assert (version / file.name).read_bytes() == file.read_bytes()
        if file.name == MODEL:
            assert len(packed) < 0.85 * file.stat().st_size
    assert not list(version.glob(".*"))


def test_a_frame_without_content_size_or_not_larger_than_its_changes_is_carried(
    tmp_path: Path,
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    stream = BytesIO()
    with zstandard.ZstdCompressor().stream_writer(stream, closefd=False) as writer:
        writer.write(noise)
    frames = {"noise": zstandard.compress(noise), "sizeless": stream.getvalue(), "empty": b""}
    frames["empty"] = zstandard.compress(b"")
    write_file(tmp_path / MODEL, frames, dict.fromkeys(frames, "0" * 32))
    repack(tmp_path / MODEL, tmp_path / "out")
    assert {n: a.tobytes() for n, a in load_file(tmp_path / "out").items()} == frames


@pytest.mark.parametrize("size", [0, 1, 2, 777, 100_000])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_any_other_file_comes_back(
    tmp_path: Path, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "PIECE_BYTES", 4096)
    content = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    (tmp_path / name).write_bytes(content)
    repack(tmp_path / name, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


def test_a_full_checkpoint_comes_back_from_fewer_bytes(version: Path) -> None:
    file = version / "new" / "model.safetensors"
    packed = repack(file, version / "out")
    assert (version / "out").read_bytes() == file.read_bytes()
    assert len(packed) < 0.9 * file.stat().st_size


def test_damage_of_any_byte_of_a_packed_file_is_found(tmp_path: Path) -> None:
    old = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8)
    at = np.arange(0, old.size, 97)
    new = old.copy()
    new[at] ^= 3
    contents = {
        "large": difference("xor", old, new),
        "small": difference("overwrite", old, new)[:9],
    }
    frames = {name: zstandard.compress(content, 1) for name, content in contents.items()}
    write_file(tmp_path / MODEL, frames, {n: digest("adler32", n.encode()) for n in frames})
    (tmp_path / "config.json").write_text('{"a": 1}' * 9)
    for file in (tmp_path / MODEL, tmp_path / "config.json"):
        size = len(repack(file, tmp_path / f"{file.name}.out"))
        for byte in range(0, size, 1 + size // 150):
            with pytest.raises(FormatError):
                repack(file, tmp_path / f"{file.name}.{byte}", (byte, 1 << byte % 8))


@pytest.mark.parametrize("size", [0, 15, 16, 100])
def test_what_is_no_packed_file_is_refused(size: int) -> None:
    blob = bytes(size)
    with pytest.raises(FormatError, match=r"here: no packed file .*remove it and put it again"):
        read_table(lambda start, length: blob[start : start + length], size, "here")


def test_a_table_of_another_frame_is_refused() -> None:
    with pytest.raises(FormatError, match="expected 'table'"):
        carried(carry(b"abc", "piece"), "table")


def test_a_damaged_zstd_frame_is_refused_before_it_is_put(version: Path) -> None:
    path = publish_delta(version / "run", 1, version / "old", version / "new").path / MODEL
    blob = bytearray(path.read_bytes())
    blob[-1000] ^= 255
    path.write_bytes(blob)
    with pytest.raises(FormatError, match=MODEL):
        list(pack_file(path, threads=1))


def test_a_content_size_that_no_frame_can_have_is_damage(tmp_path: Path) -> None:
    frame = bytes.fromhex("28b52ffde0") + (1 << 50).to_bytes(8, "little") + b"\1\0\0"
    write_file(tmp_path / MODEL, {"w": frame}, {"w": "0" * 32})
    with pytest.raises(FormatError, match="tensor 'w'"):
        list(pack_file(tmp_path / MODEL))


def test_memory_is_that_of_the_tensors_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, num_tensors = 2**22, 16
    xor = np.zeros(size, np.uint8)
    xor[:: 2 * 97] = 1
    frame = zstandard.compress(xor, 1)
    assert len(frame) > 2**14
    frames = {f"tensor-{i}": frame for i in range(num_tensors)}
    write_file(tmp_path / MODEL, frames, dict.fromkeys(frames, "0" * 32))
    monkeypatch.setattr(packed_file, "_GROUP_BYTES", 1)
    for module in (packed_file, unpacked_file):
        monkeypatch.setattr(module, "WORK_BYTES", 1)  # so that tensors come one by one
    tracemalloc.start()
    try:
        repack(tmp_path / MODEL, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 7 * size < num_tensors * size / 2


def test_a_file_that_is_written_meanwhile_is_refused(version: Path) -> None:
    path = publish_delta(version / "run", 1, version / "old", version / "new").path / MODEL
    parts = pack_file(path, threads=1)
    next(parts)
    path.open("ab").write(b"more")
    with pytest.raises(ConflictError, match="it is being written"):
        list(parts)


def test_a_frame_of_other_changes_is_refused() -> None:
    content = bytes(50) + b"\1" + bytes(49)
    _, frame, _ = through_frame(content)
    for encoding, num_units in (("overwrite", 50), ("xor", 40)):
        with pytest.raises(FormatError, match="no packed changes; remove it"):
            unpack(frame, encoding, [(100, num_units)], 1)


def test_one_job_at_a_time_may_have_more_than_there_is_room() -> None:
    room = Room(10)
    with room.take(8) as count_more:
        count_more(50)
    with room.take(100):
        pass
    with room.take(10):
        pass
