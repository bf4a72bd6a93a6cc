"""What is native compiles for Arm, and an emulated Arm CPU gives the same bits as this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CMAKE = Path(sys.executable).parent / "cmake"
ARM = [
    *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"),
    *("-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++", "-DCMAKE_EXE_LINKER_FLAGS=-static"),
]


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _build(folder: Path, *options: str, target: str = "print_blocks") -> Path:
    strict = ("-DGYMFAST_TESTS=ON", "-DGYMFAST_WARNINGS_AS_ERRORS=ON")
    _run(CMAKE, "-S", ROOT, "-B", folder, *strict, *options)
    _run(CMAKE, "--build", folder, "--parallel", "2", "--target", target)
    return folder / target


def test_emulated_arm_writes_the_same_bytes_as_every_instruction_set_here(tmp_path: Path) -> None:
    native = _build(tmp_path / "native")
    printed = {name: _run(native, name) for name in _run(native).split()}
    arm = _build(tmp_path / "arm", *ARM)
    printed["arm"] = _run("qemu-aarch64-static", arm, _run("qemu-aarch64-static", arm).split()[0])
    assert len(printed["arm"].splitlines()) == 3 * 4 * 8 * 3
    assert len(set(printed.values())) == 1


def test_emulated_arm_computes_the_numbers_of_the_simulator(tmp_path: Path) -> None:
    """Arm has one instruction for a * b + c, and compilers use it unless they are told not to."""
    native = _run(_build(tmp_path / "native", target="print_numbers"))
    arm = _build(tmp_path / "arm", *ARM, target="print_numbers")
    assert _run("qemu-aarch64-static", arm) == native
    assert [line.split()[0] for line in native.splitlines()] == ["log", "exp", "normal_quantile"]
