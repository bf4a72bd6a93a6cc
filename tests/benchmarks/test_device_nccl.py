"""The NCCL run on the CPU: with the double all is well, and a wrong byte is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cuda_module import load_module
from nccl_doubles import build

from benchmarks.device.facts import NO_GPU
from gymfast.channels import device_memory
from gymfast.channels.device_memory import DeviceMemory

ROOT = Path(__file__).parents[2]
NO_DEVICE = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def run(
    tmp_path: Path, double: Path, *arguments: str, kernels: ModuleType | None = None
) -> tuple[int, dict]:
    command = [sys.executable, "-m", "benchmarks.device.nccl", "--host", "--out", str(tmp_path)]
    command += ["--library", str(double), "--cuda-library", str(double), "--largest", "1048576"]
    if kernels is not None:
        command += ["--kernels", kernels.__file__]
    environment = os.environ | {"DOUBLE_SEGMENTS": str(tmp_path)}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    found = tmp_path / "nccl.json"
    assert found.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(found.read_text())


@pytest.mark.ci
def test_a_run_over_the_double_checks_all_and_writes_its_file(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kernels = load_module(tmp_path_factory.getbasetemp() / "cuda_module")
    status, document = run(
        tmp_path, build(tmp_path), "--ranks", "2,3", "--timeout-s", "20", kernels=kernels
    )
    assert status == 0, document
    assert document["schema"] == "gymfast-device-nccl/1"
    two, three = document["groups"]
    for group in (two, three):
        assert {phase["state"] for phase in group["phases"]} == {"done"}
        assert [(row["size"], row["is_registered"]) for row in group["rows"]] == [
            (1048576, False),
            (1048576, True),
        ]
        assert group["facts"]["registration"] == "window"
        assert group["facts"]["has_kernels"]
        assert [row["num_pieces"] for row in group["pieces"]] == [256, 1, 1]
        assert all(row["kernel_pack_gbps"] > 0 for row in group["pieces"])
        assert group["rows"][0]["time_us"] > 0
        assert group["facts"]["NCCL"] == "2.30.7"
    assert two["facts"]["shrink"] == "needs three ranks"
    assert three["facts"]["could_shrink"]
    assert three["facts"]["shrink_s"] < 20
    assert three["facts"]["registration after a loss"] == "window"


@pytest.mark.ci
def test_a_wrong_byte_makes_the_run_fail(tmp_path: Path) -> None:
    double = build(tmp_path, "wrong/libnccl_double.so", flags=("-O1", "-DWRONG_BYTE"))
    status, document = run(tmp_path, double, "--ranks", "2", "--timeout-s", "20")
    assert status == 1
    states = {phase["name"]: phase for phase in document["groups"][0]["phases"]}
    assert states["correctness"]["state"] == "failed"
    assert "1 bytes of root 1 are wrong" in states["correctness"]["note"]
    assert states["speed"]["state"] == "cut"


@pytest.mark.ci
@pytest.mark.parametrize("what", ["bytes", "digest"])
def test_a_kernel_that_does_not_do_as_torch_does_is_found(what: str) -> None:
    pytest.importorskip("torch")
    from benchmarks.device.nccl_rank import Options, RankRun

    class Kernels(SimpleNamespace):
        def move(self, bucket: Any, pieces: Any, tensors: Any, is_packing: bool) -> int:
            if what == "bytes":
                return 0
            twin = DeviceMemory("cpu", None)
            return int((twin.pack if is_packing else twin.unpack)(bucket, pieces, tensors)) + 1

    control = SimpleNamespace(rank=0, gather=lambda value, _: {0: value})
    run = RankRun(control, Options(1, largest=1 << 16, is_host=True))  # type: ignore[arg-type]
    run.pieces()
    assert run.findings.problems == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "PieceKernels", lambda *_: Kernels())
        run._kernels = Kernels()
        run.pieces()
    words = "come back with other bytes" if what == "bytes" else "the kernel and torch differ"
    assert len(run.findings.problems) == 3
    assert all(words in text for text in run.findings.problems), run.findings.problems


def test_the_script_says_in_one_sentence_that_there_is_no_gpu(tmp_path: Path) -> None:
    script = ROOT / "benchmarks/device/nccl_smoke.sh"
    environment = NO_DEVICE | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == NO_GPU
    said = done.stdout + done.stderr
    assert said.count("\n") == 1
    assert "this never ran" in said


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.device.nccl", "--host", "--library", "/no/nccl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == NO_GPU
    assert done.stderr.startswith("no NCCL was found: /no/nccl")
    assert done.stderr.endswith("this never ran\n")
