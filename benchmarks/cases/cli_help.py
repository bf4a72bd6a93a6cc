"""`gymfast --help` in a fresh process, beside a bare interpreter: the target is under 250 ms.

pytest benchmarks/cases/cli_help.py -o addopts=--benchmark-columns=min,median,max
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

CALLS = {
    "bare interpreter": ["-c", "pass"],
    "gymfast --version": ["-m", "gymfast", "--version"],
    "gymfast --help": ["-m", "gymfast", "--help"],
    "gymfast delta --help": ["-m", "gymfast", "delta", "--help"],
    "gymfast delta encode --help": ["-m", "gymfast", "delta", "encode", "--help"],
}


@pytest.mark.parametrize("name", CALLS)
def test_start(name: str, benchmark: BenchmarkFixture) -> None:
    command = [sys.executable, *CALLS[name]]

    def call() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, capture_output=True, check=True)

    done = benchmark.pedantic(call, rounds=21, warmup_rounds=2)
    assert done.stderr == b""
