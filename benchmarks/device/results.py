"""Rows, phases and targets of one run, and the CSV and JSON that hold them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from benchmarks.device.memory import HOST_CLOCK
from benchmarks.targets import MIN_BYTES, Target

STATES = ("skipped", "done", "cut", "failed", "different")  # the worst last
SCHEMA = "gymfast-device-codec/1"
TARGET_DENSITY = 0.01
TARGETS = (  # codec, operation, share of the speed of a device-to-device copy of the state
    ("gymfast cuda fast", "encode", 0.45),
    ("gymfast cuda fast", "apply", 0.90),
    ("gymfast cuda small", "encode", 0.25),
    ("gymfast cuda small", "apply", 0.25),
)


@dataclass(frozen=True)
class Row:
    """One line of the CSV; benchmarks/README.md says what each column means."""

    codec: str
    op: str
    density: float
    num_changed: int
    raw_bytes: int
    rounds: int
    wall_s: float
    wall_p10_s: float
    wall_p90_s: float
    gbps: float
    copy_s: float
    copy_gbps: float
    copy_moved_gbps: float
    copy_ratio: float
    body_bytes: int
    bits_per_change: float
    clock: str


@dataclass(frozen=True)
class Subject:
    """What a row is of."""

    codec: str
    op: str
    density: float
    num_changed: int
    raw_bytes: int
    clock: str


def row_of(subject: Subject, wall_s: list[float], copy_s: list[float], body_bytes: int) -> Row:
    """A row from the samples of an operation and of the copies beside them."""
    wall, copy = float(np.median(wall_s)), float(np.median(copy_s))
    gigabytes = subject.raw_bytes / 1e9
    return Row(
        codec=subject.codec,
        op=subject.op,
        density=subject.density,
        num_changed=subject.num_changed,
        raw_bytes=subject.raw_bytes,
        rounds=len(wall_s),
        wall_s=wall,
        wall_p10_s=float(np.percentile(wall_s, 10)),
        wall_p90_s=float(np.percentile(wall_s, 90)),
        gbps=gigabytes / wall,
        copy_s=copy,
        copy_gbps=gigabytes / copy,
        copy_moved_gbps=2 * gigabytes / copy,
        copy_ratio=copy / wall,
        body_bytes=body_bytes,
        bits_per_change=8 * body_bytes / max(1, subject.num_changed),
        clock=subject.clock,
    )


@dataclass
class Phase:
    """How far one part of the run came; `state` is one of STATES."""

    name: str
    state: str = "done"
    note: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """Everything one run found; `write` may be called after every phase."""

    environment: dict[str, str]
    phases: list[Phase] = field(default_factory=list)
    checks: dict[str, dict[str, object]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        size = f"{row.body_bytes:>13,} bytes" if row.body_bytes else ""
        name = f"{row.codec} {row.op}, {100 * row.density:.3g} %"
        spread = f"{1e3 * row.wall_p10_s:.3f}..{1e3 * row.wall_p90_s:.3f}"
        print(
            f"{name:<52} {1e3 * row.wall_s:9.3f} ms ({spread}) {row.gbps:8.1f} GB/s"
            f" {row.copy_ratio:6.2f} x copy {size}",
            flush=True,
        )

    def targets(self) -> Iterator[Target]:
        """The targets that the rows at 1 % can answer; small states and host clocks cannot."""
        for codec, op, wanted in TARGETS:
            for row in self.rows:
                is_asked = (row.codec, row.op, row.density) == (codec, op, TARGET_DENSITY)
                if is_asked and row.clock != HOST_CLOCK and row.raw_bytes >= MIN_BYTES:
                    what = f"{codec}, {op}, 1 %: x device-to-device copy"
                    is_met = row.copy_ratio >= wanted
                    yield Target(what, f">= {wanted:g}", row.copy_ratio, is_met)

    def write(self, folder: Path) -> None:
        """codec.csv and codec.json."""
        with (folder / "codec.csv").open("w", newline="") as file:
            for key, value in self.environment.items():
                file.write(f"# {key}: {value}\n")
            writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in self.rows)
        document = {
            "schema": SCHEMA,
            "environment": self.environment,
            "phases": [asdict(phase) for phase in self.phases],
            "checks": self.checks,
            "rows": [asdict(row) for row in self.rows],
            "targets": [asdict(target) for target in self.targets()],
        }
        (folder / "codec.json").write_text(json.dumps(document, indent=1) + "\n")
