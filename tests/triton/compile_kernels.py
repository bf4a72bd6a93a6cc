"""Compiles every Triton kernel for sm_90 and sm_100 without a GPU; prints its resources as CSV.

Run as a program: `python tests/triton/compile_kernels.py [--write]`. Its process must not have
TRITON_INTERPRET set, and starts no CUDA.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from gymfast.delta.backends import (
    triton_kernels_apply,
    triton_kernels_decode,
    triton_kernels_dense,
    triton_kernels_diff,
    triton_kernels_digest,
    triton_kernels_pack,
)

TABLE = Path(__file__).parent / "resources.csv"
COLUMNS = "kernel,variant,arch,registers,spill_bytes,shared_bytes,loads_16_bytes,stores_16_bytes"
ARCHES = (90, 100)
MODULES = (
    triton_kernels_apply,
    triton_kernels_decode,
    triton_kernels_dense,
    triton_kernels_diff,
    triton_kernels_digest,
    triton_kernels_pack,
)
UNITS = {1: "*u8", 2: "*u16", 4: "*u32"}
# What the arguments of this name point to; `out` and `fresh` depend on the kernel, scalars are i32.
I64 = "records slots list_starts class_starts rank_starts digests column_keys undo_offsets offsets"
I64 += " pieces flag_sums ones values sums blocks starts indices"
I32 = "ranks counts unit_counts change_counts places x exceptions exception_values flips symbols"
I32 += " index_of errors v change_at positions"
POINTERS = dict.fromkeys(I64.split(), "*i64") | dict.fromkeys(I32.split(), "*i32")
POINTERS |= dict.fromkeys(["fields", "listed", "rests"], "*u8")
POINTERS |= {
    ("compact_kernel", "values"): "*i32",
    ("compact_kernel", "rank_starts"): "*i32",
    ("flag_kernel", "out"): "*i64",
    ("sum_kernel", "out"): "*i64",
    ("shifted_sums_kernel", "out"): "*i64",
    ("compact_kernel", "out"): "*i64",
    ("digest_rows_kernel", "out"): "*i64",
    ("digest_tiles_kernel", "out"): "*i64",
    ("count_ones_kernel", "out"): "*i64",
    ("copy_block_kernel", "out"): "*u8",
    ("rest_kernel", "out"): "*u8",
    ("pack_kernel", "body"): "*i32",
    ("pack_signs_kernel", "body"): "*i32",
    ("step_kernel", "flips"): "*i8",
    ("step_kernel", "counts"): "*i64",
    ("exceptions_kernel", "flips"): "*i8",
    ("compare_block_kernel", "counts"): "*i64",
    "body": "*u8",
}
UNIT_POINTERS = ("base", "new", "data", "fresh", "undo_values")
ALIGNED = ("num_units", "cols", "tile_rows", "tile_cols")
SIZES = {"TILE": 1024, "STEP": 128, "PIECE": 1024, "ROWS": 8}
FLAGS = {"FLAT": True, "BY_CLASS": False, "UPDATE": True, "UNDO": True, "USE_BASE": True}
FLAGS |= {"IS_FLIP": False}
# Constants that differ from SIZES and FLAGS, by kernel: one compilation each.
VARIANTS: dict[str, list[dict[str, int]]] = {
    "diff_kernel": [
        {},
        {"TILE": 2048, "UNIT_BYTES": 1},
        {"TILE": 512, "UNIT_BYTES": 4},
        {"FLAT": False},
        {"BY_CLASS": True},
        {"BY_CLASS": True, "FLAT": False},
        {"BY_CLASS": True, "UNIT_BYTES": 1},
        {"BY_CLASS": True, "TILE": 512, "UNIT_BYTES": 4},
    ],
    "compact_kernel": [{}, {"BY_CLASS": True}],
    "update_kernel": [{}, {"FLAT": False}],
    "digest_rows_kernel": [{}, {"UNIT_BYTES": 1}, {"UNIT_BYTES": 4}],
    "digest_tiles_kernel": [{"TILE": 2048}],
    "exceptions_kernel": [{}, {"IS_FLIP": True}],
    "scatter_kernel": [{"values": 0}],
    "sample_kernel": [{"STEP": 1024}],
}


def kernels() -> dict[str, object]:
    """Every kernel of the back end by name."""
    return {
        name: value
        for module in MODULES
        for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, triton.JITFunction)
    }


def source(
    name: str, kernel: triton.JITFunction, constants: dict[str, int], scalar: str = "i32"
) -> ASTSource:
    """A kernel with the argument types that the back end passes: 2-byte units by default.

    Triton makes scalars i64 where they need it, and a constant where they are 1.
    """
    unit_bytes = constants.get("UNIT_BYTES", 2)
    annotations = inspect.signature(kernel.fn).parameters
    signature, constexprs, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if "constexpr" in str(annotations[argument].annotation):
            signature[argument] = "constexpr"
            default = unit_bytes if argument == "UNIT_BYTES" else SIZES.get(argument)
            constexprs[(i,)] = constants.get(argument, FLAGS.get(argument, default))
            continue
        pointer = POINTERS.get((name, argument)) or POINTERS.get(argument)
        if argument in UNIT_POINTERS or (name == "scatter_kernel" and argument == "values"):
            pointer = UNITS[unit_bytes]
        signature[argument] = pointer or scalar
        if not pointer and scalar == "constexpr":
            constexprs[(i,)] = 1
        elif pointer or argument in ALIGNED:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs, attributes)


def resources(ptx: str, arch: int) -> dict[str, int]:
    """Registers, spills and 16-byte accesses of a compiled kernel."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={target}", "-o", f"{path}.o", path]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    return {
        "registers": int(re.search(r"Used (\d+) registers", done.stderr)[1]),
        "spill_bytes": int(spills[1]) + int(spills[2]),
        "loads_16_bytes": len(re.findall(r"ld\.global\S*\.v(?:4\.b32|2\.b64)", ptx)),
        "stores_16_bytes": len(re.findall(r"st\.global\S*\.v(?:4\.b32|2\.b64)", ptx)),
    }


def rows() -> Iterator[str]:
    """Lines of the table."""
    for name, kernel in sorted(kernels().items()):
        for constants in VARIANTS.get(name, [{}]):
            variant = " ".join(f"{key}={int(value)}" for key, value in constants.items()) or "-"
            for arch in ARCHES:
                target = GPUTarget("cuda", arch, 32)
                done = triton.compile(source(name, kernel, constants), target=target)
                found = resources(done.asm["ptx"], arch) | {"shared_bytes": done.metadata.shared}
                cells = [str(found[column]) for column in COLUMNS.split(",")[3:]]
                yield ",".join((name, variant, f"sm_{arch}", *cells))


def compile_other_scalars() -> None:
    """Every kernel with 64-bit scalars, and with scalars that are 1: only that they compile."""
    for name, kernel in kernels().items():
        for scalar in ("i64", "constexpr"):
            for constants in VARIANTS.get(name, [{}]):
                target = GPUTarget("cuda", ARCHES[0], 32)
                triton.compile(source(name, kernel, constants, scalar), target=target)


if __name__ == "__main__":
    compile_other_scalars()
    lines = [COLUMNS, *rows()]
    print("\n".join(lines))
    if "--write" in sys.argv:
        TABLE.write_text("\n".join(lines) + "\n")
