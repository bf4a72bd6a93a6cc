"""Fixtures of the command line tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_commands import Gymfast, Result
from safetensors.numpy import save_file

from gymfast.cli import main

WIDTH = 80


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Width 80, no colour, and none of the variables of gymfast."""
    for name in list(os.environ):
        if name.startswith("GYMFAST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture
def gymfast(capfd: pytest.CaptureFixture[str]) -> Gymfast:
    """Run `gymfast` in this process; every run also checks what holds for all of them."""

    def run(*args: str | Path) -> Result:
        capfd.readouterr()
        code = main([str(arg) for arg in args])
        result = Result(code, *capfd.readouterr())
        assert "Traceback" not in result.out + result.err
        assert result.err.count("Error: ") == (0 if code == 0 else 1), result
        return result

    return run


@pytest.fixture
def gymfast_process() -> Gymfast:
    """Run `gymfast` in a process of its own; keyword arguments are those of subprocess.run."""

    def run(*args: str | Path, **kwargs: Any) -> Result:
        command = [sys.executable, "-m", "gymfast", *map(str, args)]
        options = {"capture_output": True, "text": True, "timeout": 60, **kwargs}
        done = subprocess.run(command, check=False, **options)
        assert "Traceback" not in (done.stdout or "") + (done.stderr or "")
        return Result(done.returncode, done.stdout or "", done.stderr or "")

    return run


Weights = dict[str, "np.ndarray[Any, Any]"]


def make_weights(seed: int = 0) -> Weights:
    """A few tensors of several dtypes, 0-dim and empty ones among them."""
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.integers(0x3C00, 0x3F00, (64, 48), dtype=np.uint16),
        "layers.0.up.weight": rng.standard_normal((32, 16), dtype=np.float32),
        "layers.0.scale": np.array(0.5, np.float32),
        "layers.0.ids": np.arange(7, dtype=np.int64),
        "layers.0.none": np.zeros((0, 4), dtype=np.float16),
    }


def step(weights: Weights) -> Weights:
    """The weights after a small update."""
    after = {name: value.copy() for name, value in weights.items()}
    after["embed.weight"].reshape(-1)[::37] += 1
    after["layers.0.up.weight"].reshape(-1)[5] = np.float32("nan")
    return after


def save_sharded(folder: Path, weights: Weights) -> Path:
    """A checkpoint directory of two shards with an index, as Hugging Face writes them."""
    folder.mkdir()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:2]}
    shards["model-00002-of-00002.safetensors"] = names[2:]
    for shard, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / shard)
    size = sum(value.nbytes for value in weights.values())
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with old and new weights as a file and as a sharded checkpoint."""
    monkeypatch.chdir(tmp_path)
    old = make_weights()
    new = step(old)
    save_file(old, tmp_path / "old.safetensors")
    save_file(new, tmp_path / "new.safetensors")
    save_sharded(tmp_path / "old", old)
    save_sharded(tmp_path / "new", new)
    return tmp_path


@pytest.fixture
def frame(files: Path, gymfast: Gymfast) -> Path:
    """The frame between the weights of `files`."""
    result = gymfast("delta", "encode", "old.safetensors", "new.safetensors", "-o", "step.gfd")
    assert result.code == 0, result
    return files / "step.gfd"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a filesystem of 64 KiB; skipped where mounting is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs kernel feature mount of a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
