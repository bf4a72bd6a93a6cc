"""Real NCCL on one GPU with 2 and 4 ranks: right bytes, speed beside a copy, abort, shrink.

Broadcasts are measured in registered memory and other, buckets with the kernel and with torch.

Usage: `bash benchmarks/device/nccl_smoke.sh`. With `--host` the library is the double of
tests/nccl_double on memory of the host; times then say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.device.deadline import Deadline
from benchmarks.device.facts import NO_GPU, facts, num_gpus

FAILED, NO_TIME = 1, 4  # exit status
SCHEMA = "gymfast-device-nccl/1"


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    if not options.host and not num_gpus():
        print("no GPU here (the CUDA driver reports none): this never ran", file=sys.stderr)
        return NO_GPU
    if problem := _problem(options):
        print(f"{problem}: this never ran", file=sys.stderr)
        return NO_GPU
    if options.rank:
        return _run_other(options)
    deadline = Deadline(options.budget_s)
    document: dict[str, Any] = {"schema": SCHEMA, "environment": facts(), "groups": []}
    document["environment"] |= {n: v for n, v in os.environ.items() if n.startswith("NCCL_")}
    options.out.mkdir(parents=True, exist_ok=True)
    for num_ranks in options.ranks:
        _run_group(options, num_ranks, deadline, document)
    states = {phase["state"] for group in document["groups"] for phase in group["phases"]}
    if "failed" in states:
        return FAILED
    return NO_TIME if "cut" in states else 0


def _problem(options: argparse.Namespace) -> str:
    """Why nothing can run here, or nothing."""
    try:
        import torch

        from gymfast.channels.nccl_library import load
        from gymfast.errors import MissingDependencyError
    except ImportError as error:
        return f"{error.name} is not there"
    if not options.host and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    try:
        library = load(options.library, options.cuda_library)
    except MissingDependencyError as error:
        return str(error)
    print(f"NCCL {library.version} at {library.path}: {', '.join(library.features)}", flush=True)
    return library.cuda_problem


def _run_group(
    options: argparse.Namespace, num_ranks: int, deadline: Deadline, document: dict[str, Any]
) -> None:
    """All phases with so many ranks; this process is rank 0, the others are its children."""
    from benchmarks.device.nccl_rank import PHASES, RankRun
    from gymfast.channels import Hub

    group: dict[str, Any] = {"num_ranks": num_ranks, "phases": []}
    document["groups"].append(group)
    hub = Hub()
    command = [sys.executable, "-m", "benchmarks.device.nccl", *options.arguments]
    place = ["--port", str(hub.port), "--ranks", str(num_ranks)]
    children = [
        subprocess.Popen([*command, *place, "--rank", str(rank)]) for rank in range(1, num_ranks)
    ]
    run = None
    try:
        for name in PHASES:
            phase = {"name": name, "state": "done", "note": ""}
            group["phases"].append(phase)
            if deadline.is_over or any(p["state"] != "done" for p in group["phases"]):
                phase["state"], phase["note"] = "cut", "no time, or a phase before it failed"
                continue
            try:
                if run is None:
                    hub.control.wait_for(num_ranks, min(90, deadline.left_s))
                    hub.control.form(30)
                    run = RankRun(hub.control, _rank_options(options, num_ranks))
                _phase(run, name, phase)
            except Exception as error:  # noqa: BLE001 - a phase that raises is a finding
                phase["state"], phase["note"] = "failed", f"{type(error).__name__}: {error}"
            if run is not None:
                found = run.findings
                group |= {"facts": found.facts, "rows": found.rows, "pieces": found.pieces}
            _tell(options, document, num_ranks, phase)
    finally:
        if run is not None:
            run.close()
        is_whole = all(phase["state"] == "done" for phase in group["phases"])
        for child in children:
            try:
                child.wait(20 if is_whole else 0)
            except subprocess.TimeoutExpired:
                child.kill()
        hub.close()
        _write(options, document)


def _phase(run: Any, name: str, phase: dict[str, str]) -> None:
    begin_s = time.perf_counter()
    before = len(run.findings.problems)
    getattr(run, name)()
    phase["note"] = f"{time.perf_counter() - begin_s:.2f} s"
    if problems := run.findings.problems[before:]:
        phase["state"], phase["note"] = "failed", "; ".join(problems[:5])


def _tell(
    options: argparse.Namespace, document: dict[str, Any], num_ranks: int, phase: dict[str, str]
) -> None:
    print(f"{num_ranks} ranks, {phase['name']}: {phase['state']}, {phase['note']}", flush=True)
    group = document["groups"][-1]
    if phase["name"] == "speed":
        for row in group.get("rows", ()):
            memory = group["facts"]["registration"] if row["is_registered"] else "other memory"
            print(
                f"  {row['size']:>11} bytes {row['time_us']:>10.1f} us "
                f"{row['algbw_gbps']:>8.2f} GB/s, copy {row['copy_gbps']:.2f} GB/s, {memory}",
                flush=True,
            )
    if phase["name"] == "pieces":
        for row in group.get("pieces", ()):
            speeds = ", ".join(f"{k[:-5]} {v:.1f}" for k, v in row.items() if k.endswith("_gbps"))
            print(f"  pieces of {row['piece_bytes']:>9} bytes, GB/s: {speeds}", flush=True)
    _write(options, document)


def _write(options: argparse.Namespace, document: dict[str, Any]) -> None:
    (options.out / "nccl.json").write_text(json.dumps(document, indent=1) + "\n")


def _run_other(options: argparse.Namespace) -> int:
    from benchmarks.device.nccl_rank import PHASES, RankRun
    from gymfast.channels import connect

    control = connect(("127.0.0.1", options.port), options.rank)
    control.form(120)
    run = RankRun(control, _rank_options(options, options.ranks[0]))
    for name in PHASES:
        getattr(run, name)()
    run.close()
    control.close()
    return 0


def _rank_options(options: argparse.Namespace, num_ranks: int) -> Any:
    from benchmarks.device.nccl_rank import Options

    return Options(
        num_ranks,
        largest=options.largest,
        is_host=options.host,
        library=options.library,
        cuda_library=options.cuda_library,
        kernels=options.kernels,
        timeout_s=options.timeout_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.nccl", description=__doc__)
    parser.add_argument("--host", action="store_true", help="--library is the double")
    parser.add_argument("--library", default="", help="path of libnccl.so.2")
    parser.add_argument("--cuda-library", default="", help="path of libcudart.so")
    parser.add_argument("--kernels", default="", help="a module in place of gymfast._cuda")
    parser.add_argument("--ranks", type=_numbers, default=(2, 4), metavar="N,...")
    parser.add_argument("--largest", type=int, default=256 << 20, help="bytes of a broadcast")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="for a round")
    parser.add_argument("--budget-s", type=float, default=240.0)
    out = Path(os.environ.get("OUT") or "build/device")
    parser.add_argument("--out", type=Path, default=out, help="folder for nccl.json")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
