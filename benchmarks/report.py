"""Rows to CSV and back, and to Markdown; the README's table is made here, not by hand."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.targets import Target

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
MARKERS = (BEGIN, END)
_BOUNDS = ("memcpy", "stream copy", "compare", "read", "xxh3-128")
_OTHER = ("fused pass", "encode blocks", "apply blocks", "attach", "verify", "first apply")


def write_csv(path: Path, rows: Iterable[Row], stamp: dict[str, str]) -> None:
    """The rows, after one comment line for each fact about machine and command."""
    with path.open("w", newline="") as file:
        for key, value in stamp.items():
            file.write(f"# {key}: {value}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row.columns())
        for row in rows:
            writer.writerow([_short(value) for value in row.as_dict().values()])


def read_csv(path: Path) -> tuple[list[Row], dict[str, str]]:
    lines = path.read_text().splitlines()
    comments = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
    body = io.StringIO("\n".join(line for line in lines if not line.startswith("# ")))
    rows = [Row.from_text(record) for record in csv.DictReader(body)]
    return rows, {key: value for key, _, value in comments}


def insert(path: Path, text: str, markers: tuple[str, str] = MARKERS) -> None:
    """Replaces what stands between the markers; ValueError if they are not there."""
    before, begin, rest = path.read_text().partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise ValueError(
            f"{path}: no {' ... '.join(markers)}: put the two markers where the table goes"
        )
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def tables(rows: list[Row], stamp: dict[str, str], targets: list[Target]) -> str:
    """Markdown: one table of codecs per state, the receiver's other speeds, bounds and targets."""
    parts = [_machine(rows, stamp)]
    for data, density in dict.fromkeys((row.data, row.density) for row in rows):
        mine = [row for row in rows if (row.data, row.density) == (data, density)]
        parts.append(_codecs(f"{data}, {100 * density:.2g} % changed", mine))
    for title, ops in (("Other operations", _OTHER), ("Bounds", _BOUNDS)):
        parts.append(_plain(title, [row for row in rows if row.op in ops]))
    parts.append(_targets(targets))
    return "\n\n".join(part for part in parts if part)


def _machine(rows: list[Row], stamp: dict[str, str]) -> str:
    size = max((row.state_bytes for row in rows if row.gbps), default=0)
    rounds = min((row.rounds for row in rows if row.rounds), default=0)
    keys = ("cpu", "cores", "cpu_target", "compiler", "python", "numpy", "commit")
    facts = ", ".join(f"{key} {stamp[key]}" for key in keys if stamp.get(key))
    return (
        f"`{stamp.get('command', '')}` on {facts}. State of {size / 2**20:,.0f} MiB, cold cache, "
        f"medians of {rounds} or more; GB/s of raw BF16 bytes and, in brackets, the ratio to libc "
        "memcpy of the same bytes beside each sample."
    )


def _codecs(title: str, rows: list[Row]) -> str:
    has_two = any(row.threads == 2 and row.op == "encode" for row in rows)
    columns = ["codec", "bytes", "saving", "bits per change", "x limit", "encode", "apply"]
    columns += ["encode, 2 threads", "apply, 2 threads"] if has_two else []
    by_codec: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        if row.frame_bytes:
            by_codec.setdefault(row.codec, {})[row.op, row.threads] = row
    body = []
    for codec, found in by_codec.items():
        row = next(iter(found.values()))
        cells = [codec, f"{row.frame_bytes:,}", f"{100 * row.saving:.2f} %"]
        cells += [f"{row.bits_per_change:.2f}", f"{row.limit_ratio:.2f}"]
        for threads in (1, 2) if has_two else (1,):
            cells += [_speed(found.get((op, threads))) for op in ("encode", "apply")]
        body.append(cells)
    return _table(title, columns, body)


def _plain(title: str, rows: list[Row]) -> str:
    body: dict[str, dict[int, Row]] = {}
    for row in rows:
        codec = "" if row.codec == "bound" else f"{row.codec}, "
        name = f"{codec}{row.op}, {row.data} {100 * row.density:.2g} %"
        body.setdefault(name, {})[row.threads] = row
    columns = ["what", "1 thread", "2 threads"]
    cells = [[what, *(_speed(found.get(n)) for n in (1, 2))] for what, found in body.items()]
    return _table(title, columns, cells)


def _targets(targets: list[Target]) -> str:
    body = [
        [t.what, t.wanted, f"{t.measured:.2f}", "yes" if t.is_met else "**no**"] for t in targets
    ]
    return _table("Targets", ["what", "target", "measured", "met"], body)


def _table(title: str, columns: list[str], body: list[list[str]]) -> str:
    if not body:
        return ""
    align = [":--" if index == 0 else "--:" for index in range(len(columns))]
    lines = [columns, align, *body]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _speed(row: Row | None) -> str:
    return f"{row.gbps:.2f} ({row.copy_ratio:.2f})" if row and row.gbps else ""


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
