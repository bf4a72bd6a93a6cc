"""Transfers between the hosts of a cluster: one rank each, as torchrun or Slurm starts them.

torchrun --nnodes 4 --nproc-per-node 1 ... -m benchmarks.cluster, or benchmarks/slurm.sh; every
rank needs the same GYMFAST_KEY (64 hexadecimal digits). Rank 0 prints the table, and then runs
nccl-tests where they are. Never run between hosts so far.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from benchmarks.environment import environment
from benchmarks.ranks import Job, Orders
from benchmarks.transfer import MIB, NotHere, Options, Row, Subject, document
from benchmarks.transfer_cases import nccl
from benchmarks.transfer_report import tables, write_csv

KEY_VARIABLE = "GYMFAST_KEY"
_BUCKETS = (4 * MIB, 16 * MIB, 64 * MIB)
_STREAMS = (1, 4, 8)


def main(arguments: list[str]) -> int:
    from benchmarks.transfer_rank import run_rank

    options = _parser().parse_args(arguments)
    orders = orders_from(os.environ, jobs(options.size_mib * MIB, options.rounds))
    found = run_rank(orders, listening=lambda _: None)
    if orders.rank != 0:
        return 0
    rows = [
        subject_of(job, orders.num_ranks, options.link_gbps).row(samples)
        for job, samples in zip(orders.jobs, found, strict=True)
    ]
    rows += _nccl(Options(size_bytes=options.size_mib * MIB, rounds=options.rounds))
    stamp = environment() | {"command": f"python -m benchmarks.cluster {' '.join(arguments)}"}
    if options.csv:
        write_csv(options.csv, rows, stamp)
    if options.json:
        import json

        print(json.dumps(document(rows, stamp), indent=1))
    else:
        print(tables(rows, stamp))
    return 1 if any(row.nwrong for row in rows) else 0


def jobs(size: int, rounds: int) -> list[Job]:
    """Stars and chains, in buckets of several sizes over several streams."""
    return [
        Job(
            kind="transfer", tensors=[("flat", "U8", (size,), size)], bucket_bytes=bucket,
            streams=streams, fanout=fanout, depth=8, rounds=rounds,
        )
        for fanout in (None, 1)
        for streams in _STREAMS
        for bucket in _BUCKETS
    ]  # fmt: skip


def orders_from(variables: os._Environ[str] | dict[str, str], wanted: list[Job]) -> Orders:
    """What torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or Slurm says about this rank.

    The control plane takes the port after MASTER_PORT, which torchrun listens at itself.
    Raises ValueError for variables that are missing.
    """
    rank = variables.get("RANK", variables.get("SLURM_PROCID"))
    num_ranks = variables.get("WORLD_SIZE", variables.get("SLURM_NTASKS"))
    root, key = variables.get("MASTER_ADDR"), variables.get(KEY_VARIABLE, "")
    if rank is None or num_ranks is None or root is None:
        raise ValueError(
            "RANK, WORLD_SIZE and MASTER_ADDR (or SLURM_PROCID, SLURM_NTASKS and MASTER_ADDR) "
            "are not all set: start with torchrun or benchmarks/slurm.sh"
        )
    port = int(variables.get("MASTER_PORT", "29500")) + 1
    return Orders(
        rank=int(rank), num_ranks=int(num_ranks), host=_own_address(root), key=key, jobs=wanted,
        root_host=root, root_port=port,
    )  # fmt: skip


def subject_of(job: Job, num_ranks: int, link_gbps: float) -> Subject:
    """What the row of a job says; a star is bound by the link of rank 0, shared by all others."""
    is_chain = job.fanout == 1
    share = 1 if is_chain else max(num_ranks - 1, 1)
    return Subject(
        "cluster", "tcp transfer", "chain" if is_chain else "star", job.tensors[0][3],
        ranks=num_ranks, streams=job.streams, depth=job.depth, bucket_bytes=job.bucket_bytes,
        bound="link" if link_gbps else "", bound_gbps=link_gbps / 8 / share,
    )  # fmt: skip


def _nccl(options: Options) -> list[Row]:
    try:
        return list(nccl(options))
    except NotHere as reason:
        print(f"nccl-tests are left out: {reason}", file=sys.stderr)
        return []


def _own_address(root: str) -> str:
    """The address of this host on the way to rank 0; nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(root, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(place)
        return str(sock.getsockname()[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--size-mib", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--link-gbps", type=float, default=0.0, help="of one host, 1e9 bits/s")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
