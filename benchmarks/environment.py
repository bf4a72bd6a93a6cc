"""What a figure was measured on; stamped into each JSON and CSV. No names of hosts or people."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path

from benchmarks.bounds import FLAGS, compiler

PACKAGES = ("numpy", "zstandard", "xxhash", "pcodec", "blosc2", "lz4", "pytest-benchmark", "torch")
NEEDED = {  # module and distribution of what the cases import
    "pytest": "pytest",
    "pytest_benchmark": "pytest-benchmark",
    "xxhash": "xxhash",
    "zstandard": "zstandard",
    "pcodec": "pcodec",
    "blosc2": "blosc2",
    "lz4": "lz4",
}
_ROOT = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """Machine, compiler, versions and commit, as text."""
    found = {
        "cpu": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "?"),
        "l3_bytes": str(l3_bytes()),
        "memory_gib": str(round(_memory_bytes() / 2**30)),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "compiler": f"{_first_line([compiler(), '--version'])} {' '.join(FLAGS[:2])}",
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for package in ("gymfast", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["cpu_target"] = _cpu_target()
    return found


def missing_packages() -> list[str]:
    """Distributions that are needed and absent; asked before anything of them is imported."""
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


def cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def l3_bytes() -> int:
    """Size of the last-level cache that one core sees; 32 MiB if the system does not say."""
    text = _read("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(text[:-1]) * 1024 if text.endswith("K") else 32 << 20


def huge_page_share() -> float:
    """Share of this process's memory that lies on huge pages now."""
    kib = {"Rss": 0, "AnonHugePages": 0}
    for line in _read("/proc/self/smaps_rollup").splitlines():
        key, _, rest = line.partition(":")
        if key in kib:
            kib[key] = int(rest.split()[0])
    return kib["AnonHugePages"] / max(1, kib["Rss"])


def _cpu_target() -> str:
    try:
        from gymfast import _core
    except ImportError:
        return "none: gymfast._core is not built"
    return str(_core.cpu_target())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _commit() -> str:
    def git(*arguments: str) -> str:
        return _first_line(["git", "-C", str(_ROOT), *arguments])

    commit = git("rev-parse", "--short=12", "HEAD")
    is_changed = git("status", "--porcelain", "--", "csrc", "gymfast", "benchmarks/*.py")
    return f"{commit or 'unknown'}{' with changes' if is_changed else ''}"


def _first_line(command: list[str]) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.splitlines()[0] if found.stdout else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
