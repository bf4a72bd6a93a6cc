"""The updater of slime and miles with weights on a GPU, which is CPU memory and the shim's kernels.

What crosses to the host is counted: about what changed, not the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import FakeCuda, FakePinned, install
from safetensors.torch import save_file
from slime_engine import apply_version, read_tensors

from gymfast.delta.backends import auto
from gymfast.errors import BudgetError, CoverageError, GymfastError, MissingDependencyError
from gymfast.integrations import device_twin
from gymfast.integrations.delta_stream import DeltaStream, StreamSettings
from gymfast.integrations.ranks import Ranks

SHAPES = {"a.weight": (256, 512), "b.weight": (128, 512), "norm": (512,), "empty": (0, 4)}
Weights = dict[str, torch.Tensor]
places = pytest.mark.parametrize("place", ["beside", "pinned"])


class Counted:
    """Bytes that crossed to the host."""

    num_bytes = 0


@pytest.fixture(autouse=True)
def crossed(cuda_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Counted:
    install(cuda_module, monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    counted, cpu, copy = Counted(), FakeCuda.cpu, FakePinned.copy_

    def count_cpu(self: FakeCuda) -> torch.Tensor:
        counted.num_bytes += self.numel() * self.element_size()
        return cpu(self)

    def count_copy(self: FakePinned, other: torch.Tensor, **options: bool) -> FakePinned:
        if isinstance(other, FakeCuda):
            counted.num_bytes += other.numel() * other.element_size()
        return copy(self, other, **options)

    monkeypatch.setattr(FakeCuda, "cpu", count_cpu)
    monkeypatch.setattr(FakePinned, "copy_", count_copy)
    return counted


def base() -> Weights:
    made = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=made).bfloat16() for n, s in SHAPES.items()}


def step(weights: Weights, seed: int, share: float = 0.01, names: str = "") -> Weights:
    rng, new = np.random.default_rng(seed), {n: w.clone() for n, w in weights.items()}
    for name in (n for n in new if names in n):
        bits = new[name].view(-1).view(torch.int16).numpy()
        bits[rng.random(bits.size) < share] ^= 1
    return new


class Run:
    """One rank that writes versions of weights on a device; `live` are the weights."""

    def __init__(self, folder: Path, place: str, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "base").mkdir()
        save_file(base(), folder / "base" / "model.safetensors")
        self.folder, self.live = folder, base()
        self.on_device = place != "cpu"
        settings: dict[str, Any] = {"encoding": "xor", "algorithm": "xxh3-128", "threads": 2}
        settings |= {"host_memory_bytes": None, "snapshot": "auto" if place == "cpu" else place}
        self.stream = DeltaStream(
            StreamSettings(folder / "versions", folder / "base", **settings | options),
            Ranks(0, lambda value: [value]),
        )
        self.stream.wipe()
        self.stream.seed(self.walk)

    def walk(self, add: Callable[[str, Any], None]) -> None:
        for name, tensor in self.live.items():
            add(name, tensor.clone().as_subclass(FakeCuda) if self.on_device else tensor)

    def write(self, number: int, weights: Weights) -> Path:
        self.live = weights
        self.stream.write(number, self.walk)
        return self.folder / "versions" / f"weight_v{number:06d}"


def files_of(version: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in version.iterdir()}


@places
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_versions_from_the_device_are_those_from_the_host(
    place: str, encoding: str, tmp_path: Path
) -> None:
    runs = [Run(tmp_path / name, name, encoding=encoding) for name in (place, "cpu")]
    weights, state = base(), read_tensors(tmp_path / "cpu" / "base")
    for number, share in enumerate((0.01, 0.0, 0.5, 0.02), 1):
        weights = step(weights, number, share)
        versions = [run.write(number, weights) for run in runs]
        assert files_of(versions[0]) == files_of(versions[1])
        state |= apply_version(versions[0], number, state)
        for run in runs:
            run.stream.promote()
    expected = {n: w.reshape(-1).view(torch.uint8).numpy().tobytes() for n, w in weights.items()}
    assert state == expected


@places
def test_what_changed_crosses_to_the_host_and_not_the_model(
    place: str, tmp_path: Path, crossed: Counted
) -> None:
    run = Run(tmp_path, place)
    model_bytes = sum(w.numel() * w.element_size() for w in base().values())
    crossed.num_bytes = 0
    weights = step(base(), 1)
    run.write(1, weights)
    num_changed = sum(int((weights[name] != old).sum()) for name, old in base().items())
    assert num_changed > 1500
    # Under 2 bytes a change, the positions and steps; and tables of sections for each tensor.
    assert 0 < crossed.num_bytes < 2 * num_changed + 200 * len(SHAPES)
    assert crossed.num_bytes < model_bytes / 40
    crossed.num_bytes = 0
    run.stream.promote()
    assert crossed.num_bytes < 200 * len(SHAPES)
    run.write(2, step(weights, 2, names="norm"))
    assert crossed.num_bytes < 1000


@places
def test_a_version_that_is_not_promoted_is_encoded_again_against_the_same_state(
    place: str, tmp_path: Path
) -> None:
    run, other = Run(tmp_path / "a", place), Run(tmp_path / "b", "cpu")
    run.write(1, step(base(), 1))
    run.stream.abandon()
    weights = step(base(), 2)
    assert files_of(run.write(1, weights)) == files_of(other.write(1, weights))
    run.stream.promote()
    other.stream.promote()
    weights = step(weights, 3)
    assert files_of(run.write(2, weights)) == files_of(other.write(2, weights))


@places
def test_bytes_that_come_damaged_are_not_published(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, place)
    encode = device_twin.encode

    def damaged(*arguments: Any, **options: Any) -> bytes:
        frame = bytearray(encode(*arguments, **options))
        frame[len(frame) // 2] ^= 1
        return bytes(frame)

    with monkeypatch.context() as patch:
        patch.setattr(device_twin, "encode", damaged)
        with pytest.raises(GymfastError):
            run.write(1, step(base(), 1))
    run.write(1, step(base(), 1))


def test_the_place_follows_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    size = sum(w.numel() * w.element_size() for w in base().values())
    for number, (free, said) in enumerate([(4 * size, "beside"), (4 * size - 4, "pinned")]):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        caplog.clear()
        Run(tmp_path / str(number), "auto")
        assert f"the snapshot of {size} bytes of cuda:0 lies {said}" in caplog.text


def test_without_a_back_end_for_the_device_tensors_are_copied_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise MissingDependencyError(f"no {name} here")

    monkeypatch.setattr(auto, "select", missing)
    run, other = Run(tmp_path / "a", "auto"), Run(tmp_path / "b", "cpu")
    assert "every tensor is copied to the host at each update" in caplog.text
    weights = step(base(), 1)
    assert files_of(run.write(1, weights)) == files_of(other.write(1, weights))
    with pytest.raises(MissingDependencyError, match="no cuda here"):
        Run(tmp_path / "c", "beside")


def test_pinned_memory_counts_as_it_is_rounded(tmp_path: Path) -> None:
    size = sum(w.numel() * w.element_size() for w in base().values())
    with pytest.raises(BudgetError, match=r"the snapshot of tensor"):
        Run(tmp_path / "0", "pinned", host_memory_bytes=size - 1)
    Run(tmp_path / "1", "pinned", host_memory_bytes=size)  # all sizes are powers of two


def test_a_tensor_of_another_dtype_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "beside")
    changed = base() | {"norm": base()["norm"].view(torch.float16)}
    with pytest.raises(CoverageError, match=r"'norm' was BF16 \(512,\) and is F16"):
        run.write(1, changed)
    run.write(1, step(base(), 1))
