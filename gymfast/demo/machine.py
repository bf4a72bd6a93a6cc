"""What is known about the machine without asking anything but the system's own files."""

from __future__ import annotations

import importlib
import os
import platform
import re
from pathlib import Path

import numpy as np

from gymfast.demo.result import Machine

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def describe_machine(torch_version: str, zstd: str | None) -> Machine:
    """The machine of this run."""
    return Machine(
        cpu=_cpu_name(),
        num_cores=_num_cores(),
        cache_bytes=_last_cache_bytes(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        numpy=np.__version__,
        torch=torch_version,
        zstd=zstd,
        instruction_set=_instruction_set(),
    )


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _last_cache_bytes() -> int | None:
    """Size of the largest cache of the first core; None where the system does not tell."""
    sizes = []
    for path in _CACHES.glob("index*/size"):
        match = re.fullmatch(r"(\d+)K", path.read_text(encoding="ascii").strip())
        if match:
            sizes.append(int(match.group(1)) * 1024)
    return max(sizes, default=None)


def _instruction_set() -> str:
    """Target that the codec's kernels run on."""
    try:
        core = importlib.import_module("gymfast._core")
    except ImportError:
        return "reference"
    return str(core.cpu_target())
