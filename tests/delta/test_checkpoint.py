"""Frames from checkpoints and into new ones: streamed, whole or absent."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from delta_checkpoints import apply_to, frame_of, raw, read, write, write_sharded
from delta_weights import changed, copies, each_backend, pairs, random_tensor, small_pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymfast.delta as delta
from gymfast.delta.checkpoint import (
    Checkpoint,
    apply_checkpoint,
    apply_checkpoint_in_place,
    digest_checkpoint,
    recover,
)
from gymfast.delta.frame import root_of
from gymfast.delta.geometry import plan_geometry
from gymfast.delta.window import Window, block_span
from gymfast.errors import (
    BudgetError,
    ChecksumError,
    CoverageError,
    FormatError,
    GymfastError,
    NotFoundError,
)
from gymfast.testing.compare import assert_bits_equal

SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(SLOW, max_examples=60)
@given(pair=pairs(), tiled=st.booleans(), profile=st.sampled_from(("auto", "small")))
def test_a_checkpoint_frame_is_the_frame_of_its_tensors(tmp_path_factory, pair, tiled, profile):
    folder = tmp_path_factory.mktemp("pair")
    old, new = (
        write(folder / f"{i}.safetensors", copies(weights)) for i, weights in enumerate(pair)
    )
    options = {"tiled": tiled, "profile": profile}
    frame = frame_of(old, new, **options)
    assert frame == delta.encode(read(old), read(new), backend="cpu", **options)
    report = apply_checkpoint(old, frame, folder / "out.safetensors", backend="cpu")
    assert_bits_equal(read(folder / "out.safetensors"), pair[1])
    assert report.new_root == root_of(digest_checkpoint(folder / "out.safetensors"))
    anchor = frame_of(None, new, **options)
    apply_checkpoint(None, anchor, folder / "anchor.safetensors", backend="cpu")
    assert_bits_equal(read(folder / "anchor.safetensors"), pair[1])


@settings(SLOW, max_examples=40)
@given(pair=pairs(), num_shards=st.integers(1, 3))
def test_aliases_and_all_kinds_arrive_in_shards(tmp_path_factory, pair, num_shards) -> None:
    folder = tmp_path_factory.mktemp("pair")
    old, new = pair
    base = write_sharded(folder / "base", old, min(num_shards, len(old)))
    frame = delta.encode(old, new, backend="cpu")
    apply_checkpoint(base, frame, folder / "out", backend="cpu")
    assert_bits_equal(read(folder / "out"), new)
    apply_checkpoint(folder / "out", frame, folder / "again", backend="cpu")
    assert_bits_equal(read(folder / "again"), new)


def test_a_sharded_output_keeps_layout_index_and_side_files(tmp_path: Path) -> None:
    old, new = small_pair()
    new["added"] = random_tensor("F16", (3, 3), np.random.default_rng(1))
    base = write_sharded(tmp_path / "base", old)
    target = write_sharded(tmp_path / "new", new)
    (base / "notes").mkdir()
    out = tmp_path / "out"
    apply_checkpoint(base, frame_of(base, target), out, backend="cpu")
    assert {p.name for p in out.iterdir()} == {p.name for p in base.iterdir()} - {"notes"}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    expected = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["weight_map"] == expected | {"added": "model-00002-of-00002.safetensors"}
    total = sum(tensor.num_bytes for tensor in new.values())
    assert index["metadata"] == {"total_size": total, "kept": "yes"}
    assert_bits_equal(read(out), new)


def test_a_directory_with_one_file_needs_no_index(tmp_path: Path) -> None:
    old, new = small_pair()
    (tmp_path / "base").mkdir()
    write(tmp_path / "base" / "model.safetensors", old)
    frame = delta.encode(old, new, backend="cpu")
    apply_checkpoint(tmp_path / "base", frame, tmp_path / "out", backend="cpu")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert_bits_equal(read(tmp_path / "out"), new)


def test_an_anchor_makes_a_directory_or_a_file(tmp_path: Path) -> None:
    _, new = small_pair()
    anchor = delta.encode(None, new, backend="cpu")
    for name in ("out", "out.safetensors"):
        apply_checkpoint(None, anchor, tmp_path / name, backend="cpu")
        assert_bits_equal(read(tmp_path / name), new)


@each_backend
def test_an_update_in_place_gives_the_file_of_a_new_checkpoint(backend, tmp_path: Path) -> None:
    old, new = small_pair()
    base, out = write_sharded(tmp_path / "base", old), tmp_path / "out"
    frame = delta.encode(old, new, backend="cpu")
    (tmp_path / "step.gfd").write_bytes(frame)
    apply_checkpoint(base, tmp_path / "step.gfd", out, backend=backend)
    report = apply_checkpoint_in_place(base, tmp_path / "step.gfd", backend=backend)
    assert report.num_changed > 0
    for file in out.iterdir():
        if file.suffix == ".safetensors":
            assert (base / file.name).read_bytes() == file.read_bytes()
    again = apply_checkpoint_in_place(base, frame, backend=backend)
    assert (again.num_changed, set(again.skipped)) == (0, set(new))
    assert not [p for p in base.iterdir() if "gymfast" in p.name]


@each_backend
def test_an_update_in_place_writes_aliases_too(backend: str, tmp_path: Path) -> None:
    old, new = small_pair()
    old["head"] = old["embed"]
    new["head"] = new["embed"]
    base = write(tmp_path / "base.safetensors", old)
    apply_checkpoint_in_place(base, delta.encode(old, new, backend="cpu"), backend=backend)
    assert_bits_equal(read(base), new)


@pytest.mark.parametrize("kind", ["added", "removed", "replaced"])
def test_what_cannot_be_done_in_place_is_refused(kind: str, tmp_path: Path) -> None:
    old, new = small_pair()
    if kind == "removed":
        del new["bias"]
    else:
        name = {"added": "extra", "replaced": "bias"}[kind]
        new[name] = random_tensor("F16", (3,), np.random.default_rng(0))
    base = write(tmp_path / "base.safetensors", old)
    before = base.read_bytes()
    with pytest.raises(GymfastError, match=rf"{kind} by this frame.*nothing was written.*-o OUT"):
        apply_checkpoint_in_place(base, delta.encode(old, new, backend="cpu"), backend="cpu")
    assert base.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["base.safetensors"]


@each_backend
def test_I31_one_flipped_bit_in_a_checkpoint_is_refused_before_any_write(backend, tmp_path) -> None:
    old, new = small_pair()
    base = write(tmp_path / "base.safetensors", old)
    frame = delta.encode(old, new, backend="cpu")
    whole = base.read_bytes()
    num_bytes = sum(tensor.num_bytes for tensor in old.values())
    for at in range(1, num_bytes, num_bytes // 9):
        damaged = bytearray(whole)
        damaged[-at] ^= 16
        base.write_bytes(damaged)
        for apply in (
            lambda: apply_checkpoint(base, frame, tmp_path / "out.safetensors", backend=backend),
            lambda: apply_checkpoint_in_place(base, frame, backend=backend),
        ):
            with pytest.raises(ChecksumError, match="nothing was written") as error:
                apply()
            assert error.value.number == 60
        assert base.read_bytes() == damaged
        assert [p.name for p in tmp_path.iterdir()] == ["base.safetensors"]


def test_a_damaged_frame_leaves_no_output(tmp_path: Path) -> None:
    old, new = small_pair()
    base = write_sharded(tmp_path / "base", old)
    frame = bytearray(delta.encode(old, new, backend="cpu"))
    frame[len(frame) // 2] ^= 1
    for out in (tmp_path / "out", None):
        with pytest.raises(FormatError):
            apply_to(base, bytes(frame), out)
    assert [p.name for p in tmp_path.iterdir()] == ["base"]
    assert_bits_equal(read(base), old)


def test_a_block_that_cannot_be_decoded_leaves_no_output(tmp_path: Path, monkeypatch) -> None:
    old, new = small_pair()
    base = write_sharded(tmp_path / "base", old)
    frame = delta.encode(old, new, backend="reference")

    def fails(*_):
        raise ChecksumError("block 0: damaged", 58)

    monkeypatch.setattr("gymfast.delta.backends.reference.ReferenceBackend.apply_blocks", fails)
    with pytest.raises(ChecksumError, match=r"tensor '\w+': block 0: damaged"):
        apply_checkpoint(base, frame, tmp_path / "out", backend="reference")
    with pytest.raises(ChecksumError, match=r"tensor '\w+': block 0: damaged"):
        apply_checkpoint_in_place(base, frame, backend="reference")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]
    assert_bits_equal(read(base), old)
    assert not [p for p in base.iterdir() if "gymfast" in p.name]


def test_an_output_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    old, new = small_pair()
    base = write_sharded(tmp_path / "base", old)
    frame = delta.encode(old, new, backend="cpu")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(GymfastError, match="is there already"):
        apply_checkpoint(base, frame, tmp_path / "out", backend="cpu")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    single = write(tmp_path / "base.safetensors", old)
    with pytest.raises(GymfastError, match="is a directory"):
        apply_checkpoint(single, frame, tmp_path / "out", backend="cpu")
    with pytest.raises(NotFoundError):
        apply_checkpoint(single, frame, tmp_path / "no" / "out.safetensors", backend="cpu")


def test_a_file_is_replaced_at_once_and_with_usual_rights(tmp_path: Path) -> None:
    old, new = small_pair()
    base = write(tmp_path / "base.safetensors", old)
    with Checkpoint.open(base) as before:
        apply_checkpoint(base, delta.encode(old, new, backend="cpu"), base, backend="cpu")
        assert_bits_equal({name: before.read(name) for name in before.names}, old)
    assert_bits_equal(read(base), new)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(base.stat().st_mode) == 0o666 & ~mask


def test_a_disk_that_is_too_small_is_known_before_the_first_write(tmp_path, monkeypatch) -> None:
    old, new = small_pair()
    base = write(tmp_path / "base.safetensors", old)
    real = os.statvfs(tmp_path)
    small = os.statvfs_result([*real[:4], 0, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(BudgetError, match=r"needs \d+ bytes, .* has 0 free"):
        apply_checkpoint(
            base, delta.encode(old, new, backend="cpu"), tmp_path / "out.safetensors", backend="cpu"
        )
    assert [p.name for p in tmp_path.iterdir()] == ["base.safetensors"]


def test_what_a_killed_writer_left_is_swept_and_a_live_one_is_not(tmp_path: Path) -> None:
    import fcntl

    old, new = small_pair()
    base = write(tmp_path / "base.safetensors", old)
    dead, live, other = (
        tmp_path / f".out.safetensors.gymfast-{i}" for i in ("0000dead", "00001234", "0000dead.bak")
    )
    for path in (dead, live, other):
        path.write_bytes(b"x")
    with live.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        out = tmp_path / "out.safetensors"
        apply_checkpoint(base, delta.encode(old, new, backend="cpu"), out, backend="cpu")
    assert not dead.exists()
    assert live.exists()
    assert other.exists(), "not a name that a writer gives to a temporary"


def test_progress_reaches_its_total_and_never_falls(tmp_path: Path) -> None:
    old, new = small_pair()
    base, target = write(tmp_path / "a.safetensors", old), write(tmp_path / "b.safetensors", new)
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    frame = frame_of(base, target, progress=note)
    out = tmp_path / "out.safetensors"
    for work in (
        lambda: frame_of(base, target, progress=note),
        lambda: apply_checkpoint(base, frame, out, backend="cpu", progress=note),
        lambda: apply_checkpoint_in_place(base, frame, backend="cpu", progress=note),
        lambda: digest_checkpoint(base, backend="cpu", progress=note),
    ):
        seen.clear()
        work()
        assert seen[-1][0] == seen[-1][1]
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_coverage_is_checked_for_checkpoints_too(tmp_path: Path) -> None:
    old, new = small_pair()
    frame = delta.encode(old, new, backend="cpu")
    base = write(tmp_path / "base.safetensors", {f"model.{n}": t for n, t in old.items()})
    with pytest.raises(CoverageError, match=r"they differ by the prefix 'model\.'"):
        apply_checkpoint_in_place(base, frame, backend="cpu")


def test_an_empty_checkpoint_is_refused_as_a_new_version(tmp_path: Path) -> None:
    old, _ = small_pair()
    base = write(tmp_path / "base.safetensors", old)
    empty = raw(tmp_path / "empty.safetensors", {})
    with pytest.raises(CoverageError, match="has no tensors"):
        frame_of(base, empty)


@settings(SLOW, max_examples=60)
@given(
    shape=st.sampled_from([(64, 96), (16, 16, 16), (4099,), (48, 33)]),
    tiled=st.booleans(),
    block_units=st.sampled_from([1, 7, 64, 1000]),
)
def test_spans_cover_their_blocks_and_ascend(shape, tiled, block_units) -> None:
    geometry = plan_geometry("BF16", shape, tiled=tiled, block_units=block_units)
    spans = [block_span(geometry, block, 1) for block in range(geometry.num_blocks)]
    assert spans[0][0] == 0
    assert spans[-1][1] == geometry.num_bytes
    for block, (start, end) in enumerate(spans):
        first_row, end_row, first_col, end_col = geometry.block_span(block)
        assert start <= 2 * (first_row * geometry.cols + first_col)
        assert end >= 2 * ((end_row - 1) * geometry.cols + end_col)
        assert spans[max(0, block - 1)][0] <= start


def test_a_window_hands_over_every_byte_once_and_rereads_after_rewind() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * 2**25 + 5, np.uint8)
    window = Window(data.size)
    reads: list[int] = []

    def load(start: int, out: np.ndarray) -> None:
        reads.append(out.size)
        out[:] = data[start : start + out.size]

    for _ in range(2):
        passed: list[np.ndarray] = []
        window.begin(data.size, load)
        window.load_to(100)
        window.pass_to(data.size, lambda _, part, all_=passed: all_.append(part.copy()))
        assert np.array_equal(np.concatenate(passed), data)
        window.rewind()
        window.load_to(10)
        assert np.array_equal(window.data[:10], data[:10])
    window.begin(data.size, None)
    window.load_to(data.size)
    assert not window.data.any()


def test_large_tensors_of_every_geometry_pass_windows_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    old = {
        "flat": random_tensor("BF16", (24_000_007,), rng),
        "matrix": random_tensor("F32", (4096, 2560), rng),
        "same": random_tensor("U8", (9_000_000,), rng),
    }
    new = {name: changed(tensor, 0.01, rng) for name, tensor in old.items()} | {"same": old["same"]}
    base, target = write(tmp_path / "a.safetensors", old), write(tmp_path / "b.safetensors", new)
    for tiled in (False, True):
        frame = frame_of(base, target, tiled=tiled)
        assert frame == delta.encode(old, new, backend="cpu", tiled=tiled)
        apply_checkpoint(base, frame, tmp_path / "out.safetensors", backend="cpu")
        assert (tmp_path / "out.safetensors").read_bytes() == target.read_bytes()
    apply_checkpoint_in_place(base, frame, backend="cpu")
    assert base.read_bytes() == target.read_bytes()


def test_no_file_is_left_open(tmp_path: Path) -> None:
    old, new = small_pair()
    base = write_sharded(tmp_path / "base", old)
    frame = delta.encode(old, new, backend="cpu")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for i in range(5):
        apply_checkpoint(base, frame, tmp_path / f"out{i}", backend="cpu")
        with pytest.raises(GymfastError):
            apply_checkpoint(base, frame, tmp_path / f"out{i}", backend="cpu")
        with pytest.raises(FormatError):
            apply_checkpoint(base, frame[:-1], tmp_path / "never", backend="cpu")
        recover(base)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
