"""Plain copies, compares and reads on the same buffers, and the codec's fused pass alone.

bounds.cpp and fused.cpp are compiled on the fly.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]

_HERE = Path(__file__).parent
_CSRC = _HERE.parent / "csrc"
SOURCES = [_HERE / "bounds.cpp", _HERE / "fused.cpp", _CSRC / "format" / "digest.cpp"]
FLAGS = ["-O3", "-march=native", "-std=c++20", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
_INCLUDES = [f"-I{_CSRC}", f"-I{_HERE}"]


def compiler() -> str:
    """The system's C++ compiler: $CXX, c++, g++ or clang++."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise RuntimeError("no C++ compiler found (tried $CXX, c++, g++, clang++): install one")


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="gymfast-bounds-") as folder:
        output = Path(folder) / "bounds.so"
        # On x86 gcc would take 256-bit vectors; the codec under test uses 512.
        wide = ["-mprefer-vector-width=512"] if os.uname().machine == "x86_64" else []
        command = [compiler(), *FLAGS, *_INCLUDES, *wide, *map(str, SOURCES), "-o", str(output)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(output))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, arguments, result in (
        ("bounds_memcpy", [pointer, pointer, size, number], None),
        ("bounds_stream_copy", [pointer, pointer, size, number], ctypes.c_int),
        ("bounds_compare", [pointer, pointer, size, number], ctypes.c_uint64),
        ("bounds_read", [pointer, size, number], ctypes.c_uint64),
        ("bounds_fused", [pointer, pointer, size, size, pointer], ctypes.c_uint64),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def memcpy(to: Bits, source: Bits, threads: int = 1) -> None:
    _library().bounds_memcpy(to.ctypes.data, source.ctypes.data, source.nbytes, threads)


def stream_copy(to: Bits, source: Bits, threads: int = 1) -> bool:
    """Copy past the cache; False if this machine has no such store."""
    done = _library().bounds_stream_copy(to.ctypes.data, source.ctypes.data, source.nbytes, threads)
    return bool(done)


def compare(left: Bits, right: Bits, threads: int = 1) -> int:
    """Pages of 4 KiB that differ (a rest of less than a page is not looked at)."""
    return int(_library().bounds_compare(left.ctypes.data, right.ctypes.data, left.nbytes, threads))


def read(source: Bits, threads: int = 1) -> int:
    return int(_library().bounds_read(source.ctypes.data, source.nbytes, threads))


def fused(base: Bits, new: Bits, block_units: int) -> tuple[int, tuple[int, int]]:
    """Compare, list changes, update base and digest, without packing: units changed, digest step.

    The digest step is what the two sums of the digest of one tensor of these bytes change by.
    """
    step = (ctypes.c_uint64 * 2)()
    changed = _library().bounds_fused(
        base.ctypes.data, new.ctypes.data, new.size, block_units, ctypes.addressof(step)
    )
    return int(changed), (step[0], step[1])
