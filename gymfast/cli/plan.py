"""`gymfast plan`: how weights get to the engines, and how long that is predicted to take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gymfast.cli.options import NUMBER
from gymfast.cli.output import Output, format_size, format_table, with_output

if TYPE_CHECKING:
    from gymfast.cost.plan import TransferPlan

_EPILOG = """\b
Examples:
  gymfast plan Qwen3-8B --train 1x8:H100 --engines 1x8:H100
  gymfast plan Kimi-K2.6 --format int4 --train 16x8:H200 --engines 8x8:H200
  gymfast plan GLM-4.7 --train 4x8:B200 --engines 2x8:B200 --net wan
"""


@click.command("plan", epilog=_EPILOG)
@click.argument("model")
@click.option("--train", required=True, help="Nodes of the trainer: NODESxGPUS:KIND.")
@click.option("--engines", required=True, help="Nodes of all engines: NODESxGPUS:KIND.")
@click.option(
    "--net",
    type=click.Choice(["rdma", "tcp", "wan"]),
    default="rdma",
    show_default=True,
    help="rdma: a NIC of 400 Gb/s for each GPU. tcp: one of 50 Gb/s a node. wan: 10 Gb/s in all.",
)
@click.option(
    "--format",
    "fmt",
    type=click.Choice(["bf16", "fp8", "int4"]),
    default="bf16",
    show_default=True,
    help="Of the weights that travel; int4 is for the experts only.",
)
@click.option("--lora", "rank", type=int, help="Send an adapter of this rank, not the model.")
@click.option("--saved", type=NUMBER, help="Part that a delta does not send, such as 0.98.")
@click.option(
    "--nodes-per-engine",
    type=int,
    default=1,
    show_default=True,
    help="Nodes that one engine takes.",
)
@click.option("--bucket-mib", type=int, help="Size of a bucket.  [default: chosen]")
@click.option("--depth", type=int, help="Buckets under way.  [default: chosen]")
@with_output
def command(
    output: Output,
    model: str,
    train: str,
    engines: str,
    net: str,
    fmt: str,
    rank: int | None,
    saved: float | None,
    nodes_per_engine: int,
    bucket_mib: int | None,
    depth: int | None,
) -> None:
    """Plan a weight transfer of MODEL: buckets, roots, NICs, and predicted seconds.

    MODEL is a name of the catalogue, such as Qwen3-8B; a wrong one lists all.
    """
    from gymfast.cost.plan import plan, sync_job
    from gymfast.models import FORMATS
    from gymfast.models import model as find

    try:
        name = find(model).name
        job = sync_job(
            model,
            train,
            engines,
            net,
            fmt=FORMATS[FORMATS.index(fmt)],
            lora_rank=rank,
            saved_ratio=saved,
            nodes_per_engine=nodes_per_engine,
        )
        made = plan(job, bucket_bytes=bucket_mib and bucket_mib << 20, depth=depth)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    what = f"{name} {fmt}" if rank is None else f"{name} LoRA r={rank}"
    output.result({"model": name, **_fields(made)}, _text(what, made))


def _fields(plan: TransferPlan) -> dict[str, object]:
    return {
        "num_bytes": plan.job.num_bytes,
        "network": plan.job.network.name,
        "num_roots": plan.num_roots,
        "nics_per_node": plan.nics_per_node,
        "chain_nodes": plan.chain_nodes,
        "bytes_per_root": plan.bytes_per_root,
        "bucket_bytes": plan.bucket_bytes,
        "depth": plan.depth,
        "num_rounds": plan.num_rounds,
        "staging_bytes": plan.staging_bytes,
        "stages_s": plan.busy_s,
        "total_s": plan.total_s,
        "pause_s": plan.pause_s,
        "line_rate_s": plan.bound_s,
    }


def _text(what: str, plan: TransferPlan) -> list[str]:
    job = plan.job
    size, bucket = format_size(job.num_bytes), format_size(plan.bucket_bytes)
    rate = f"{job.network.nic.rate_gbps:g} Gb/s"
    rows = [(name, f"{seconds:.4f} s") for name, seconds in plan.busy_s.items()]
    ratio = plan.bound_s / plan.total_s if plan.total_s else 1
    staging = format_size(plan.staging_bytes)
    return [
        f"{what}, {size}: {job.train} to {job.engines} over {job.network.name}",
        f"NICs: {plan.nics_per_node} of a node, {rate} each; roots: {plan.num_roots}",
        f"nodes: {plan.chain_nodes} in the chain of each root",
        f"buckets: {bucket}, {plan.depth} under way, {plan.num_rounds} rounds",
        f"memory: {staging} of each GPU",
        "",
        *format_table(("stage", "busy"), rows),
        "",
        f"engines pause {plan.pause_s:.4f} s",
        f"predicted {plan.total_s:.4f} s; line rate {plan.bound_s:.4f} s, {100 * ratio:.1f} %",
    ]
