"""Registers, spills, shared memory and 16-byte loads of every CUDA kernel, as nvcc compiles it.

`python tests/cuda_resources.py` writes tests/cuda/resources.csv anew.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "csrc/cuda").glob("*.cu"))
TABLE = ROOT / "tests/cuda/resources.csv"
ARCHITECTURES = ("90a", "100a")
UNIT_BYTES = {"h": 1, "t": 2, "j": 4, None: 0}
NAME = re.compile(r"4cuda\d+([a-z_]+_kernel)(?:I([htj])E)?")
VECTOR_LOAD = re.compile(r"\bld(?:\.global(?:\.nc)?)?\.v4\.u32")
COMPILED = re.compile(
    r"Compiling entry function '(\S+)' for 'sm_(\w+)'.*?(\d+) bytes spill stores.*?"
    r"Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """One kernel on one architecture; unit_bytes 0: the kernel does not depend on the unit."""

    architecture: str
    kernel: str
    unit_bytes: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    vector_loads: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.architecture, self.kernel, self.unit_bytes


def nvcc_version() -> str | None:
    """Such as "13.0"; None without nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release (\d+\.\d+)", text)[1]


def measure() -> list[Resources]:
    """What nvcc says now, sorted."""
    # Kernels that do not depend on the unit are in several files, the same in all of them.
    found = {row.key: row for source in SOURCES for row in _measure_file(source)}
    return sorted(found.values(), key=lambda row: row.key)


def _measure_file(source: Path) -> list[Resources]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-std=c++20", "--expt-relaxed-constexpr", "-O3", "-Xptxas", "-v", "-c"]
        for name in ARCHITECTURES:
            command += ["-gencode", f"arch=compute_{name},code=sm_{name}"]
        command += ["-I", str(ROOT / "csrc"), "--keep", "--keep-dir", folder]
        command += [str(source), "-o", f"{folder}/kernels.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        loads = {
            (name, symbol): len(VECTOR_LOAD.findall(body))
            for name in ARCHITECTURES
            for symbol, body in _entries(
                Path(folder, f"{source.stem}.compute_{name}.ptx").read_text()
            )
        }
    found = []
    for symbol, name, spills, registers, rest in COMPILED.findall(done.stdout + done.stderr):
        kernel, unit = NAME.search(symbol).groups()
        shared = re.search(r"(\d+) bytes smem", rest)
        numbers = (int(registers), int(spills), int(shared[1]) if shared else 0)
        found.append(Resources(name, kernel, UNIT_BYTES[unit], *numbers, loads[name, symbol]))
    return found


def _entries(ptx: str) -> list[tuple[str, str]]:
    """Name and text of each kernel."""
    parts = re.split(r"\.entry (\w+)", ptx)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def read_table() -> tuple[str, dict[tuple[str, str, int], Resources]]:
    """The version of nvcc that the committed table is of, and its rows."""
    first, *lines = TABLE.read_text().splitlines()
    rows = [
        Resources(
            *(
                text if text.isidentifier() or name == "architecture" else int(text)
                for name, text in row.items()
            )
        )
        for row in csv.DictReader(lines)
    ]
    return first.removeprefix("# nvcc "), {row.key: row for row in rows}


def write_table() -> None:
    names = [field.name for field in fields(Resources)]
    with TABLE.open("w", newline="") as file:
        file.write(f"# nvcc {nvcc_version()}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in measure())


if __name__ == "__main__":
    write_table()
