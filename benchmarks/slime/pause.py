"""Runs slime's updater and ours on the same fake engine and the same changes, in turns.

python -m benchmarks slime-pause --source SLIME [--csv FILE]; needs torch, a checkout of slime and
the tests of this project, whose stubs it uses.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.environment import environment
from benchmarks.slime.job import Job
from benchmarks.slime.model import NUM_LAYERS, write_checkpoint

_ROOT = Path(__file__).parents[2]
PHASES = ("encode", "pull", "pause", "total")
WHO = {
    "slime, reload": (False, False),
    "gymfast, reload": (True, False),
    "gymfast, loader": (True, True),
}
WHERE = {"every tensor": "", f"one layer of {NUM_LAYERS}": "layers.5."}


@dataclass(frozen=True)
class Row:
    """Seconds of one updater on one sort of change: medians, 10 and 90 % quantiles of the pause."""

    changed: str
    who: str
    model_bytes: int
    density: float
    wire_bytes: int
    num_loaded: int
    rounds: int
    encode_s: float
    pull_s: float
    pause_s: float
    pause_p10_s: float
    pause_p90_s: float
    total_s: float


def run_pause(options: argparse.Namespace) -> int:
    """Prints a table, and writes the rows as CSV if asked to."""
    rows = []
    for changed, where in WHERE.items():
        rows += measure(options, changed, where)
        print(table(rows), file=sys.stderr)
    stamp = environment() | {"command": f"python -m benchmarks {' '.join(sys.argv[1:])}"}
    if options.csv:
        write(options.csv, rows, stamp)
    print(table(rows))
    return 0


def measure(options: argparse.Namespace, changed: str, where: str) -> list[Row]:
    """The rows of one sort of change: the first update of each is not counted."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        ranks = {
            who: stack.enter_context(_Rank(options, folder / str(number), where, *WHO[who]))
            for number, who in enumerate(WHO)
        }
        for rank in ranks.values():
            rank.update()
        samples: dict[str, list[dict[str, float]]] = {who: [] for who in WHO}
        for _ in range(options.rounds):
            for who, rank in ranks.items():
                samples[who].append(rank.update())
        model_bytes = (folder / "0" / "base" / "model.safetensors").stat().st_size
    return [_row((changed, who, model_bytes, options.density), s) for who, s in samples.items()]


class _Rank:
    """A process with an updater; its engine is another one."""

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        where: str,
        is_gymfast: bool,
        has_loader: bool,
    ) -> None:
        write_checkpoint(folder / "base", options.size, seed=1)
        source = str(options.source.resolve())
        job = Job(str(folder), source, is_gymfast, has_loader, where, options.density)
        path = folder / "job.json"
        path.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "benchmarks.slime.rank", str(path)]
        paths = os.pathsep.join([str(_ROOT), str(_ROOT / "tests")])
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": paths},
            )

    def update(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank failed:\n{self._log.read_text()[-4000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _row(what: tuple[str, str, int, float], samples: list[dict[str, float]]) -> Row:
    seconds = {phase: [one[phase] for one in samples] for phase in PHASES}
    medians = {phase: float(np.median(values)) for phase, values in seconds.items()}
    low, high = (float(q) for q in np.quantile(seconds["pause"], (0.1, 0.9)))
    return Row(
        *what,
        wire_bytes=int(np.median([one["wire_bytes"] for one in samples])),
        num_loaded=int(samples[-1]["num_loaded"]),
        rounds=len(samples),
        encode_s=medians["encode"],
        pull_s=medians["pull"],
        pause_s=medians["pause"],
        pause_p10_s=low,
        pause_p90_s=high,
        total_s=medians["total"],
    )


def write(path: Path, rows: list[Row], stamp: dict[str, str]) -> None:
    """The rows, after one comment line for each fact about machine and command."""
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in stamp.items())
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            fields = asdict(row).items()
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in fields})


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| changed | updater, engine | encode | pull | pause (10 to 90 %) | total | loaded |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            *(row.changed, row.who, f"{row.encode_s:.2f}", f"{row.pull_s:.2f}"),
            f"**{row.pause_s:.3f}** ({row.pause_p10_s:.3f} to {row.pause_p90_s:.3f})",
            *(f"{row.total_s:.2f}", str(row.num_loaded)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
