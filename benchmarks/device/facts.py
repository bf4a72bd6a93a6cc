"""What the machine has: GPU, driver, CUDA and the packages; nothing here needs a GPU or torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
import sys

PACKAGES = ("torch", "triton", "nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12")
NO_GPU = 3  # exit status


def num_gpus() -> int:
    """CUDA devices that the driver reports; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def facts() -> dict[str, str]:
    """GPU, driver, tools and versions of packages, as text; "none" for what is not there."""
    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    found = {
        "gpu": _last_line(query),
        "nvcc": _last_line(("nvcc", "--version")),
        "compute_sanitizer": _last_line(("compute-sanitizer", "--version")),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def main() -> int:
    """Says what is there; 3 if that is no GPU."""
    if not num_gpus():
        print("no GPU here (the CUDA driver reports none): this never ran", file=sys.stderr)
        return NO_GPU
    for name, value in facts().items():
        print(f"{name}: {value}")
    return 0


def _last_line(command: tuple[str, ...]) -> str:
    if shutil.which(command[0]) is None:
        return "none"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no answer"


if __name__ == "__main__":
    sys.exit(main())
