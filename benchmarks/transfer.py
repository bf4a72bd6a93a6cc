"""Transfers over channels beside their peers, in the columns of NVIDIA's nccl-tests."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ranks import Sample

SCHEMA = "gymfast-transfer/1"
MIB = 1 << 20
_COUNTED = {"uint8": 1, "bfloat16": 2}


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    size_bytes: int = 512 * MIB
    list_bytes: int = 2 << 30  # of a list of tensors at most; more are left out
    live_bytes: int = 1_640_000_000
    rounds: int = 9
    cases: tuple[str, ...] = ()

    @classmethod
    def quick(cls) -> Options:
        """A minute: a fraction of the sizes, five rounds."""
        return cls(size_bytes=64 * MIB, list_bytes=128 * MIB, live_bytes=64 * MIB, rounds=5)


@dataclass(frozen=True)
class Row:
    """One line of the CSV; benchmarks/README.md says what each column means.

    `algbw` and `busbw` are in 1e9 bytes a second of `size`. Stages are those of the median round.
    """

    case: str
    path: str
    data: str
    ranks: int
    streams: int
    depth: int
    bucket_bytes: int
    rounds: int
    size: int
    count: int
    type: str
    root: int
    time_us: float
    time_p10_us: float
    time_p90_us: float
    algbw: float
    busbw: float
    nwrong: int
    sent_bytes: int = 0
    pack_s: float = 0.0
    wire_s: float = 0.0
    unpack_s: float = 0.0
    acknowledge_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    bound: str = ""
    bound_gbps: float = 0.0
    of_bound: float = 0.0
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def columns(cls) -> list[str]:
        return [column.name for column in fields(cls)]

    @classmethod
    def from_text(cls, text: dict[str, str]) -> Row:
        """A row as the CSV holds it."""
        kinds: dict[str, type] = {"str": str, "int": int, "float": float}
        return cls(**{f.name: kinds[str(f.type)](text[f.name]) for f in fields(cls)})

    def as_nccl(self) -> dict[str, Any]:
        """The row as an element of `results` in the JSON of nccl-tests, and what we add."""
        timing = {
            "time": self.time_us, "alg_bw": self.algbw, "bus_bw": self.busbw, "nwrong": self.nwrong,
        }  # fmt: skip
        plan = {
            "bucket_bytes": self.bucket_bytes, "depth": self.depth, "streams": self.streams,
            "ranks": self.ranks, "path": self.path, "case": self.case, "data": self.data,
        }  # fmt: skip
        stages = {n: getattr(self, f"{n}_s") for n in ("pack", "wire", "unpack", "acknowledge")}
        return {
            "size": self.size, "count": self.count, "type": self.type, "redop": "none",
            "root": self.root, "in_place": timing, "plan": plan, "stages_s": stages,
            "predicted_s": self.predicted_s, "measured_s": self.measured_s,
            "bound": {"name": self.bound, "gbps": self.bound_gbps, "share": self.of_bound},
            "note": self.note,
        }  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What a row says besides its times."""

    case: str
    path: str
    data: str
    size: int
    type: str = "uint8"
    ranks: int = 2
    streams: int = 1
    depth: int = 0
    bucket_bytes: int = 0
    predicted_s: float = 0.0
    bound: str = ""
    bound_gbps: float = 0.0  # 1e9 bytes a second
    note: str = ""

    def row(self, samples: Iterable[Sample]) -> Row:
        """The medians, and the stages of the slowest receiver in the round nearest to them."""
        samples = sorted(samples, key=lambda one: one.seconds)
        times = np.array([one.seconds for one in samples])
        middle = samples[len(samples) // 2]
        receivers = [rank for rank in middle.stages if rank != "0"]
        stages = dict(middle.stages.get("0", {}))
        for rank in receivers:
            for name, seconds in middle.stages[rank].items():
                stages[name] = max(stages.get(name, 0.0), seconds)
        seconds = float(np.median(times))
        gbps = self.size / 1e9 / seconds
        return Row(
            **vars(self),
            rounds=len(times),
            count=self.size // _COUNTED[self.type],
            root=0,
            time_us=seconds * 1e6,
            time_p10_us=float(np.percentile(times, 10)) * 1e6,
            time_p90_us=float(np.percentile(times, 90)) * 1e6,
            algbw=gbps,
            busbw=gbps,  # of a broadcast, by nccl-tests' definition
            nwrong=sum(one.num_wrong for one in samples),
            sent_bytes=middle.sent_bytes,
            pack_s=stages.get("pack", 0.0),
            wire_s=stages.get("wire", 0.0),
            unpack_s=stages.get("unpack", 0.0),
            acknowledge_s=stages.get("ready", 0.0) + stages.get("acknowledge", 0.0),
            measured_s=seconds,
            of_bound=gbps / self.bound_gbps if self.bound_gbps else 0.0,
        )


Case = Callable[[Options], Iterator[Row]]


def cases() -> dict[str, Case]:
    """All cases by name, in the order in which they run."""
    from benchmarks import transfer_cases

    return {
        "loopback": transfer_cases.loopback,
        "lists": transfer_cases.lists,
        "shaped": transfer_cases.shaped,
        "chain": transfer_cases.chain,
        "live": transfer_cases.live,
        "nccl": transfer_cases.nccl,
    }


def run(options: argparse.Namespace) -> int:
    """`python -m benchmarks transfer`."""
    from benchmarks.environment import environment
    from benchmarks.transfer_report import tables, write_csv

    wanted = Options.quick() if options.quick else Options()
    given = {
        "size_bytes": options.size, "live_bytes": options.live, "rounds": options.rounds,
        "cases": options.cases, "list_bytes": 4 * options.size if options.size else None,
    }  # fmt: skip
    wanted = Options(**(vars(wanted) | {k: v for k, v in given.items() if v is not None}))
    if unknown := sorted(set(wanted.cases) - cases().keys()):
        print(f"cases {unknown} do not exist, expected {', '.join(cases())}", file=sys.stderr)
        return 2
    stamp = environment() | {"command": f"python -m benchmarks {' '.join(sys.argv[1:])}"}
    rows: list[Row] = []
    for found, skipped in measure(wanted):
        rows += found
        stamp |= {f"skipped {name}": why for name, why in skipped.items()}
        if options.csv:  # after each case: the last may take minutes, or fail
            write_csv(Path(options.csv), rows, stamp)
    if options.json:
        print(json.dumps(document(rows, stamp), indent=1))
    else:
        print(tables(rows, stamp))
    return 1 if any(row.nwrong for row in rows) else 0


def measure(options: Options) -> Iterator[tuple[list[Row], dict[str, str]]]:
    """For each case that is wanted its rows, or its name and why it was left out."""
    for name, case in cases().items():
        if options.cases and name not in options.cases:
            continue
        rows: list[Row] = []
        try:
            for row in case(options):
                rows.append(row)
                _show(row)
        except NotHere as reason:
            print(f"{name} is left out: {reason}", file=sys.stderr)
            yield rows, {name: str(reason)}
        else:
            yield rows, {}


class NotHere(Exception):  # noqa: N818 - a reason to leave a case out, no error
    """A case cannot be measured on this machine."""


def document(rows: list[Row], stamp: dict[str, str]) -> dict[str, Any]:
    """JSON in the shape of nccl-tests; of the environment only what concerns NCCL."""
    nccl = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
    speeds = [row.busbw for row in rows]
    return {
        "schema": SCHEMA,
        "machine": stamp,
        "env": nccl,
        "results": [row.as_nccl() for row in rows],
        "out_of_bounds": {"count": sum(row.nwrong > 0 for row in rows)},
        "average_bus_bandwidth": {"bandwidth": float(np.mean(speeds)) if speeds else 0.0},
    }


def _show(row: Row) -> None:
    name = f"{row.case}: {row.path}, {row.data}, {row.ranks} ranks"
    if row.bucket_bytes:
        name += f", {row.streams} x {row.bucket_bytes / MIB:g} MiB"
    share = f" ({row.of_bound:.2f} of {row.bound})" if row.bound else ""
    predicted = f", predicted {row.predicted_s:.4f}" if row.predicted_s else ""
    print(
        f"{name:<72} {row.busbw:7.3f} GB/s {row.measured_s:8.4f} s{predicted}{share}",
        file=sys.stderr,
        flush=True,
    )
