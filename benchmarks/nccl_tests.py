"""NVIDIA's nccl-tests where they are built: run, read, and put beside our rows.

Source of both formats: nccl-tests 2.19.6 (text, and JSON of file version 3). The environment that
the JSON holds is never kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.transfer import Row

FOLDER_VARIABLE = "GYMFAST_NCCL_TESTS"
BINARIES = ("broadcast_perf", "all_gather_perf", "sendrecv_perf")
_COLUMNS = 5  # size, count, type, redop, root
_TIMING, _PER_ITERATION = 4, 4  # columns of a placement, and those that -I adds
_NO_COUNT = "N/A"


class Missing(Exception):  # noqa: N818 - a reason to leave it out, no error
    """nccl-tests cannot run here."""


@dataclass(frozen=True)
class Timing:
    """One placement of one line; `num_wrong` is None where results were not checked."""

    time_us: float
    algbw: float
    busbw: float
    num_wrong: int | None


@dataclass(frozen=True)
class Line:
    """One size of one test."""

    size: int
    count: int
    type: str
    redop: str
    root: int
    out_of_place: Timing
    in_place: Timing


def parse_text(text: str) -> list[Line]:
    """The lines of results; raises ValueError for output that has none, or one it cannot read."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if not words or not words[0].isdigit():
            continue
        step = _TIMING
        if len(words) >= _COLUMNS + 2 * (_TIMING + _PER_ITERATION):
            step += _PER_ITERATION
        if len(words) < _COLUMNS + 2 * step:
            raise ValueError(
                f"line {line.strip()!r} of nccl-tests has {len(words)} columns, expected "
                f"{_COLUMNS + 2 * _TIMING} or more"
            )
        one, other = (_timing(words[_COLUMNS + i * step :]) for i in (0, 1))
        size, count, kind, redop, root = words[:_COLUMNS]
        found.append(Line(int(size), int(count), kind, redop, int(root), one, other))
    if not found:
        raise ValueError(f"nccl-tests gave no results: {text.strip()[-500:]!r}")
    return found


def parse_json(text: str) -> list[Line]:
    """The results of a file; raises ValueError for one without, or that cannot be read."""
    document = json.loads(text)
    results = document.get("results") if isinstance(document, dict) else None
    if not results:
        raise ValueError("a file of nccl-tests has no results: the test ended before the first")
    try:
        return [
            Line(
                int(one["size"]), int(one["count"]), str(one["type"]), str(one["redop"]),
                int(one["root"]), _placed(one["out_of_place"]), _placed(one["in_place"]),
            )
            for one in results
        ]  # fmt: skip
    except KeyError as error:
        raise ValueError(f"a result of nccl-tests has no {error}: is it a newer format?") from error


def measure(size_bytes: int, rounds: int) -> Iterator[Row]:
    """Runs each binary that is there on all GPUs of this host; raises Missing where none can."""
    num_gpus = _num_gpus()
    binaries = [path for name in BINARIES if (path := _find(name)) is not None]
    if not binaries:
        raise Missing(
            f"needs nccl-tests: none of {', '.join(BINARIES)} is on PATH or in ${FOLDER_VARIABLE}"
        )
    if not num_gpus:
        raise Missing("needs a GPU")
    for binary in binaries:
        for line in run(binary, size_bytes, rounds, num_gpus):
            yield row_of(Path(binary).name, line, num_gpus, rounds)


def run(binary: str, size_bytes: int, rounds: int, num_gpus: int) -> list[Line]:
    """What one binary says, for one size; raises RuntimeError with its last words if it fails."""
    with tempfile.TemporaryDirectory(prefix="gymfast-nccl-") as folder:
        path = Path(folder) / "results.json"
        command = [binary, "-b", str(size_bytes), "-e", str(size_bytes), "-g", str(num_gpus)]
        command += ["-n", str(rounds), "-w", "5", "-c", "1", "-a", "3"]  # 3: the slowest rank
        done = subprocess.run(
            [*command, "-J", str(path)], capture_output=True, text=True, check=False
        )
        if done.returncode and not path.exists():  # versions before -J refuse it
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{binary}: {(done.stderr or done.stdout).strip()[-1000:]}")
        if path.exists() and path.stat().st_size:
            return parse_json(path.read_text())
        return parse_text(done.stdout)


def row_of(name: str, line: Line, num_gpus: int, rounds: int) -> Row:
    """A line in our columns: the placement that a broadcast of weights has, which is in place."""
    timing = line.in_place
    is_checked = timing.num_wrong is not None
    return Row(
        case="nccl",
        path=f"nccl-tests {name}",
        data="flat",
        ranks=num_gpus,
        streams=0,
        depth=0,
        bucket_bytes=0,
        rounds=rounds,
        size=line.size,
        count=line.count,
        type=line.type,
        root=line.root,
        time_us=timing.time_us,
        time_p10_us=0.0,
        time_p90_us=0.0,
        algbw=timing.algbw,
        busbw=timing.busbw,
        nwrong=timing.num_wrong or 0,
        sent_bytes=line.size,
        measured_s=timing.time_us / 1e6,
        note="" if is_checked else "results not checked",
    )


def _timing(words: list[str]) -> Timing:
    time_us, algbw, busbw, wrong = words[:_TIMING]
    count = None if wrong == _NO_COUNT else int(float(wrong))
    return Timing(float(time_us), float(algbw), float(busbw), count)


def _placed(found: dict[str, Any]) -> Timing:
    wrong = found["nwrong"]
    count = None if wrong is None else int(wrong)
    return Timing(float(found["time"]), float(found["alg_bw"]), float(found["bus_bw"]), count)


def _find(name: str) -> str | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    return shutil.which(name, path=folder) if folder else shutil.which(name)


def _num_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines())
