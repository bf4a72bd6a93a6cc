"""One test per public report about exactness, names and memory (families A, B and G)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from delta_checkpoints import read, write
from delta_weights import copies, each_backend, small_pair

import gymfast.delta as delta
from gymfast.delta import Encoder, State
from gymfast.delta.checkpoint import apply_checkpoint
from gymfast.errors import ChecksumError, CoverageError, FormatError
from gymfast.testing.compare import assert_bits_equal

BF16_ONE, BF16_NAN = 0x3F80, 0x7FC1


def sync(old, new, held, backend: str = "cpu"):
    """What the receiver reports after one version."""
    return delta.apply(held, delta.encode(old, new, backend=backend), backend=backend)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().view(torch.int16)


@each_backend
def test_R01_sparse_updates_of_fused_experts_arrive_and_wrong_live_bytes_are_found(backend) -> None:
    rng = np.random.default_rng(0)
    experts = torch.randn(6, 8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    live = {"experts.w13": experts.clone()}
    state = State.attach(live, backend=backend)
    new = {"experts.w13": experts.clone()}
    at = torch.from_numpy(rng.random(experts.shape) < 0.01)
    bits(new["experts.w13"])[at] ^= 1
    delta.apply(state, delta.encode({"experts.w13": experts}, new, backend=backend))
    assert_bits_equal(live, new)
    state.verify()
    bits(live["experts.w13"]).copy_(bits(live["experts.w13"]).roll(1, 0))  # experts in wrong order
    with pytest.raises(ChecksumError, match=r"experts\.w13"):
        state.verify()


@each_backend
def test_R02_nan_payload_and_integer_buffers_arrive_bit_equal(backend: str) -> None:
    old = {
        "steps": torch.tensor([1, 2**62, -5]),
        "packed": torch.arange(64, dtype=torch.uint8),
        "norm": torch.full((8,), BF16_ONE, dtype=torch.int16).view(torch.bfloat16),
    }
    new = {name: value.clone() for name, value in old.items()}
    new["steps"][1] = -(2**63) + 1
    new["packed"][7] = 255
    bits(new["norm"])[3] = BF16_NAN
    bits(new["norm"])[4] = -(2**15)  # -0.0
    held = {name: value.clone() for name, value in old.items()}
    assert sync(old, new, held, backend).num_changed == 5
    assert_bits_equal(held, new)
    assert bits(held["norm"])[3] == BF16_NAN


def test_R04_the_union_of_several_steps_arrives() -> None:
    old, _ = small_pair()
    state, held = State.copy_of(old, backend="cpu"), copies(old)
    trained = copies(old)
    for step in range(3):
        trained["embed"].data[100 * step : 100 * step + 50] ^= 1
    encoder = Encoder(state)
    delta.apply(held, b"".join(encoder.encode(trained)), backend="cpu")
    encoder.commit()
    assert_bits_equal(held, trained)


def test_R05_changes_outside_the_optimizer_are_found_in_the_bytes() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held = {name: value.clone() for name, value in model.state_dict().items()}
    state = State.copy_of(held, backend="cpu")
    encoder = Encoder(state)
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    average = {name: value.clone() for name, value in model.state_dict().items()}
    edits = (
        lambda w: w.clamp_(-0.05, 0.05),
        lambda w: w.lerp_(average["weight"], 0.5),
        lambda w: w[3, 5].fill_(7.0),
    )
    for edit in edits:
        edit(model.weight.data)
        frame = b"".join(encoder.encode(model.state_dict()))
        encoder.commit()
        delta.apply(held, frame, backend="cpu")
        assert_bits_equal(held, model.state_dict())


@each_backend
def test_R06_every_tensor_travels_in_its_own_dtype(backend: str) -> None:
    old = {
        "router.bias": torch.full((8,), 1.0, dtype=torch.float32),
        "weight": torch.ones(4, 4, dtype=torch.bfloat16),
        "index": torch.arange(5, dtype=torch.int32),
    }
    new = {name: value.clone() for name, value in old.items()}
    new["router.bias"] += 2**-20  # lost by a cast to BF16
    new["index"][0] = 9
    held = {name: value.clone() for name, value in old.items()}
    sync(old, new, held, backend)
    assert_bits_equal(held, new)
    assert {name: value.dtype for name, value in held.items()} == {
        name: value.dtype for name, value in old.items()
    }


@each_backend
def test_R09_blocks_of_zeros_and_negative_zeros_keep_their_bits_in_fp8(backend: str) -> None:
    old = {"w": torch.ones(128, 128).to(torch.float8_e4m3fn), "scale": torch.ones(1)}
    for sign in (1.0, -1.0):
        new = {"w": (sign * torch.zeros(128, 128)).to(torch.float8_e4m3fn), "scale": torch.ones(1)}
        held = {name: value.clone() for name, value in old.items()}
        sync(old, new, held, backend)
        assert_bits_equal(held, new)
        assert torch.isfinite(held["scale"]).all()


@each_backend
def test_R10_an_export_that_is_not_the_base_of_the_engine_forces_an_anchor(backend: str) -> None:
    engine = {"embed": np.arange(40 * 8, dtype=np.uint16).reshape(40, 8)}
    padded = {"embed": np.vstack([engine["embed"], np.zeros((128, 8), np.uint16)])}
    trimmed = {"embed": padded["embed"][:40].copy()}
    trimmed["embed"][39, 7] ^= 1  # not byte-exact
    new = {"embed": engine["embed"] + 1}
    for base, error in ((padded, FormatError), (trimmed, ChecksumError)):
        new_export = {"embed": np.resize(new["embed"], base["embed"].shape)}
        held = copies(engine)
        with pytest.raises(error, match=r"nothing was written.*anchor"):
            sync(base, new_export, held, backend)
        assert_bits_equal(held, engine)
    delta.restore(held, delta.encode(None, new, backend=backend), backend=backend)
    assert_bits_equal(held, new)


@each_backend
def test_R13_a_tie_reaches_both_storages_or_is_refused(backend: str) -> None:
    weight = torch.arange(32, dtype=torch.float32)
    tied = {"embed": weight, "head": weight}
    new_weight = weight.clone()
    new_weight[3] = 9
    new_tied = {"embed": new_weight, "head": new_weight}
    two = {"embed": weight.clone(), "head": weight.clone()}
    addresses = {name: value.data_ptr() for name, value in two.items()}
    sync(tied, new_tied, two, backend)
    assert_bits_equal(two, new_tied)
    assert {name: value.data_ptr() for name, value in two.items()} == addresses
    one = dict.fromkeys(("embed", "head"), weight.clone())
    only_embed = {"embed": new_weight, "head": weight.clone()}
    with pytest.raises(CoverageError, match="'embed' and 'head' share their memory here"):
        sync({n: weight.clone() for n in tied}, only_embed, one, backend)
    assert torch.equal(one["head"], weight)


@each_backend
def test_R15_unknown_extra_and_removed_names_are_told_apart(backend: str) -> None:
    old, new = small_pair()
    for held, text in (
        ({"embed": old["embed"], "bias": old["bias"]}, "1 tensors of the frame are not here"),
        ({**old, "mtp.head": old["bias"]}, "tensors here are not in the frame, first 'mtp.head'"),
    ):
        held = copies(held)
        before = copies(held)
        with pytest.raises(CoverageError, match=text):
            sync(old, new, held, backend)
        assert_bits_equal(held, before)
    held = copies(old)
    del new["index"]
    assert sync(old, new, held, backend).removed == ("index",)
    assert_bits_equal(held, new)


@each_backend
def test_R16_a_rename_that_was_forgotten_is_an_error_before_any_write(backend: str) -> None:
    old = {f"layers.{i}.{part}": np.full(4, i, np.float32) for i in range(9) for part in "qkv"}
    new = {name: value + 1 for name, value in old.items()}
    held = {name.replace(".q", ".query"): value.copy() for name, value in old.items()}
    with pytest.raises(CoverageError, match=r"9 tensors of the frame are not here, first 'layers"):
        sync(old, new, held, backend)
    assert all(np.array_equal(held[n.replace(".q", ".query")], v) for n, v in old.items())


@each_backend
def test_R19_a_wrapper_prefix_is_named_with_the_nearest_names(backend: str) -> None:
    old, new = small_pair()
    held = {f"language_model.{name}": tensor for name, tensor in copies(old).items()}
    with pytest.raises(CoverageError) as error:
        sync(old, new, held, backend)
    text = str(error.value)
    assert "first 'bias' (nearest: 'language_model.bias', 'language_model." in text
    assert "they differ by the prefix 'language_model.'" in text
    assert text.count("'language_model.") >= 4


@each_backend
def test_R21_each_model_of_an_engine_has_its_own_coverage(backend: str) -> None:
    old, new = small_pair()
    target = copies(old)
    draft = {"embed": old["embed"].copy(), "mtp.proj": old["bias"].copy()}
    new_draft = {"embed": new["embed"], "mtp.proj": new["bias"]}
    frame = delta.encode(old, new, backend=backend)
    delta.apply(target, frame, backend=backend)
    with pytest.raises(CoverageError, match=r"first 'mtp\.proj'"):
        delta.apply(draft, frame, backend=backend)
    before = State.reading(draft, backend=backend).root
    report = sync(draft, new_draft, draft, backend)
    assert report.base_root == before
    assert_bits_equal(draft, new_draft)


@each_backend
def test_R23_a_version_without_tensors_is_refused_by_writer_and_reader(backend: str) -> None:
    old, _ = small_pair()
    for base in (old, None):
        with pytest.raises(ValueError, match="empty"):
            delta.encode(base, {}, backend=backend)
    for base in (old, None):
        frame = frame_that_removes_everything(base, backend)
        held = copies(old)
        with pytest.raises(CoverageError, match="leaves no tensor"):
            delta.apply(held, frame, backend=backend)
        assert_bits_equal(held, old)


def frame_that_removes_everything(base, backend: str) -> bytes:
    """What a broken writer would send."""
    from gymfast.delta.backends import select
    from gymfast.delta.frame import EndEntry, FrameWriter, Kind, Status, TensorRecord, root_of

    writer, state = FrameWriter(select(backend).check64), State.reading(base or {}, backend=backend)
    sections = [writer.header(0, len(state.slots))]
    for name, slot in state.slots.items():
        sections.append(writer.tensor(TensorRecord(Kind.REMOVED, name, *slot.spec, slot.geometry)))
    ends = [EndEntry(Status.REMOVED, slot.digest) for slot in state.slots.values()]
    return b"".join([*sections, writer.end(state.root, root_of([]), ends)])


@each_backend
def test_R24_unchanged_and_removed_are_different_records(backend: str, tmp_path: Path) -> None:
    old, new = small_pair()
    unchanged = {"embed": new["embed"], "bias": old["bias"], "index": old["index"]}
    removed = {"embed": new["embed"], "bias": old["bias"]}
    base = write(tmp_path / "base.safetensors", old)
    for i, version in enumerate((unchanged, removed)):
        frame = delta.encode(old, version, backend=backend)
        status = {t.name: t.status for t in delta.inspect(frame).tensors}
        assert status["bias"] == "unchanged"
        assert status["index"] == ("unchanged" if "index" in version else "removed")
        out = tmp_path / f"out{i}.safetensors"
        apply_checkpoint(base, frame, out, backend=backend)
        assert_bits_equal(read(out), version)


@each_backend
def test_R71_views_that_are_not_contiguous_arrive_bit_equal(backend: str) -> None:
    grid = torch.arange(96, dtype=torch.float32).reshape(8, 12)
    new = {
        "transposed": grid.T,
        "strided": grid[::2],
        "expanded": grid[:1].expand(5, 12),
        "channels-last": grid.reshape(1, 2, 4, 12).contiguous(memory_format=torch.channels_last),
        "zero-stride": grid[0, :1].expand(7),
    }
    held = {name: torch.zeros(value.shape) for name, value in new.items()}
    sync({n: v.clone() for n, v in held.items()}, new, held, backend)
    assert all(torch.equal(held[name], value) for name, value in new.items())


def peak_of(code: str, *arguments: str) -> dict[str, int]:
    """What a fresh process prints as JSON; it has `peak()`, bytes of memory above the start."""
    start = """
import json, re, sys
import numpy as np
import gymfast.delta as delta
from gymfast.delta import checkpoint
def high_water():  # getrusage would tell that of the parent process
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", file.read())[1])
def peak(): return high_water() - first
delta.apply({}, delta.encode(None, {"warm": np.ones(9)}), threads=2)
first = high_water()
"""
    done = subprocess.run(
        [sys.executable, "-c", start + code, *arguments],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


def test_R90_the_peak_of_a_resident_encoder_is_its_plan() -> None:
    size = 2**28
    code = f"""
rng = np.random.default_rng(0)
new = {{f"w{{i}}": rng.integers(0, 2**16, {size} // 16, np.uint16) for i in range(8)}}
state = delta.State.copy_of(new)
for array in new.values():
    array[rng.integers(0, array.size, array.size // 100)] ^= 1
encoder = delta.Encoder(state, threads=2)
frame = b"".join(encoder.encode(new))
print(json.dumps({{"peak": peak(), "changed": encoder.stats.num_changed, "frame": len(frame)}}))
"""
    seen = peak_of(code)
    scratch = 2 * 48 * 2**20  # of two threads: docs/wire-format.md section 9
    plan = 2 * size + 6 * seen["changed"] + seen["frame"] + scratch
    assert seen["peak"] <= 1.1 * plan


def sparse_checkpoint(path: Path, num_bytes: int, spots: dict[int, bytes]) -> Path:
    """A file with one U8... tensor of zeros but for a few spots; it takes no room on the disk."""
    from gymfast.delta.safetensors_header import build_header

    start, header = build_header([("experts", "BF16", (num_bytes // 2,))], {})
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + num_bytes)
        for at, data in spots.items():
            file.seek(header.tensors[0].start + at)
            file.write(data)
    return path


@pytest.fixture
def roomy_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if there is one: holes of sparse files cost nothing there."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_R92_a_tensor_of_6_GiB_is_streamed_within_256_MiB(roomy_path: Path) -> None:
    num_bytes, mib = 6 * 2**30, 2**20
    ends = {0: b"\x01", num_bytes // 2: b"\x02\x03", num_bytes - 2: b"\x04\x05"}
    old = sparse_checkpoint(roomy_path / "old.safetensors", num_bytes, {77_777_778: b"\x07"})
    new = sparse_checkpoint(roomy_path / "new.safetensors", num_bytes, ends)
    code = """
old, new, frame = sys.argv[1:]
with open(frame, "wb") as out:
    stats = checkpoint.encode_checkpoint(old, new, out, threads=2)
report = checkpoint.apply_checkpoint_in_place(old, frame, threads=2)
print(json.dumps({"peak": peak(), "changed": report.num_changed, "frame": stats.frame_bytes}))
"""
    seen = peak_of(code, str(old), str(new), str(roomy_path / "frame"))
    assert seen["changed"] == 4
    assert seen["frame"] < 10_000
    assert seen["peak"] <= 256 * mib
    for at, data in {**ends, 77_777_778: b"\x00"}.items():
        with old.open("rb") as file:
            file.seek(old.stat().st_size - num_bytes + at)
            assert file.read(len(data)) == data


def test_R94_versions_leave_no_memory_behind() -> None:
    code = """
rng = np.random.default_rng(0)
weights = {"w": rng.integers(0, 2**16, 2**18, np.uint16)}
held, state = {"w": weights["w"].copy()}, delta.State.copy_of(weights)
encoder, receiver = delta.Encoder(state, threads=1), delta.State.attach(held, threads=1)
for step in range(120):
    if step == 20:
        before = peak()
    weights["w"][rng.integers(0, 2**18, 2600)] ^= 1
    delta.apply(receiver, b"".join(encoder.encode(weights)))
    encoder.commit()
print(json.dumps({"grown": peak() - before}))
"""
    assert peak_of(code)["grown"] <= 100 * 10_000
