"""The codec under address and undefined-behaviour sanitisers, on every instruction set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CMAKE = Path(sys.executable).parent / "cmake"
SANITISE = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitised")
    options = ("-DGYMFAST_TESTS=ON", "-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={SANITISE}")
    _run(CMAKE, "-S", ROOT, "-B", folder, "-DCMAKE_CXX_COMPILER=clang++-19", *options)
    _run(CMAKE, "--build", folder, "--parallel", "2", "--target", "print_blocks")
    return folder / "print_blocks"


def test_no_sanitiser_speaks_and_all_instruction_sets_agree(program: Path) -> None:
    printed = {_run(program, name) for name in _run(program).split()}
    assert len(printed) == 1
