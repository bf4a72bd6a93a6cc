"""Rows of transfers to CSV and back, and to Markdown tables with their targets."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.targets import Target
from benchmarks.transfer import MIB, Row

MARKERS = ("<!-- transfer:begin -->", "<!-- transfer:end -->")
_ARTICLE_S = 0.26  # of pure wire time, for the same versions at ten times the size and rate
_PROJECTED_GBPS = {  # 1e9 bytes of weights a second: encode, then apply and verify
    "16 cores": (60.0, 80.0),
    "a GPU": (1000.0, 1000.0),
}
"""Assumed, not measured: 16 cores at 0.6 of eight times what two reach when nothing else runs; a
GPU at the targets of docs/benchmarks.md for an H200, apply and verify one after the other."""


def write_csv(path: Path, rows: Iterable[Row], stamp: dict[str, str]) -> None:
    """The rows, after one comment line for each fact about machine and command."""
    with path.open("w", newline="") as file:
        for key, value in stamp.items():
            file.write(f"# {key}: {value}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row.columns())
        for row in rows:
            values = row.as_dict().values()
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])


def read_csv(path: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows and what was said about machine and command."""
    lines = path.read_text().splitlines()
    comments = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
    body = io.StringIO("\n".join(line for line in lines if not line.startswith("# ")))
    rows = [Row.from_text(record) for record in csv.DictReader(body)]
    return rows, {key: value for key, _, value in comments}


def is_transfer(path: Path) -> bool:
    """Whether a CSV has rows of transfers."""
    header = next((line for line in path.read_text().splitlines() if line[:2] != "# "), "")
    return header == ",".join(Row.columns())


def tables(rows: list[Row], stamp: dict[str, str]) -> str:
    """Markdown: a table for each case, the versions end to end, and the targets."""
    parts = [_machine(stamp)]
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        parts.append(_live(mine) if case == "live" else _case(case, mine))
    parts.append(_targets(check_targets(rows)))
    return "\n\n".join(part for part in parts if part)


def check_targets(rows: list[Row]) -> list[Target]:
    """Each target of transfers that these rows can judge; of several buckets the best counts."""
    found: list[Target] = []

    def add(what: str, measured: float, limit: float, *, at_most: bool = False) -> None:
        is_met = measured <= limit if at_most else measured >= limit
        found.append(Target(what, f"{'<=' if at_most else '>='} {limit:g}", measured, is_met))

    def best(case: str, path: str, test: Callable[[Row], bool] = lambda _: True) -> float:
        speeds = [r.algbw for r in rows if (r.case, r.path) == (case, path) and test(r)]
        return max(speeds, default=0.0)

    tcp, peer, gloo = (best("loopback", path) for path in ("tcp", "iperf3", "torch gloo"))
    if tcp and peer:
        add("tcp on loopback: x iperf3, best streams of each", tcp / peer, 0.9)
    if tcp and gloo:
        add("tcp on loopback: x gloo broadcast", tcp / gloo, 1.5)
    shm, copy = best("loopback", "shm"), best("loopback", "memcpy")
    if shm and copy:
        add("shm: x memcpy", shm / copy, 0.8)
    for name, limit in (("Qwen3-0.6B", 1.0), ("per-expert LoRA", 3.0)):
        flat = best("lists", "gloo flat buckets", lambda r, n=name: n in r.data)  # type: ignore[misc]
        each = best("lists", "torch gloo per tensor", lambda r, n=name: n in r.data)  # type: ignore[misc]
        if flat and each:
            add(f"{name} over gloo: flat buckets x per tensor", flat / each, limit)
    for case, limit in (("shaped", 0.04), ("chain", 0.03)):
        mine = [r for r in rows if r.case == case]
        if mine:
            off = max(abs(r.measured_s / r.predicted_s - 1) for r in mine)
            add(f"{case}: largest deviation from the formula", off, limit, at_most=True)
    for row in rows:
        if row.case == "live" and "full" in row.data:
            add(f"{row.data}: x line rate", row.of_bound, 0.95)
        elif row.case == "live":
            add(f"{row.data}: seconds end to end", row.measured_s, 0.40, at_most=True)
    return found


def _machine(stamp: dict[str, str]) -> str:
    keys = ("cpu", "cores", "kernel", "python", "torch", "commit")
    facts = ", ".join(f"{key} {stamp[key]}" for key in keys if stamp.get(key))
    skipped = "".join(
        f" Left out: {key.removeprefix('skipped ')} ({value})."
        for key, value in stamp.items()
        if key.startswith("skipped ")
    )
    return (
        f"`{stamp.get('command', '')}` on {facts}. Medians; GB is 10^9 bytes, and busbw is algbw "
        f"for a broadcast, as in nccl-tests; time is that of the slowest rank.{skipped}"
    )


def _case(case: str, rows: list[Row]) -> str:
    columns = [
        "path", "data", "ranks", "streams", "bucket", "time(us)", "p10", "p90", "busbw(GB/s)",
        "#wrong", "predicted s", "measured s", "of bound",
    ]  # fmt: skip
    body = [
        [
            row.path,
            row.data,
            str(row.ranks),
            str(row.streams),
            f"{row.bucket_bytes / MIB:g} MiB" if row.bucket_bytes else "",
            f"{row.time_us:.0f}",
            f"{row.time_p10_us:.0f}",
            f"{row.time_p90_us:.0f}",
            f"{row.busbw:.3f}",
            str(row.nwrong),
            f"{row.predicted_s:.4f}" if row.predicted_s else "",
            f"{row.measured_s:.4f}",
            f"{row.of_bound:.2f} of {row.bound}" if row.bound else "",
        ]
        for row in rows
    ]
    return _table(f"transfer, {case}", columns, body)


def _live(rows: list[Row]) -> str:
    """What was measured, and what it would be where encode and apply are faster."""
    columns = ["version", "bytes sent", "wire alone s", "end to end s", "p10", "p90", "#wrong"]
    columns += [f"projected: {name}" for name in _PROJECTED_GBPS]
    body = []
    for row in rows:
        is_full = "full" in row.data
        cells = [row.data, f"{row.sent_bytes:,}", f"{row.predicted_s:.3f}"]
        cells += [f"{row.measured_s:.3f}"]
        cells += [f"{us / 1e6:.3f}" for us in (row.time_p10_us, row.time_p90_us)]
        cells.append(str(row.nwrong))
        for rates in _PROJECTED_GBPS.values():
            work_s = row.size / 1e9 / rates[1]
            sent_s = max(row.size / 1e9 / rates[0], row.predicted_s)
            cells.append("" if is_full else f"{sent_s + work_s:.3f}")
        body.append(cells)
    notes = "\n".join(f"- {row.data}, {row.note}." for row in rows)
    return (
        _table("transfer, live versions at 1 Gb/s", columns, body)
        + f"\n\nThe article counts {_ARTICLE_S} s of wire alone (2 % of the bytes, no encode, no "
        "apply, no verify) for ten times the bytes at ten times the rate. Projections assume "
        + "; ".join(
            f"{name}: encode {rates[0]:g} GB/s while it is sent, then apply and verify "
            f"{rates[1]:g} GB/s"
            for name, rates in _PROJECTED_GBPS.items()
        )
        + f"; **they are not measured**.\n\n{notes}"
    )


def _targets(targets: list[Target]) -> str:
    body = [
        [t.what, t.wanted, f"{t.measured:.3f}", "yes" if t.is_met else "**no**"] for t in targets
    ]
    return _table("Targets of transfers", ["what", "target", "measured", "met"], body)


def _table(title: str, columns: list[str], body: list[list[str]]) -> str:
    if not body:
        return ""
    align = [":--" if index == 0 else "--:" for index in range(len(columns))]
    lines = [columns, align, *body]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
