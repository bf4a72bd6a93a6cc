"""The CUDA kernels under sanitisers on the CPU: bounds, undefined behaviour, missing barriers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cuda_shim import ROOT, compile_shim

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]

SOURCE = ROOT / "tests/cuda/sanitised.cpp"
ASAN = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(factory: pytest.TempPathFactory, *flags: str, tsan: bool = False) -> Path:
    target = factory.mktemp("sanitised") / "sanitised"
    return compile_shim(target, *flags, program=SOURCE, tsan=tsan)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, "-O2")


@pytest.fixture(scope="module")
def asan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, *ASAN)


@pytest.fixture(scope="module")
def tsan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, "-O1", "-g", tsan=True)


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def printed(program: Path, *arguments: str) -> str:
    done = run(program, *arguments)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.endswith("180 cases\n")
    return done.stdout


def test_no_access_leaves_its_memory_and_nothing_is_undefined(plain: Path, asan: Path) -> None:
    assert printed(plain) == printed(asan)


def test_no_barrier_is_missing(plain: Path, tsan: Path) -> None:
    assert printed(plain, "few") == printed(tsan, "few")


def test_a_missing_barrier_is_a_race(tsan: Path) -> None:
    done = run(tsan, "race")
    assert done.returncode != 0
    assert "data race" in done.stderr
    assert run(tsan, "no-race").returncode == 0


def test_a_write_behind_a_tensor_is_seen(asan: Path) -> None:
    done = run(asan, "overflow")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_a_barrier_that_one_thread_does_not_reach_stops_the_shim(plain: Path) -> None:
    done = run(plain, "barrier")
    assert done.returncode != 0
    assert "no thread can go on" in done.stderr
