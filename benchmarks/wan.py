"""Versions over a long way: from publish to verified on two engines, through a store far away."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.targets import Target
from benchmarks.wan_link import Link, why_not
from benchmarks.wan_run import NUM_ENGINES, Group, Round, Scheme, line_rate

MARKERS = ("<!-- wan:begin -->", "<!-- wan:end -->")
REFERENCE_S = 0.26
"""Wire time alone of the article's 8B row: ten times the bytes at ten times the rate."""
MAX_TRIPS, MAX_RATIO, MIN_PEER_RATIO, MAX_LATE_RATIO = 5, 1.2, 2.0, 1.3
_LINE_BYTES = 100_000_000
MIN_BYTES = 1_000_000_000
"""Of weights; with less, the targets say nothing."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    size_bytes: int = 1_640_000_000
    density: float = 0.01
    rate_gbps: float = 1.0
    rtt_s: float = 0.06
    rounds: int = 9
    behind: int = 50

    @classmethod
    def quick(cls) -> Options:
        """A minute or two."""
        return cls(size_bytes=64_000_000, rounds=5, behind=5)


@dataclass(frozen=True)
class Row:
    """One line of the CSV; benchmarks/README.md says what each column means."""

    scheme: str
    case: str
    raw_bytes: int
    frame_bytes: int
    rounds: int
    seconds: float
    p10_s: float
    p90_s: float
    round_trips: int = 0
    rtt_s: float = 0.0
    encode_s: float = 0.0
    store_s: float = 0.0
    wire_s: float = 0.0
    apply_s: float = 0.0
    predicted_s: float = 0.0
    note: str = ""

    @property
    def ratio(self) -> float:
        """Measured seconds to predicted ones; 0 where none are predicted."""
        return self.seconds / self.predicted_s if self.predicted_s else 0.0

    @property
    def in_turn_s(self) -> float:
        """Round trips and all phases, one after the other: nothing overlaps."""
        phases = self.encode_s + self.wire_s + self.apply_s
        return self.round_trips * self.rtt_s + phases if phases else 0.0

    @classmethod
    def columns(cls) -> list[str]:
        return [column.name for column in fields(cls)]

    @classmethod
    def from_text(cls, text: dict[str, str]) -> Row:
        """A row as the CSV holds it."""
        kinds: dict[str, type] = {"str": str, "int": int, "float": float}
        return cls(**{f.name: kinds[str(f.type)](text[f.name]) for f in fields(cls)})


def run(options: argparse.Namespace) -> int:
    """`python -m benchmarks wan`."""
    from benchmarks.environment import environment

    if reason := why_not():
        print(f"no link can be made here: {reason}", file=sys.stderr)
        return 2
    wanted = Options.quick() if options.quick else Options()
    given = {
        "size_bytes": options.size, "rounds": options.rounds, "behind": options.behind,
        "rtt_s": None if options.rtt is None else options.rtt / 1000, "rate_gbps": options.rate,
    }  # fmt: skip
    wanted = replace(wanted, **{k: v for k, v in given.items() if v is not None})
    stamp = environment() | {"command": f"python -m benchmarks {' '.join(sys.argv[1:])}"}
    rows: list[Row] = []
    for row in measure(wanted, stamp):
        rows.append(row)
        print(f"{row.scheme}, {row.case}: {row.seconds:.3f} s", file=sys.stderr, flush=True)
        if options.csv:  # after each row: the last may take minutes, or fail
            write_csv(options.csv, rows, stamp)
    if options.json:
        print(json.dumps({"machine": stamp, "results": [asdict(row) for row in rows]}, indent=1))
    else:
        print(tables(rows, stamp))
    return 0


def measure(options: Options, stamp: dict[str, str]) -> Iterator[Row]:
    """The rows, as they are ready; adds what was found about the link to the stamp."""
    one_way_s = options.rtt_s / 2
    with Link(options.rate_gbps, one_way_s) as link:
        rate = line_rate(link, _LINE_BYTES)
        stamp["line rate of one TCP stream, MB/s"] = f"{rate / 1e6:.1f}"
        alone = {scheme: _alone(link, scheme, options) for scheme in ("ours", "peer")}  # type: ignore[arg-type]
        with _group(link, "ours", options) as group:
            yield _row("warm", group, _rounds(group, options.rounds), alone["ours"], rate)
            found = _rounds(group, options.rounds, is_cold=True)
            yield _row("cold: new connections", group, found, alone["ours"], rate)
            yield from _late(group, options.behind, rate)
        with _group(link, "peer", options) as group:
            yield _row("warm", group, _rounds(group, options.rounds), alone["peer"], rate)
            found = _rounds(group, options.rounds, is_cold=True)
            yield _row("cold: new connections", group, found, alone["peer"], rate)
    with (
        Link(options.rate_gbps, one_way_s, keeps_windows=False) as link,
        _group(link, "ours", options) as group,
    ):
        found = _rounds(group, options.rounds)
        yield _row("warm, windows start anew after a pause", group, found, alone["ours"], rate)


def _group(link: Link, scheme: Scheme, options: Options, *, is_near: bool = False) -> Group:
    return Group(link, scheme, options.size_bytes, options.density, is_near)


def _alone(link: Link, scheme: Scheme, options: Options) -> Round:
    """The phases of a version where no link is in the way: medians."""
    with _group(link, scheme, options, is_near=True) as group:
        found = _rounds(group, options.rounds)
    return Round(
        seconds=median(each.seconds for each in found),
        encode_s=median(each.encode_s for each in found),
        store_s=median(each.store_s for each in found),
        apply_s=median(each.apply_s for each in found),
        num_bytes=found[0].num_bytes,
        raw_bytes=found[0].raw_bytes,
    )


def _rounds(group: Group, num_rounds: int, *, is_cold: bool = False) -> list[Round]:
    """Rounds after two that open connections and windows; cold ones begin without."""
    found = []
    for number in range(-2, num_rounds):
        if is_cold:
            group.drop_connections()
        one = group.round()
        if number >= 0:
            found.append(one)
    return found


def _row(case: str, group: Group, rounds: list[Round], alone: Round, rate: float) -> Row:
    seconds = [each.seconds for each in rounds]
    frame_bytes = int(median(each.num_bytes for each in rounds))
    found_trips = [each.round_trips for each in rounds]
    rtt_s, trips = 2 * group.link.delay_s, max(found_trips)
    wire_s = (1 + NUM_ENGINES) * frame_bytes / rate  # once to the store, once to each engine
    slowest_s = max(alone.encode_s, alone.store_s, wire_s, alone.apply_s)
    return Row(
        scheme=_NAMES[group.scheme],
        case=case,
        raw_bytes=rounds[0].raw_bytes,
        frame_bytes=frame_bytes,
        rounds=len(rounds),
        seconds=median(seconds),
        p10_s=float(np.percentile(seconds, 10)),
        p90_s=float(np.percentile(seconds, 90)),
        round_trips=trips,
        rtt_s=rtt_s,
        encode_s=alone.encode_s,
        store_s=alone.store_s,
        wire_s=wire_s,
        apply_s=alone.apply_s,
        predicted_s=trips * rtt_s + slowest_s,
        note=f"round trips {min(found_trips)} to {max(found_trips)}" if trips else "",
    )


def _late(group: Group, behind: int, rate: float) -> Iterator[Row]:
    """An engine that missed versions, and one that has just started: one, then the other, with all
    cores.
    """
    group.publish(anchor=True)
    for engine in group.engines:
        engine.ask(do="use", threads=len(os.sched_getaffinity(0)))
    raw_bytes = 0
    for number in range(behind):
        raw_bytes = group.publish(shift=7919 * number + 1)["raw_bytes"]
    for number, do, case in (
        (0, "pull", f"late: an engine {behind} versions behind"),
        (1, "join", f"late: a new engine, full state {behind} versions old"),
    ):
        seconds, told = group.timed(number, do)
        yield Row(
            scheme=_NAMES["ours"], case=case, raw_bytes=raw_bytes, frame_bytes=told["num_bytes"],
            rounds=1, seconds=seconds, p10_s=seconds, p90_s=seconds, rtt_s=2 * group.link.delay_s,
            wire_s=told["num_bytes"] / rate, apply_s=told["apply"],
            predicted_s=told["num_bytes"] / rate, note=f"plan: {told['kind']}",
        )  # fmt: skip


_NAMES: dict[Scheme, str] = {"ours": "gymfast", "peer": "xor, zstd level 1"}


def check_targets(rows: list[Row]) -> list[Target]:
    """Each target that these rows can judge."""
    rows = [row for row in rows if row.raw_bytes >= MIN_BYTES]
    found: list[Target] = []

    def add(what: str, measured: float, limit: float, *, at_most: bool) -> None:
        is_met = measured <= limit if at_most else measured >= limit
        found.append(Target(what, f"{'<=' if at_most else '>='} {limit:g}", measured, is_met))

    warm = {row.scheme: row for row in rows if row.case == "warm"}
    ours, peer = warm.get(_NAMES["ours"]), warm.get(_NAMES["peer"])
    if ours:
        add("warm: sequential round trips", ours.round_trips, MAX_TRIPS, at_most=True)
        what = "warm: x (round trips and the slowest phase)"
        add(what, ours.ratio, MAX_RATIO, at_most=True)
    if ours and peer:
        what = "xor, zstd level 1: x the seconds of gymfast, warm"
        add(what, peer.seconds / ours.seconds, MIN_PEER_RATIO, at_most=False)
    for row in rows:
        if row.case.startswith("late"):
            add(f"{row.case}: x line rate", row.ratio, MAX_LATE_RATIO, at_most=True)
    return found


def write_csv(path: Path, rows: list[Row], stamp: dict[str, str]) -> None:
    """The rows, after one comment line for each fact about machine and command."""
    with path.open("w", newline="") as file:
        for key, value in stamp.items():
            file.write(f"# {key}: {value}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row.columns())
        for row in rows:
            values = asdict(row).values()
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])


def read_csv(path: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows and what was said about machine and command."""
    lines = path.read_text().splitlines()
    comments = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
    body = io.StringIO("\n".join(line for line in lines if not line.startswith("# ")))
    return [Row.from_text(record) for record in csv.DictReader(body)], {
        key: value for key, _, value in comments
    }


def is_wan(path: Path) -> bool:
    """Whether a CSV has rows of this benchmark."""
    header = next((line for line in path.read_text().splitlines() if line[:2] != "# "), "")
    return header == ",".join(Row.columns())


def tables(rows: list[Row], stamp: dict[str, str]) -> str:
    """Markdown: versions, late joins, targets."""
    keys = ("cpu", "cores", "kernel", "python", "line rate of one TCP stream, MB/s", "commit")
    facts = ", ".join(f"{key} {stamp[key]}" for key in keys if stamp.get(key))
    head = f"`{stamp.get('command', '')}` on {facts}. Medians; seconds."
    late = [row for row in rows if row.case.startswith("late")]
    followed = [row for row in rows if row not in late]
    targets = [
        [t.what, t.wanted, f"{t.measured:.2f}", "yes" if t.is_met else "**no**"]
        for t in check_targets(rows)
    ]
    parts = [
        head,
        _table("Publish to verified on two engines", _FOLLOW_COLUMNS, map(_follow_cells, followed)),
        _table("Late", _LATE_COLUMNS, map(_late_cells, late)),
        _table("Targets over a long way", ["what", "target", "measured", "met"], targets),
    ]
    return "\n\n".join(part for part in parts if part)


_FOLLOW_COLUMNS = [
    "scheme", "case", "frame bytes", "seconds", "p10", "p90", "round trips", "alone: encode",
    "store", "wire", "apply", "trips + slowest", "x", "all in turn", "article, wire only",
]  # fmt: skip
_LATE_COLUMNS = ["case", "bytes", "seconds", "at line rate", "x", "apply", "note"]


def _follow_cells(row: Row) -> list[str]:
    phases = (row.encode_s, row.store_s, row.wire_s, row.apply_s, row.predicted_s)
    return [
        row.scheme, row.case, f"{row.frame_bytes:,}",
        *(f"{s:.3f}" for s in (row.seconds, row.p10_s, row.p90_s)), str(row.round_trips),
        *(f"{s:.3f}" for s in phases), f"{row.ratio:.2f}", f"{row.in_turn_s:.3f}",
        f"{REFERENCE_S:g}",
    ]  # fmt: skip


def _late_cells(row: Row) -> list[str]:
    return [
        row.case, f"{row.frame_bytes:,}", f"{row.seconds:.2f}", f"{row.wire_s:.2f}",
        f"{row.ratio:.2f}", f"{row.apply_s:.2f}", row.note,
    ]  # fmt: skip


def _table(title: str, columns: list[str], body: Any) -> str:
    body = list(body)
    if not body:
        return ""
    align = [":--" if index == 0 else "--:" for index in range(len(columns))]
    lines = [columns, align, *body]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
