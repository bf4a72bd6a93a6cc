"""The driver: each command but `report`, which makes tables, measures something."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.harness import MIN_ROUNDS, Driver, Settings

SCHEMA = "gymfast-benchmarks/1"
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def run_cases(options: argparse.Namespace) -> int:
    from benchmarks.environment import environment, missing_packages
    from benchmarks.report import tables, write_csv
    from benchmarks.targets import check_targets

    if missing := missing_packages():
        print(
            f"benchmarks need {', '.join(missing)}: pip install 'gymfast[bench]'", file=sys.stderr
        )
        return 2
    import pytest

    driver = Driver(_settings(options))
    cases = Path(__file__).with_name("cases")
    command = ["-c", str(cases / "pytest.ini"), f"--rootdir={cases}", str(cases / options.cases)]
    # Peers that start threads of their own get one, like gymfast; its rows say how many they use.
    os.environ |= {"OMP_NUM_THREADS": "1", "BLOSC_NTHREADS": "1", "NUMEXPR_NUM_THREADS": "1"}
    with contextlib.redirect_stdout(sys.stderr):
        status = int(pytest.main(command, plugins=[driver]))
    if status:
        print("a case failed: no tables, no CSV", file=sys.stderr)
        return status
    stamp = environment() | {"command": f"python -m benchmarks {' '.join(sys.argv[1:])}"}
    targets = check_targets(driver.rows)
    if options.csv:
        write_csv(options.csv, driver.rows, stamp)
    if options.json:
        document = {
            "schema": SCHEMA,
            "environment": stamp,
            "settings": asdict(driver.settings),
            "rows": [row.as_dict() for row in driver.rows],
            "targets": [asdict(target) for target in targets],
        }
        print(json.dumps(document, indent=1))
    else:
        print(tables(driver.rows, stamp, targets))
    return 0


def _run_pause(options: argparse.Namespace) -> int:
    from benchmarks.slime.pause import run_pause

    return run_pause(options)


def run_transfer(options: argparse.Namespace) -> int:
    from benchmarks.transfer import run

    return run(options)


def run_density(options: argparse.Namespace) -> int:
    from benchmarks.density import run

    return run(options)


def run_wan(options: argparse.Namespace) -> int:
    from benchmarks.wan import run

    return run(options)


def run_report(options: argparse.Namespace) -> int:
    from benchmarks import report, transfer_report, wan
    from benchmarks.targets import check_targets

    markers = report.MARKERS
    if transfer_report.is_transfer(options.csv):
        text = transfer_report.tables(*transfer_report.read_csv(options.csv))
        markers = transfer_report.MARKERS
    elif wan.is_wan(options.csv):
        text = wan.tables(*wan.read_csv(options.csv))
        markers = wan.MARKERS
    else:
        rows, stamp = report.read_csv(options.csv)
        text = report.tables(rows, stamp, check_targets(rows))
    if options.readme:
        report.insert(options.readme, text, markers)
    else:
        print(text)
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    settings = Settings.quick() if options.quick else Settings()
    given = {
        "size_bytes": options.size,
        "densities": options.density,
        "threads": options.threads,
        "rounds": options.rounds,
        "codecs": options.codecs,
        "data": options.data,
        "masters": options.masters,
        "seed": options.seed,
        "is_cold": False if options.hot else None,
    }
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    delta = commands.add_parser("delta", help="the delta codec beside its peers and plain copies")
    delta.set_defaults(run=run_cases, cases="delta.py")
    _add_options(delta)
    hf_delta = commands.add_parser(
        "hf-delta", help="zstd frames of the published directory format beside slime's scheme"
    )
    hf_delta.set_defaults(run=run_cases, cases="hf_delta.py")
    _add_options(hf_delta)
    hf_store = commands.add_parser(
        "hf-store", help="version directories through a store, as slime's hooks carry them"
    )
    hf_store.set_defaults(run=run_cases, cases="hf_store.py")
    _add_options(hf_store)
    pause = commands.add_parser(
        "slime-pause", help="the pause of an engine under slime's delta updater and under ours"
    )
    pause.set_defaults(run=_run_pause)
    pause.add_argument("--source", type=Path, required=True, help="a checkout of slime")
    pause.add_argument("--size", type=_size, default=384 << 20, help="bytes of the model")
    pause.add_argument("--density", type=float, default=0.01, help="share of changed elements")
    pause.add_argument("--rounds", type=_rounds, default=7, help="updates per row")
    pause.add_argument("--folder", type=Path, help="where checkpoints and versions go")
    pause.add_argument("--csv", type=Path, metavar="FILE", help="also write all rows as CSV")
    transfer = commands.add_parser(
        "transfer", help="channels beside iperf3, gloo and nccl-tests; shaped links; versions"
    )
    transfer.set_defaults(run=run_transfer)
    transfer.add_argument("--json", action="store_true", help="JSON as nccl-tests has it")
    transfer.add_argument("--csv", type=Path, metavar="FILE", help="also write all rows as CSV")
    transfer.add_argument("--quick", action="store_true", help="64 MiB, five rounds")
    transfer.add_argument(
        "--size", type=_size, help="bytes that are moved, as 512MiB (the default)"
    )
    transfer.add_argument("--live", type=_size, help="bytes of versions (default 1640000000)")
    transfer.add_argument("--rounds", type=_rounds, help=f"samples a row, at least {MIN_ROUNDS}")
    transfer.add_argument(
        "--cases",
        type=_words,
        metavar="NAME,...",
        help="loopback, lists, shaped, chain, live, nccl",
    )
    wan = commands.add_parser(
        "wan", help="versions through a store behind a long link, beside slime's scheme"
    )
    wan.set_defaults(run=run_wan)
    wan.add_argument("--json", action="store_true", help="JSON instead of tables")
    wan.add_argument("--csv", type=Path, metavar="FILE", help="also write all rows as CSV")
    wan.add_argument("--quick", action="store_true", help="64 MB, five rounds, five behind")
    wan.add_argument("--size", type=_size, help="bytes of the weights (default 1640000000)")
    wan.add_argument("--rounds", type=_rounds, help=f"samples a row, at least {MIN_ROUNDS}")
    wan.add_argument("--behind", type=int, help="versions that late engines missed (default 50)")
    wan.add_argument("--rtt", type=float, help="round trip in ms (default 60)")
    wan.add_argument("--rate", type=float, help="of the link, 1e9 bits a second (default 1)")
    density = commands.add_parser(
        "density", help="how much of BF16, INT4, FP8 and adapters changes in a step"
    )
    density.set_defaults(run=run_density)
    density.add_argument("--json", action="store_true", help="JSON instead of a table")
    density.add_argument("--csv", type=Path, metavar="FILE", help="also write all rows as CSV")
    density.add_argument("--quick", action="store_true", help="16 MiB, a tiny model, few steps")
    density.add_argument("--size", type=_size, help="bytes of the generated model, as 64MiB")
    density.add_argument(
        "--without-training", action="store_true", help="leave out what needs torch"
    )
    report = commands.add_parser("report", help="tables from a CSV, to the screen or a README")
    report.set_defaults(run=run_report)
    report.add_argument("csv", type=Path)
    report.add_argument(
        "--readme", type=Path, metavar="FILE", help="replace the text at the markers"
    )
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="JSON on standard output, no tables")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write all rows as CSV")
    parser.add_argument("--quick", action="store_true", help="64 MiB, 1 %%, one thread")
    parser.add_argument("--size", type=_size, help="bytes of the state, as 1GiB (the default)")
    parser.add_argument(
        "--density",
        type=_percentages,
        metavar="P,...",
        help="percentages of changed elements (default 0.1,1,3,10,40,100)",
    )
    parser.add_argument("--threads", type=_numbers, metavar="N,...", help="default 1,2")
    parser.add_argument("--rounds", type=_rounds, help=f"samples per row, at least {MIN_ROUNDS}")
    parser.add_argument(
        "--codecs",
        type=_words,
        metavar="NAME,...",
        help="only codecs whose name holds one of these",
    )
    parser.add_argument("--data", type=_words, metavar="KIND,...", help="generator, trained, pairs")
    parser.add_argument(
        "--masters", choices=("dithered", "grid"), help="see gymfast.testing.weights"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--hot", action="store_true", help="do not evict the caches between samples"
    )


def _size(text: str) -> int:
    number = text.rstrip("BKMGi")
    return int(float(number) * _UNITS[text[len(number) :]])


def _rounds(text: str) -> int:
    if int(text) < MIN_ROUNDS:
        raise argparse.ArgumentTypeError(f"{text} is less than {MIN_ROUNDS}")
    return int(text)


def _percentages(text: str) -> tuple[float, ...]:
    return tuple(float(part) / 100 for part in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
