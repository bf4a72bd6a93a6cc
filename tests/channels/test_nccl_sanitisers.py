"""The C++ of the channel over NCCL, and the double, under sanitisers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from nccl_doubles import ROOT, build, compile_cpp

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

SOURCES = [
    ROOT / "tests/channels/nccl_sanitised.cpp",
    ROOT / "csrc/nccl/arena.cpp",
    ROOT / "csrc/nccl/communicator.cpp",
    ROOT / "csrc/nccl/loader.cpp",
]
FLAGS = {
    "address": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-g", "-fsanitize=thread"),
}


@pytest.mark.parametrize("sanitiser", FLAGS)
def test_no_sanitiser_speaks(sanitiser: str, tmp_path: Path) -> None:
    flags = FLAGS[sanitiser]
    double = build(tmp_path, flags=flags)
    program = tmp_path / "program"
    compile_cpp(
        *("-std=c++20", "-Wall", "-Wextra", "-Werror", *flags, "-I", str(ROOT / "csrc")),
        *map(str, SOURCES),
        *("-pthread", "-ldl", "-o", str(program)),
    )
    environment = os.environ | {"DOUBLE_SEGMENTS": str(tmp_path)}
    done = subprocess.run(
        [program, str(double)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    assert done.stdout.endswith("0 wrong\n")
    assert "rank 0: ncclCommShrink was not complete by its deadline" in done.stdout
    assert "rank 0: ncclBroadcast: unhandled system error (result 2)" in done.stdout
