"""The stand-in for NCCL of tests/nccl_double: built here, loaded as the real one is."""

from __future__ import annotations

import ctypes
import os
import subprocess
from functools import cache
from pathlib import Path

from gymfast._core import NcclLibrary
from gymfast.channels.nccl_library import load

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "tests/nccl_double").glob("*.cpp"))
FLAGS = ("-std=c++20", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-pthread")
NEW_FUNCTIONS = (
    *("ncclCommShrink", "ncclCommGrow", "ncclCommGetUniqueId", "ncclCommRevoke"),
    *("ncclCommWindowRegister", "ncclCommWindowDeregister"),
)


@cache
def _objects(folder: Path, flags: tuple[str, ...]) -> tuple[Path, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    objects = []
    for source in SOURCES:
        objects.append(folder / f"{source.stem}.o")
        compile_cpp(*FLAGS, *flags, "-c", str(source), "-o", str(objects[-1]))
    return tuple(objects)


def compile_cpp(*arguments: str) -> None:
    command = [os.environ.get("CXX", "g++"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr[-4000:]}"


def build(
    folder: Path,
    name: str = "whole/libnccl_double.so",
    *,
    hidden: tuple[str, ...] = (),
    flags: tuple[str, ...] = ("-O0",),
) -> Path:
    """The double under a name in the folder; `hidden` functions are those it does not have.

    In the process of the tests it is not named libnccl.so.2: torch would take it for its own.
    """
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    script = target.with_suffix(".map")
    local = " ".join(f"{function};" for function in hidden)
    script.write_text(f"{{ global: *; {f'local: {local}' if local else ''} }};")
    compile_cpp(
        *("-shared", "-pthread", f"-Wl,-soname,{target.name}", f"-Wl,--version-script={script}"),
        *flags,
        *map(str, _objects(folder / "objects", tuple(flags))),
        *("-o", str(target)),
    )
    return target


class Double:
    """A double in this process: what it is told to do, and what was called."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.double_log.restype = ctypes.c_size_t

    @property
    def folder(self) -> Path:
        """Where it was built, and where others can be from the same objects."""
        return Path(self.path).parents[1]

    def load(self) -> NcclLibrary:
        """As gymfast finds it."""
        return load(self.path, self.path)

    def set(self, name: str, value: int, rank: int = 0) -> None:
        self._library.double_set(name.encode(), rank, value)

    def reset(self) -> None:
        """Back to a healthy NCCL 2.30.7 with one GPU, and no calls so far."""
        self.set("version", 23007)
        self.set("device_count", 1)
        for name in ("host_memory", "alloc_error", "skips_registration", "skips_windows"):
            self.set(name, 0)
        by_rank = ("init_hangs", "async_error", "call_error", "abort_hangs", "is_silent")
        for rank in range(16):
            for name in (*by_rank, "register_error", "window_error"):
                self.set(name, 0, rank)
        self.calls()

    def calls(self, rank: int | None = None) -> list[str]:
        """Calls since the last time, one of all ranks or those of one, without its name."""
        text = ctypes.create_string_buffer(1 << 20)
        assert self._library.double_log(text, ctypes.c_size_t(len(text))) < len(text)
        lines = text.value.decode().splitlines()
        assert not [line for line in lines if line.startswith("wrong")], lines
        if rank is None:
            return lines
        return [line.split(" ", 1)[1] for line in lines if line.startswith(f"r{rank} ")]
