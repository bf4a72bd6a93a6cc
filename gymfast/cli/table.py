"""`gymfast table`: the article's two tables, computed, beside corrected figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import NUMBER
from gymfast.cli.output import Output, format_table, with_output

if TYPE_CHECKING:
    from gymfast.cost.article import ClusterRow, Networks, WanRow

_FORMATS = {"bf16": "BF16", "fp8": "FP8", "int4": "INT4 MoE / BF16 attention"}
_FORMULAS = (
    "time = bytes x 8 / rate: line rate, without latency, buckets or load",
    "saved = (TCP - RDMA) x GPUs x dollars a GPU and second: published $0.01, corrected list price",
    "list prices an hour: H100 $3.95, H200 $4.54, B200 $6.25",
    "exact = bytes counted from the published configuration of the model",
    "warm = bytes x 8 / rate + a round trip; cold = TCP slow start from ten segments, then warm",
    "encode, apply = bytes / speed of one core: 8.44 and 19.76 GB/s of BF16 at 1 % changed",
    "the speeds are measured: benchmarks/results/delta-1pct.csv; streams overlap with the wire",
)
_EPILOG = """\b
Examples:
  gymfast table
  gymfast table --markdown > table.md
  gymfast table --wan-gbps 2.5 --rtt-ms 120 --json
"""

Drawn = tuple[Sequence[str], list[Sequence[str]]]
Table = tuple[str, Sequence[str], list[Sequence[str]]]


@click.command("table", epilog=_EPILOG)
@click.option("--tcp-gbps", type=NUMBER, default=50, show_default=True, help="TCP in a cluster.")
@click.option("--rdma-gbps", type=NUMBER, default=3200, show_default=True, help="NICs of a node.")
@click.option(
    "--wan-gbps", type=NUMBER, default=10, show_default=True, help="Between data centres."
)
@click.option("--rtt-ms", type=NUMBER, default=60, show_default=True, help="Round trip of the WAN.")
@click.option("--saved", type=NUMBER, default=0.98, show_default=True, help="Part a delta saves.")
@click.option("--markdown", is_flag=True, help="Print Markdown tables.")
@with_output
def command(
    output: Output,
    tcp_gbps: float,
    rdma_gbps: float,
    wan_gbps: float,
    rtt_ms: float,
    saved: float,
    *,
    markdown: bool,
) -> None:
    """Show what a weight sync costs: the published tables, and corrected ones.

    The published tables are those of "Reinforcement learning is an
    infrastructure problem". Sizes and prices are stored, all else is computed
    from the rates that the options give.
    """
    from gymfast.cost.article import CLUSTER_ROWS, WAN_ROWS, Networks
    from gymfast.cost.links import Link

    try:
        networks = Networks(Link(tcp_gbps), Link(rdma_gbps), Link(wan_gbps, rtt_ms / 1e3), saved)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    tables = [
        ("In a cluster, as published", *_published_cluster(CLUSTER_ROWS, networks)),
        ("In a cluster, corrected", *_corrected_cluster(CLUSTER_ROWS, networks)),
        ("Between data centres, as published", *_published_wan(WAN_ROWS, networks)),
        ("Between data centres, corrected", *_corrected_wan(WAN_ROWS, networks)),
    ]
    draw = _markdown if markdown else _text
    fields = {
        "networks": asdict(networks),
        "cluster": [_cluster_fields(row, networks) for row in CLUSTER_ROWS],
        "wan": [_wan_fields(row, networks) for row in WAN_ROWS],
        "formulas": _FORMULAS,
    }
    output.result(fields, draw(tables))


def _published_cluster(rows: Iterable[ClusterRow], networks: Networks) -> Drawn:
    from gymfast.cost.article import published_cluster

    header = ("model", "update", "TCP", "RDMA", "GPUs", "saved per step")
    lines: list[Sequence[str]] = []
    for row in rows:
        times = published_cluster(row, networks)
        digits = _whole if row.update.lora is None else _short
        fmt = "" if row.update.lora else f" {_FORMATS[row.update.fmt]}"
        lines.append(
            (
                row.label,
                f"{row.published_gb} GB{fmt}",
                _time(times.tcp_s, digits),
                _time(times.rdma_s, digits),
                f"{row.num_nodes}x8 {row.gpu}",
                _dollars(times.saved_dollars),
            )
        )
    return header, lines


def _corrected_cluster(rows: Iterable[ClusterRow], networks: Networks) -> Drawn:
    from gymfast.cost.article import corrected_cluster

    header = ("model", "exact", "TCP", "RDMA", "x faster", "list price saved")
    lines: list[Sequence[str]] = []
    for row in rows:
        times = corrected_cluster(row, networks)
        lines.append(
            (
                row.label,
                f"{times.num_bytes / 1e9:.3f} GB",
                _time(times.tcp_s, _short),
                _time(times.rdma_s, _short),
                f"{times.tcp_s / times.rdma_s:.3g}",
                _dollars(times.saved_dollars),
            )
        )
    return header, lines


def _published_wan(rows: Iterable[WanRow], networks: Networks) -> Drawn:
    from gymfast.cost.article import published_wan

    lines: list[Sequence[str]] = []
    for row in rows:
        times = published_wan(row, networks)
        fmt = _FORMATS[row.published_fmt or row.update.fmt]
        size = f"{row.published_gb:g} GB {fmt}"
        lines.append((row.label, size, _seconds(times.full_s), _seconds(times.delta_s)))
    return ("model", "size", "full", "delta"), lines


def _corrected_wan(rows: Iterable[WanRow], networks: Networks) -> Drawn:
    from gymfast.cost.article import corrected_wan

    header = ("model", "exact", "full", "delta", "warm", "cold", "encode", "apply")
    lines: list[Sequence[str]] = []
    for row in rows:
        times = corrected_wan(row, networks)
        names = ("full_s", "delta_s", "warm_s", "cold_s", "encode_s", "apply_s")
        seconds = (_seconds(getattr(times, name)) for name in names)
        size = f"{times.num_bytes / 1e9:.2f} GB {_FORMATS[row.update.fmt]}"
        lines.append((row.label, size, *seconds))
    return header, lines


def _cluster_fields(row: ClusterRow, networks: Networks) -> dict[str, object]:
    from gymfast.cost.article import corrected_cluster, published_cluster

    return {
        "model": row.label,
        "gpu": row.gpu,
        "num_gpus": row.num_gpus,
        "published": asdict(published_cluster(row, networks)),
        "corrected": asdict(corrected_cluster(row, networks)),
    }


def _wan_fields(row: WanRow, networks: Networks) -> dict[str, object]:
    from gymfast.cost.article import corrected_wan, published_wan

    return {
        "model": row.label,
        "published": asdict(published_wan(row, networks)),
        "corrected": asdict(corrected_wan(row, networks)),
    }


def _whole(milliseconds: float) -> str:
    return f"{milliseconds:.0f}"


def _short(milliseconds: float) -> str:
    return f"{round(milliseconds, 2):g}"


def _time(seconds: float, digits: Callable[[float], str]) -> str:
    """Seconds with two decimals from one second on, below that milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{digits(seconds * 1e3)} ms"


def _seconds(seconds: float) -> str:
    return f"{round(seconds, 2):g} s"


def _dollars(dollars: float) -> str:
    """Cents, and below ten of them two digits."""
    return f"${dollars:.2f}" if dollars >= 0.1 else f"${dollars:.2g}"


def _text(tables: Iterable[Table]) -> list[str]:
    lines = []
    for title, header, rows in tables:
        lines += [title, "", *format_table(header, rows), ""]
    return [*lines, *_FORMULAS]


def _markdown(tables: Iterable[Table]) -> list[str]:
    lines = []
    for title, header, rows in tables:
        lines += [f"**{title}**", "", _row(header), _row([":--", *["--:"] * (len(header) - 1)])]
        lines += [*map(_row, rows), ""]
    return [*lines, *(f"- {formula}" for formula in _FORMULAS)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
