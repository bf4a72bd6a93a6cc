"""How the weights of a model get from a trainer to its engines, and how long that takes; pure.

The weights are striped over rails: GPU i of a sending node heads a chain through GPU i of every
engine node, and NVLink joins the stripes there. A chain costs the same for any number of nodes
but for its fill, which each bucket pays: see docs/transfer.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gymfast import models
from gymfast.buckets import ALIGNMENT
from gymfast.cost.cluster import GPUS, NETWORKS, Cluster, Network
from gymfast.cost.pipeline import Stage, best_bucket, pipeline_s
from gymfast.models import Format

_MIN_BUCKET, _MAX_BUCKET = 16 << 20, 1 << 30
_DEPTH = 3  # one bucket is packed, one on the wire, one unpacked
_KERNEL_S = 10e-6  # launch of a kernel


@dataclass(frozen=True)
class Job:
    """What is to be moved, from where to where. Engines take `nodes_per_engine` nodes each.

    Where that is a delta, `delta_of_bytes` are the bytes of the weights it is applied to.
    """

    num_bytes: int
    train: Cluster
    engines: Cluster
    network: Network
    nodes_per_engine: int = 1
    delta_of_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise ValueError(f"num_bytes is {self.num_bytes}, expected 0 or more")
        per_engine, num_nodes = self.nodes_per_engine, self.engines.num_nodes
        if not 1 <= per_engine <= num_nodes or num_nodes % per_engine:
            raise ValueError(
                f"engines of {per_engine} nodes each do not make up {self.engines}: expected a "
                f"divisor of {num_nodes}"
            )


@dataclass(frozen=True)
class TransferPlan:
    """Who sends what in which pieces, and what that is predicted to take.

    `stages` are those of one bucket of one root; all roots work at the same time.
    """

    job: Job
    num_roots: int
    nics_per_node: int
    chain_nodes: int  # a root and the nodes behind it
    bytes_per_root: int
    bucket_bytes: int
    depth: int
    stages: tuple[Stage, ...]
    total_s: float
    bound_s: float  # at line rate, without anything else

    @property
    def num_rounds(self) -> int:
        """Buckets of one root; in each round every root sends one."""
        return -(-self.bytes_per_root // self.bucket_bytes)

    @property
    def staging_bytes(self) -> int:
        """Memory of one GPU for its buckets."""
        return self.depth * self.bucket_bytes

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds that each stage works, by its name; they overlap."""
        full, rest = divmod(self.bytes_per_root, self.bucket_bytes)
        sizes = [(full, self.bucket_bytes), (1, rest)]
        return {
            stage.name: sum(n * stage.bucket_s(size) for n, size in sizes if size and n)
            for stage in self.stages
        }

    @property
    def pause_s(self) -> float:
        """Seconds that an engine answers nothing.

        Of a full transfer all of it: its buckets are written as they come. A delta is complete
        before its first write; then each GPU unpacks it and reads its share of the weights once.
        """
        job = self.job
        if job.delta_of_bytes is None:
            return self.total_s
        share_bytes = job.delta_of_bytes / (job.nodes_per_engine * job.engines.gpus_per_node)
        return self.busy_s["unpack"] + share_bytes / GPUS[job.engines.gpu].memory_bytes_per_s


def sync_job(
    model: str,
    train: str,
    engines: str,
    net: str = "rdma",
    *,
    fmt: Format = "bf16",
    lora_rank: int | None = None,
    saved_ratio: float | None = None,
    nodes_per_engine: int = 1,
) -> Job:
    """The job of one sync of a published model, in the words of `gymfast plan`.

    `saved_ratio` is the part of the bytes that a delta does not send; None sends everything.
    `plan(sync_job(...))` has `total_s`, `busy_s` by stage and `pause_s`: what a simulator needs.
    Raises ValueError for a model, cluster, network, format or number that cannot be.
    """
    config = models.model(model)
    if fmt not in models.FORMATS:
        raise ValueError(f"format {fmt!r}, expected one of {', '.join(models.FORMATS)}")
    if net not in NETWORKS:
        raise ValueError(f"network {net!r}, expected one of {', '.join(NETWORKS)}")
    if lora_rank is not None:
        num_bytes = models.lora_bytes(config, models.Lora(lora_rank))
    else:
        num_bytes = models.model_bytes(config, fmt)
        if fmt != "bf16" and num_bytes == models.model_bytes(config, "bf16"):
            raise ValueError(
                f"format {fmt} is for experts, and {config.name} has none: use bf16 or fp8"
            )
    delta_of_bytes = None
    if saved_ratio is not None:
        if not 0 <= saved_ratio < 1:
            raise ValueError(f"saved is {saved_ratio}, expected 0 to below 1")
        delta_of_bytes, num_bytes = num_bytes, round(num_bytes * (1 - saved_ratio))
    clusters = Cluster.parse(train), Cluster.parse(engines)
    return Job(num_bytes, *clusters, NETWORKS[net], nodes_per_engine, delta_of_bytes)


def plan(job: Job, *, bucket_bytes: int | None = None, depth: int | None = None) -> TransferPlan:
    """The plan for a job; bucket and depth are chosen if they are not given.

    Raises ValueError for a bucket or depth out of range.
    """
    rails = _rails(job)
    senders = min(job.train.num_nodes, job.nodes_per_engine) if job.network.is_per_gpu else 1
    num_roots = rails * senders
    bytes_per_root = -(-job.num_bytes // num_roots)
    chain_nodes = 1 + -(-job.engines.num_nodes // job.nodes_per_engine)
    stages = _stages(job, rails, chain_nodes)
    rtt_s, rate = job.network.nic.rtt_s, job.network.nic.bytes_per_s
    if bucket_bytes is None:
        # A window of depth buckets fills the link whatever its round trip is: see _depth.
        bucket_bytes = best_bucket(
            bytes_per_root, stages, depth=_DEPTH, limits=(_MIN_BUCKET, _MAX_BUCKET)
        )
        bucket_bytes = min(bucket_bytes, max(ALIGNMENT, _aligned(bytes_per_root)))
    elif bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, expected a multiple of {ALIGNMENT}")
    depth = _depth(bucket_bytes, rate * rtt_s, stages) if depth is None else depth
    total_s = pipeline_s(bytes_per_root, bucket_bytes, stages, depth=depth, ack_s=rtt_s)
    return TransferPlan(
        job=job,
        num_roots=num_roots,
        nics_per_node=rails,
        chain_nodes=chain_nodes,
        bytes_per_root=bytes_per_root,
        bucket_bytes=bucket_bytes,
        depth=depth,
        stages=stages,
        total_s=total_s,
        bound_s=bytes_per_root / rate,
    )


def _rails(job: Job) -> int:
    """NICs of a node that one transfer uses."""
    if not job.network.is_per_gpu:
        return 1
    return min(job.train.gpus_per_node, job.engines.gpus_per_node)


def _stages(job: Job, rails: int, chain_nodes: int) -> tuple[Stage, ...]:
    network, engine = job.network, GPUS[job.engines.gpu]
    pack = Stage("pack", _KERNEL_S, GPUS[job.train.gpu].memory_bytes_per_s / 2)
    wire_s = network.launch_s + network.hop_s * chain_nodes
    wire = Stage("wire", wire_s, network.nic.bytes_per_s)
    # A GPU passes its stripe to all others of its node, and unpacks the stripes of all.
    others = max(job.engines.gpus_per_node - 1, 1)
    join = Stage("join", _KERNEL_S, engine.nvlink_bytes_per_s / others)
    unpack = Stage("unpack", _KERNEL_S, engine.memory_bytes_per_s / 2 / rails)
    if job.engines.gpus_per_node == 1:
        return (pack, wire, unpack)
    return (pack, wire, join, unpack)


def _depth(bucket_bytes: int, window_bytes: float, stages: Sequence[Stage]) -> int:
    """Buckets under way: enough that no stage waits, and that the link is full."""
    seconds = [stage.bucket_s(bucket_bytes) for stage in stages]
    for_stages = math.ceil(sum(seconds) / max(seconds))
    for_link = 1 + math.ceil(window_bytes / bucket_bytes)
    return max(2, for_stages, for_link)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
