"""The binding of csrc/cuda, compiled with the shim: gymfast._cuda on ordinary memory."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import nanobind
from cuda_shim import FLAGS, ROOT, SOURCES

NAME = "_cuda_shim"
UNREGISTERED, PINNED, DEVICE, MANAGED = range(4)  # cudaMemoryType
LAUNCH_FAILURE = 719
_NANOBIND = Path(nanobind.__path__[0])


@cache
def load_module(folder: Path) -> ModuleType:
    """The module, compiled into `folder`: once a session, if all fixtures name the same one."""
    path = folder / (NAME + importlib.machinery.EXTENSION_SUFFIXES[0])
    folder.mkdir(parents=True)
    _compile(path)
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(target: Path) -> None:
    includes = (ROOT / "csrc", _NANOBIND / "include", _NANOBIND / "ext/robin_map/include")
    python = sysconfig.get_paths()["include"]
    sources = [
        *SOURCES,
        *(ROOT / "csrc/cuda/host_shim.cpp", ROOT / "tests/cuda/module_controls.cpp"),
        *(ROOT / "csrc/bind/cuda.cpp", ROOT / "csrc/format/status.cpp"),
        _NANOBIND / "src/nb_combined.cpp",
    ]
    command = [os.environ.get("CXX", "g++"), *FLAGS, "-O2", "-shared", "-fPIC", "-DNDEBUG"]
    command += ["-fvisibility=hidden", "-fno-strict-aliasing"]
    command += [f"-I{folder}" for folder in includes]
    # No warnings about headers of others.
    command += ["-isystem", python, "-x", "c++", *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr[-4000:]}"
    assert not done.stderr, done.stderr[-4000:]


class Controls:
    """What the CUDA runtime of the module answers; everything is device 0 until told otherwise."""

    def __init__(self, module: ModuleType) -> None:
        self._library = ctypes.PyDLL(module.__file__)
        self._library.shim_num_launches.restype = ctypes.c_uint64

    def set_memory(self, address: int, size_bytes: int, kind: int, device: int = 0) -> None:
        place = (ctypes.c_void_p(address), ctypes.c_uint64(size_bytes))
        self._library.shim_set_memory(*place, kind, device)

    def set_stream_device(self, stream: int, device: int) -> None:
        self._library.shim_set_stream_device(ctypes.c_void_p(stream), device)

    def set_launch_error(self, number: int) -> None:
        self._library.shim_set_launch_error(number)

    def set_load_error(self, number: int) -> None:
        self._library.shim_set_load_error(number)

    def set_current_device(self, device: int) -> None:
        self._library.shim_set_current_device(device)

    def current_device(self) -> int:
        return self._library.shim_current_device()

    def num_launches(self) -> int:
        return self._library.shim_num_launches()

    def reset(self) -> None:
        self._library.shim_forget_memory()
        self.set_launch_error(0)
        self.set_load_error(0)
        self.set_current_device(0)
