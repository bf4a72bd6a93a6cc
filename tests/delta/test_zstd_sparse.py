"""Frames of xor and overwrite: any decoder gives the content, whatever the buffers hold."""

from __future__ import annotations

import importlib
import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from zstd_frames import Block, parse

from gymfast import _core
from gymfast.testing.weights import rl_like_update, rl_like_weights

Bytes = NDArray[np.uint8]

BLOCK = 128 << 10
SEGMENT = 16 * BLOCK
PART = _core.ZSTD_PART_BYTES
# zstd refuses windows over 128 MiB when it streams; this writer needs no more than one block.
MAX_WINDOW = BLOCK
HEADER = 18

python_zstd = importlib.import_module(
    "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
)


@pytest.fixture(autouse=True)
def _default_target() -> Iterator[None]:
    yield
    _core.force_cpu_target(None)


def old_of(xor: Bytes) -> Bytes:
    return np.random.default_rng(xor.size).integers(0, 256, xor.size, dtype=np.uint8)


def frame_of(xor: Bytes, make: Callable[..., bytes] = _core.zstd_xor_frame) -> bytes:
    """The frame, the same of all targets and thread counts."""
    old = old_of(xor)
    new = old ^ xor
    frames = {make(old, new, threads=2)}
    for target in _core.cpu_targets():
        _core.force_cpu_target(target)
        frames.add(make(old, new))
    assert len(frames) == 1
    return frames.pop()


def stream(frame: bytes, read_bytes: int) -> bytes:
    """Decoded by a reader that takes and gives a few bytes at a time."""
    parts = []
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frame), read_size=7) as reader:
        while part := reader.read(read_bytes):
            parts.append(part)
    return b"".join(parts)


def check(xor: Bytes) -> tuple[Block, ...]:
    """Blocks of the xor frame, which three decoders have read."""
    return check_content(frame_of(xor), xor.tobytes())


def check_overwrite(xor: Bytes) -> tuple[Block, ...]:
    """The same of the overwrite frame; the content as slime makes it (gym.md section 2.7)."""
    positions = np.flatnonzero(xor).astype("<u4")
    values = (old_of(xor) ^ xor)[positions]
    content = np.uint32(positions.size).tobytes() + positions.tobytes() + values.tobytes()
    return check_content(frame_of(xor, _core.zstd_overwrite_frame), content)


def check_content(frame: bytes, content: bytes) -> tuple[Block, ...]:
    assert zstandard.ZstdDecompressor().decompress(frame) == content
    assert stream(frame, 4099) == content
    assert python_zstd.decompress(frame) == content
    parsed = parse(frame)
    assert parsed.content_size == len(content)
    assert parsed.window_bytes <= MAX_WINDOW
    assert len(frame) <= HEADER + len(content) + 3 * len(parsed.blocks)
    return parsed.blocks


@st.composite
def xors(draw: st.DrawFn) -> Bytes:
    """Sizes around blocks, any density, few or all values, runs, changes at both ends."""
    near = [0, 1, 64, 8192, 65536, BLOCK, 2 * BLOCK]
    size = draw(
        st.integers(0, 300_000)
        | st.tuples(st.sampled_from(near), st.integers(-9, 9)).map(lambda s: max(0, sum(s)))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0, 1e-5, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9, 1]))
    num_values = draw(st.sampled_from([1, 2, 3, 17, 128, 129, 255]))
    values = rng.permutation(np.arange(1, 256, dtype=np.uint8))[:num_values]
    skew = rng.geometric(0.3, size) if draw(st.booleans()) else rng.integers(1, 256, size)
    xor = np.where(rng.random(size) < density, values[(skew - 1) % num_values], 0).astype(np.uint8)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, size))
        xor[start : start + draw(st.integers(0, 2 * BLOCK))] = draw(st.integers(0, 255))
    for edge in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, size - 1):
        if 0 <= edge < size and draw(st.booleans()):
            xor[edge] = draw(st.integers(1, 255))
    return xor


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(xor=xors())
@example(xor=np.zeros(0, np.uint8))
@example(xor=np.arange(256, dtype=np.uint8))
def test_any_decoder_gives_the_content(xor: Bytes) -> None:
    check(xor)
    check_overwrite(xor)


@pytest.mark.parametrize("gap", [*range(1, 40), 63, 64, 130, 131, 132, 258, 259, 70_000, 131_000])
def test_every_gap_between_changes(gap: int) -> None:
    xor = np.zeros(max(3 * gap, 5000), np.uint8)
    xor[gap - 1 :: gap] = 1
    check(xor)
    xor[0] = 2
    check(xor)


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 65791, 65792, BLOCK, BLOCK + 1])
def test_the_size_field_has_its_shortest_form(size: int) -> None:
    xor = np.zeros(size, np.uint8)
    check(xor)
    frame = parse(frame_of(xor))
    assert frame.is_single_segment == (size <= BLOCK)
    assert frame.window_bytes == (min(size, BLOCK))


@pytest.mark.parametrize("change", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 4])
def test_changes_around_segments(change: int) -> None:
    xor = np.zeros(2 * SEGMENT + 5, np.uint8)
    xor[change] = 255
    blocks = check(xor)
    assert [block.kind for block in blocks].count("compressed") == (change // BLOCK != 32)


def test_literals_may_be_as_long_as_a_block() -> None:
    """One sequence at most: its lengths need codes with 15 and 16 bits behind them."""
    rng = np.random.default_rng(1)
    for zeros in (0, 5, 70_000):
        xor = rng.choice(np.array([1, 2, 3, 200], np.uint8), BLOCK)
        xor[BLOCK - zeros :] = 0
        (block,) = check(xor)
        assert block.num_sequences == (zeros > 0)
        assert block.num_streams == 4
    xor = np.zeros(BLOCK, np.uint8)
    xor[:70_000], xor[-1] = 9, 9
    (block,) = check(xor)
    assert block.literals == "compressed"


def _noise(size: int, density: float, num_values: int = 255) -> Bytes:
    rng = np.random.default_rng(size)
    values = 1 + rng.integers(0, num_values, size)
    return np.where(rng.random(size) < density, values, 0).astype(np.uint8)


@pytest.mark.parametrize("every", [1, 2, 100, 255, 256, 257, 65_536, 1 << 20])
def test_positions_with_any_gap(every: int) -> None:
    """The upper bytes of a position that repeat are a match; the first of them names offset 4."""
    xor = np.zeros((5 << 20) + 3, np.uint8)
    xor[every - 1 :: every] = 7
    blocks = check_overwrite(xor)
    with_matches = [block for block in blocks if block.num_sequences]
    assert bool(with_matches) == (every < 256)
    if every == 1:
        assert max(block.num_sequences for block in blocks) >= 0x7F00  # a size of three bytes
        assert {block.offsets for block in with_matches} == {"rle", "repeat"}
        assert {block.match_lengths for block in with_matches} == {"rle", "repeat"}


def test_a_position_may_look_like_the_count() -> None:
    xor = np.zeros(1000, np.uint8)
    xor[:200] = 1  # 200 changes, the first 200 positions
    check_overwrite(xor)
    xor[:] = 0
    xor[[1, 300, 999]] = 1
    check_overwrite(xor)


@cache
def _all_blocks() -> tuple[Block, ...]:
    even = np.zeros(1000, np.uint8)
    even[::20] = 1
    inputs = [
        np.zeros(3 * BLOCK, np.uint8),
        np.full(700, 9, np.uint8),
        _noise(2 * BLOCK, 1),
        _noise(4 * BLOCK, 0.001),
        _noise(4 * BLOCK, 0.01),
        _noise(4 * BLOCK, 0.3, 3),
        _noise(40, 0.1),
        _noise(400, 0.05),
        even,
        np.concatenate([_noise(BLOCK, 1), _noise(2 * BLOCK, 0.02)]),
    ]
    return tuple(block for xor in inputs for block in check(xor))


def test_every_type_of_block_is_written() -> None:
    assert {block.kind for block in _all_blocks()} == {"raw", "rle", "compressed"}


def test_every_type_of_literals_is_written() -> None:
    """RLE never: a match needs a zero before it, and a block of one value is an RLE block."""
    found = {(block.literals, block.num_streams) for block in _all_blocks()} - {(None, 0)}
    assert found == {
        ("raw", 0),
        ("compressed", 1),
        ("compressed", 4),
        ("treeless", 1),
        ("treeless", 4),
    }


def test_every_mode_of_tables_is_written() -> None:
    """All offsets are the same, so their table is RLE or repeated and costs no bits."""
    blocks = [block for block in _all_blocks() if block.num_sequences]
    every = {"predefined", "rle", "compressed", "repeat"}
    assert {block.literal_lengths for block in blocks} == every
    assert {block.match_lengths for block in blocks} == every
    assert {block.offsets for block in blocks} == {"rle", "repeat"}
    assert {block.num_sequences >= 128 for block in blocks} == {False, True}


def test_symbols_of_all_values_have_codes_of_all_lengths() -> None:
    """Counts like Fibonacci numbers would make codes longer than the 11 bits of the format."""
    counts = [1, 1]
    while sum(counts) < 100_000:
        counts.append(counts[-1] + counts[-2])
    values = np.repeat(np.arange(1, len(counts) + 1, dtype=np.uint8), counts)
    for step in (1, 10):
        xor = np.random.default_rng(1).permutation(values * np.uint8(step))
        (block,) = check(xor)
        assert block.literals == "compressed"


def test_a_third_less_than_level_1_on_an_update_like_those_of_training() -> None:
    old = rl_like_weights(4 << 20, 1)
    new = rl_like_update(old, 0.01, 2)
    a, b = (
        np.concatenate([w.reshape(-1) for w in state.values()]).view(np.uint8)
        for state in (old, new)
    )
    level_1 = zstandard.ZstdCompressor(level=1)
    assert len(_core.zstd_xor_frame(a, b)) <= 0.67 * len(level_1.compress((a ^ b).tobytes()))
    overwrite = _core.zstd_overwrite_frame(a, b)
    content = zstandard.ZstdDecompressor().decompress(overwrite)
    assert len(overwrite) <= 0.82 * len(level_1.compress(content))


def test_unaligned_and_read_only_buffers() -> None:
    xor = _noise(BLOCK + 100, 0.01)
    old = np.zeros(xor.size, np.uint8)
    old.flags.writeable = False
    for start in range(1, 9):
        frame = _core.zstd_xor_frame(old[start:], xor[start:])
        assert zstandard.ZstdDecompressor().decompress(frame) == xor[start:].tobytes()


@pytest.mark.parametrize("make", [_core.zstd_xor_frame, _core.zstd_overwrite_frame])
def test_buffers_of_other_sizes_and_types_are_refused(make: Callable[..., bytes]) -> None:
    data = np.zeros(5, np.uint8)
    with pytest.raises(ValueError, match="old has 5 bytes, new has 4"):
        make(data, data[:4])
    with pytest.raises(TypeError):
        make(data, data.view(np.int8))
    with pytest.raises(TypeError):
        make(data[::2], data[::2])


def test_overwrite_refuses_positions_that_do_not_fit_32_bits() -> None:
    data = np.zeros(1 << 32, np.uint8)  # untouched
    with pytest.raises(ValueError, match="use xor for a tensor of 4 GiB"):
        _core.zstd_overwrite_frame(data, data)


@pytest.mark.ci
def test_the_zstd_program_reads_the_frames(tmp_path: Path) -> None:
    program = shutil.which("zstd")
    assert program, ".ci/run installs it"
    for size in (0, 1, 5000, BLOCK + 1, 2 * SEGMENT + 7):
        for density in (0, 0.01, 0.4, 1):
            xor = _noise(size, density)
            path = tmp_path / "frame.zst"
            path.write_bytes(frame_of(xor))
            done = subprocess.run([program, "-dc", path], capture_output=True, check=True)
            assert done.stdout == xor.tobytes()
            listed = subprocess.run(
                [program, "-lv", path], capture_output=True, check=True, text=True
            )
            assert f"({size} B)" in listed.stdout


@pytest.mark.long
def test_content_over_4_gib() -> None:
    """Untouched zeros share one page, so the buffers cost no memory."""
    size = (4 << 30) + 3 * BLOCK + 5
    old, new = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    changes = {0: 1, (4 << 30) - 1: 2, 4 << 30: 3, (4 << 30) + 1: 4, size - 1: 5}
    for position, value in changes.items():
        new[position] = value
    frame = _core.zstd_xor_frame(old, new)
    assert parse(frame).content_size == size
    found, at = {}, 0
    with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
        while part := reader.read(16 << 20):
            data = np.frombuffer(part, np.uint8)
            found |= {at + int(i): int(data[i]) for i in np.flatnonzero(data)}
            at += data.size
    assert at == size
    assert found == changes


@pytest.mark.long
def test_overwrite_of_the_last_position_of_32_bits() -> None:
    old, new = np.zeros((1 << 32) - 1, np.uint8), np.zeros((1 << 32) - 1, np.uint8)
    new[-1] = 7
    content = zstandard.ZstdDecompressor().decompress(_core.zstd_overwrite_frame(old, new))
    assert content == bytes([1, 0, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF, 7])


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART + 77])
def test_parts_joined_are_the_frame(size: int) -> None:
    old = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    new = old.copy()
    new[:: 2 * BLOCK + 9] ^= 3
    parts, num_changed = [], 0
    for start in range(0, max(size, 1), PART):
        part, count = _core.zstd_xor_part(old, new, start, min(size, start + PART), threads=2)
        parts.append(part)
        num_changed += count
    assert b"".join(parts) == _core.zstd_xor_frame(old, new)
    assert num_changed == np.count_nonzero(old != new)


@pytest.mark.parametrize(
    ("start", "end"), [(1, 2 * PART), (0, PART + 1), (PART, 0), (PART, PART), (0, 3 * PART)]
)
def test_a_part_with_other_edges_is_refused(start: int, end: int) -> None:
    data = np.zeros(2 * PART + 5, np.uint8)
    with pytest.raises(ValueError, match="edges are multiples of"):
        _core.zstd_xor_part(data, data, start, end)
