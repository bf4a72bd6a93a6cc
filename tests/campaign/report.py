"""Figures of campaigns to CSV, and from there into docs/reliability.md.

`python -m tests.campaign.report FILE.json ...` replaces the CSV; without files, only the tables
are made anew.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from pathlib import Path

from benchmarks.report import insert
from tests.campaign.counts import WHAT

ROOT = Path(__file__).parents[2]
CSV = ROOT / "benchmarks" / "results" / "campaign.csv"
MUTANTS_CSV = ROOT / "benchmarks" / "results" / "campaign-mutants.csv"
DOCS = ROOT / "docs" / "reliability.md"
COLUMNS = ("kind", "invariant", "trials", "violations")
KINDS = ("simulated", "files", "objects")
MARKERS = ("<!-- campaign:begin -->", "<!-- campaign:end -->")
MUTANT_MARKERS = ("<!-- mutants:begin -->", "<!-- mutants:end -->")


def write(files: list[Path], path: Path = CSV) -> None:
    """The CSV of these runs: figures of one kind are added up."""
    trials: Counter[tuple[str, str]] = Counter()
    broken: Counter[tuple[str, str]] = Counter()
    runs: dict[tuple[str, str], list[dict]] = {}
    for file in files:
        run = json.loads(file.read_text())
        kind = run["kind"]
        trials.update({(kind, name): number for name, number in run["trials"].items()})
        broken.update((kind, invariant) for invariant in run["violations"].values())
        runs.setdefault((kind, run["commit"]), []).append(run)
    lines = [_told(*which, found) for which, found in sorted(runs.items())]
    with path.open("w", newline="") as out:
        out.write("\n".join([*lines, ""]))
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for kind, name in sorted(trials.keys() | broken.keys()):
            writer.writerow((kind, name, trials[kind, name], broken[kind, name]))


def _told(kind: str, commit: str, runs: list[dict]) -> str:
    """What was run, in one line: seeds in a row are one range."""
    ranges: list[list[int]] = []
    for first, last in sorted(run["seeds"] for run in runs):
        if ranges and ranges[-1][1] == first:
            ranges[-1][1] = last
        else:
            ranges.append([first, last])
    command = runs[0]["command"].split(" --seeds ")
    seeds = " and ".join(f"{first}:{last}" for first, last in ranges)
    rest = command[1].partition(" ")[2]
    num_broken = sum(len(run["violations"]) for run in runs)
    return (
        f"# {kind}: `{command[0]} --seeds {seeds}{' ' + rest if rest else ''}` at commit {commit}: "
        f"{num_broken} broken of {sum(last - first for first, last in ranges)}"
    )


def read(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Rows, and the lines about the runs."""
    lines = path.read_text().splitlines()
    body = "\n".join(line for line in lines if not line.startswith("# "))
    return list(csv.DictReader(io.StringIO(body))), [x[2:] for x in lines if x.startswith("# ")]


def table(path: Path = CSV) -> str:
    """One row an invariant: trials of each kind, violations of all."""
    rows, runs = read(path)
    found = {(row["kind"], row["invariant"]): row for row in rows}

    def number(kind: str, name: str) -> str:
        row = found.get((kind, name))
        return f"{int(row['trials']):,}" if row else "-"

    lines = [
        "| id | trial | simulated | files | objects | violations |",
        "|---|---|---|---|---|---|",
    ]
    for name, what in WHAT.items():
        numbers = [number(kind, name) for kind in KINDS]
        mine = [found[kind, name] for kind in KINDS if (kind, name) in found]
        broken = sum(int(row["violations"]) for row in mine)
        lines.append(f"| {name} | {what} | {' | '.join(numbers)} | {broken} |")
    events = sorted({row["invariant"] for row in rows} - WHAT.keys())
    lines += ["", "| what happened | simulated | files | objects |", "|---|---|---|---|"]
    lines += [f"| {e} | {' | '.join(number(kind, e) for kind in KINDS)} |" for e in events]
    return "\n".join([*(f"- {line}" for line in runs), "", *lines])


def mutant_table(path: Path = MUTANTS_CSV) -> str:
    """One row a deliberate bug: the first history that shows it, and which invariant it breaks."""
    rows, _ = read(path)
    lines = ["| deliberate bug (`--mutant`) | first seed that shows it | breaks |", "|---|---|---|"]
    lines += [f"| {row['mutant']} | {row['seed']} | {row['invariant']} |" for row in rows]
    return "\n".join(lines)


def main(files: list[str]) -> int:
    if files:
        write([Path(file) for file in files])
    insert(DOCS, table(), MARKERS)
    insert(DOCS, mutant_table(), MUTANT_MARKERS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
