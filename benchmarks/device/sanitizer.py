"""One small run of every kernel under compute-sanitizer, in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck")
_NOT_SUPPORTED = "Device not supported"  # in its own words


def is_there() -> bool:
    return shutil.which(PROGRAM) is not None


def sanitize(tool: str, arguments: list[str], timeout_s: float) -> str:
    """What the tool found wrong; empty if nothing.

    Raises subprocess.TimeoutExpired if the time was too short, OSError where the tool cannot
    watch this device.
    """
    with tempfile.TemporaryDirectory() as folder:
        driver = [sys.executable, "-m", "benchmarks.device.codec", "--out", folder, *arguments]
        # Calls that fail are refused by the module; torch makes some that it expects to fail.
        watch = [PROGRAM, "--tool", tool, "--error-exitcode", "77", "--report-api-errors", "no"]
        status, text = _run([*watch, *driver], timeout_s)
    if status and _NOT_SUPPORTED in text:
        raise OSError(f"{PROGRAM}: {_NOT_SUPPORTED}")
    return f"exit status {status}: {text[-3000:]}" if status else ""


def _run(command: list[str], timeout_s: float) -> tuple[int, str]:
    """Exit status and output; the tool and what it watches end together."""
    with subprocess.Popen(
        command,
        # Allocations of their own, so that memcheck knows where each tensor ends.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, text
