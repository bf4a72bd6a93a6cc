"""The kernels of csrc/cuda, compiled by the C++ compiler, as a back end for tests."""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks, select
from gymfast.delta.geometry import Geometry
from gymfast.errors import ChecksumError, FormatError

ROOT = Path(__file__).parents[1]
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DGYMFAST_CUDA_SHIM"]
SOURCES = [ROOT / f"csrc/cuda/{name}.cu" for name in ("codec", "encode", "apply", "pieces")]
RESULT_CHECK = 58
BAD_ARGUMENT = 90
NO_PARAMS = BlockParams(0, 0, 0, True)


def compile_shim(
    target: Path, *flags: str, program: Path | None = None, tsan: bool = False
) -> Path:
    """`target`, compiled from the kernels and the shim with the C++ compiler at hand."""
    kernels = [*SOURCES, program or ROOT / "tests/cuda/shim.cpp"]
    shim = target.with_suffix(".shim.o")
    # The books of the shim are no memory of a kernel: only the kernels are watched for races.
    shim_flags = ["-O2", "-DGYMFAST_TSAN", "-fPIC"] if tsan else flags
    flags = (*flags, "-fsanitize=thread") if tsan else flags
    _compile(*shim_flags, "-c", ROOT / "csrc/cuda/host_shim.cpp", "-o", shim)
    _compile(*flags, *kernels, "-x", "none", shim, "-o", target)
    return target


def _compile(*arguments: str | Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *FLAGS, "-I", str(ROOT / "csrc"), "-x", "c++", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr[-4000:]}"


class _Run(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("num_units", "unit_bytes", "cols", "tile_rows", "tile_cols"),
            *("profile", "class_shift", "class_base", "has_base"),
            *("first_block", "num_blocks", "shift"),
        )
    ]


@dataclass(frozen=True)
class Encoded:
    """Sections [n, 5]: first_block, num_blocks, offset in body, size, num_changed."""

    body: bytes
    sections: np.ndarray


@dataclass(frozen=True)
class ShimBackend(Backend):
    """A Backend of digest, encode and apply on the CUDA kernels; `shift` misaligns tensors."""

    library: ctypes.CDLL
    shift: float = 0

    name = "cuda-shim"
    kinds = ("cpu",)

    @classmethod
    def load(cls, path: Path) -> ShimBackend:
        # Holds the GIL: the shim runs on one thread at a time, the workers of apply are many.
        library = ctypes.PyDLL(str(path))
        library.shim_problem.restype = ctypes.c_char_p
        library.shim_body_capacity.restype = ctypes.c_uint64
        return cls(library)

    def shifted(self, units: int) -> ShimBackend:
        return replace(self, shift=units)

    def check64(self, *parts):
        return select("cpu").check64(*parts)

    def class_params(self, base, unit_bytes):
        return select("cpu").class_params(base, unit_bytes)

    def rollback_blocks(self, base, undo, geometry) -> None:
        raise NotImplementedError("undo is tested on the binding: see cuda_backend.py")

    def digest_blocks(self, data, geometry, threads, first_block=0, num_blocks=None):
        count = geometry.num_blocks - first_block if num_blocks is None else num_blocks
        digests = np.zeros((geometry.num_blocks, 2), np.uint64)
        run = self._run(geometry, NO_PARAMS, first_block, count)
        rows = geometry.num_blocks
        self._check(self.library.shim_digest(run, _at(data), _at(digests), _u64(rows)))
        return digests[first_block : first_block + count]

    def encode_run(
        self, base, new, geometry, params, digests, first, count, *, update, blocks_per_section
    ) -> Encoded:
        """All sections of one call; base and digests change in place."""
        run = self._run(geometry, params, first, count)
        sections = np.zeros((max(1, -(-count // blocks_per_section)), 5), np.uint64)
        body = np.zeros(self.library.shim_body_capacity(run), np.uint8)
        out = base if update else base.copy()
        number = self.library.shim_encode(
            *(run, _at(out), _at(new), int(update), _u64(blocks_per_section), _at(digests)),
            *(_u64(len(digests)), _at(body), _at(sections), _u64(len(sections))),
        )
        self._check(number)
        assert update or np.array_equal(out, base)
        return Encoded(body.tobytes(), sections)

    def encode_blocks(
        self,
        base,
        new,
        geometry,
        params,
        digests,
        first_block,
        num_blocks,
        *,
        update,
        undo,
        threads,
    ) -> EncodedBlocks:
        if undo:
            raise NotImplementedError("undo is tested on the binding: see cuda_backend.py")
        if num_blocks == 0:
            return EncodedBlocks(b"", 0)
        run = (geometry, params, digests, first_block, num_blocks)
        found = self.encode_run(base, new, *run, update=update, blocks_per_section=num_blocks)
        _, _, offset, size, changed = map(int, found.sections[0])
        assert offset == 0
        return EncodedBlocks(found.body[:size], changed)

    def apply_run(self, data, body, geometry, params, digests, first, count, sections) -> int:
        """Units changed; sections are rows of first_block, num_blocks, offset, size, 0."""
        run = self._run(geometry, params, first, count)
        out, rows = data.copy(), digests.copy()
        result = np.zeros(2, np.uint64)
        table = np.ascontiguousarray(sections, np.uint64)
        frame = np.frombuffer(body, np.uint8)
        number = self.library.shim_apply(
            *(run, _at(out), _at(frame), _u64(frame.size), _at(table), _u64(len(table))),
            *(_at(rows), _u64(len(rows)), _at(result)),
        )
        self._check(number)
        data[:] = out
        digests[:] = rows
        if result[0] != np.uint64(2**64 - 1):
            self._raise(int(result[0]) & 255, f"block {int(result[0]) >> 8}")
        return int(result[1])

    def apply_blocks(
        self, data, body, geometry, params, digests, first_block, num_blocks, threads
    ) -> int:
        size = len(bytes(body))
        section = [[first_block, num_blocks, 0, size, 0]]
        run = (geometry, params, digests, first_block, num_blocks)
        return self.apply_run(data, bytes(body), *run, section)

    def _run(self, geometry: Geometry, params: BlockParams, first: int, count: int):
        shape = (geometry.num_units, geometry.unit_bytes)
        grid = (geometry.cols, geometry.tile_rows, geometry.tile_cols)
        code = (params.profile, params.class_shift, params.class_base, int(params.has_base))
        shift = int(self.shift * geometry.unit_bytes)
        return ctypes.byref(_Run(*shape, *grid, *code, first, count, shift))

    def _check(self, number: int) -> None:
        if number:
            self._raise(number, self.library.shim_problem().decode())

    @staticmethod
    def _raise(number: int, text: str) -> None:
        if number == BAD_ARGUMENT:
            raise ValueError(text)
        kind = ChecksumError if number == RESULT_CHECK else FormatError
        raise kind(f"{text} (error {number})", number)


def _u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def _at(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
