"""The end of a run in the terminal; it fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gymfast.demo import rows
from gymfast.demo.result import DemoResult
from gymfast.demo.words import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

MISSING_ZSTD = (
    "xor + zstd-1 is not installed: pip install backports.zstd (Python 3.14 has it) to see it here."
)


def print_tables(result: DemoResult, console: Console) -> None:
    """Print all tables of the run."""
    stressed = {"gymfast fast", "gymfast small"}
    console.print()
    _print_table(console, _title(result), rows.CODEC_HEADER, rows.codec_rows(result), stressed)
    console.print(_codec_note(result), style="dim", highlight=False)
    if result.machine.zstd is None:
        console.print(MISSING_ZSTD, style="yellow", highlight=False)
    console.print()
    title = "One version on a 10 Gb/s link, in seconds"
    _print_table(console, title, rows.PROJECTION_HEADER, rows.projection_rows(result))
    console.print(rows.projection_note(result), style="dim", highlight=False)
    console.print()
    _print_table(console, "Receivers", rows.RECEIVER_HEADER, rows.receiver_rows(result))
    for what, version, whom, at, after, how in rows.incident_rows(result):
        console.print(
            f"  {what}, version {version}, {whom}: at {at}, healed after {after}; {how}.",
            highlight=False,
        )
    console.print(rows.audit_text(result), style="dim", highlight=False)
    style = "bold red" if result.audit.num_wrong else "bold green"
    console.print(f"{rows.verdict(result)} {result.total_s:.0f} s in all.", style=style)


def _title(result: DemoResult) -> str:
    num_deltas = sum(version.small_bytes is not None for version in result.versions)
    return (
        f"{num_deltas} versions of {count_text(result.model.num_parameters)} parameters "
        f"({size_text(result.model.state_bytes)} in BF16), {100 * result.mean_density:.2f} % "
        "changed a version"
    )


def _codec_note(result: DemoResult) -> str:
    library = f" (library: {result.machine.zstd})" if result.machine.zstd else ""
    return (
        "Means and medians over all versions after the first; one thread each, everything "
        f"resident. gymfast's times include its digests, xor + zstd-1{library} checks nothing. "
        + rows.cache_text(result)
    )


def _print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    stressed: set[str] | None = None,
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for i, name in enumerate(header):
        shown = name if i == 0 else "\n".join(name.rsplit(" ", 1))
        table.add_column(shown, justify="right" if i else "left", no_wrap=True)
    for row in body:
        table.add_row(*row, style="bold" if row[0] in (stressed or ()) else None)
    console.print(title, style="bold", highlight=False)
    console.print(table)
