"""`gymfast demo`: the whole of weight sync in about a minute."""

from __future__ import annotations

from pathlib import Path

import click

from gymfast.cli.output import Output, with_output

_EPILOG = """\b
Examples:
  gymfast demo
  gymfast demo --report demo.html
  gymfast demo --json > demo.json
  gymfast demo --keep /tmp/demo --versions 30
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--versions",
    type=click.IntRange(6, 200),
    default=20,
    show_default=True,
    help="Versions to publish after the first one.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--quick", is_flag=True, help="A small model: about 15 s, numbers of no meaning.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep store, checkpoint and logs in this empty folder.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="Write a page with plots: one file, no network.",
)
@with_output
def command(
    output: Output,
    versions: int,
    seed: int,
    quick: bool,
    keep: Path | None,
    report: Path | None,
) -> None:
    """Train, publish, follow, break and heal: weight sync at work, in about a minute.

    A trainer process (a transformer in torch, on the CPU) publishes its weights after every step
    at an RL learning rate. Two receiver processes follow through a store in a folder. One is
    killed in the middle of an apply, one stored object is damaged. The tables at the end give
    bytes, speed and the information limit, all measured in this run. Needs gymfast[torch].
    """
    from rich.console import Console

    from gymfast.demo.options import DemoOptions
    from gymfast.demo.run import run_demo

    if report is not None and not report.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {report.absolute().parent}: make it first")
    is_quiet = bool(click.get_current_context().params["no_progress"])
    options = DemoOptions(num_versions=versions, seed=seed, quick=quick, keep=keep)
    result = run_demo(options, Console(stderr=True, quiet=is_quiet))
    if report is not None:
        from gymfast.demo.report import write_report

        write_report(result, report)
        output.remark(f"report: {report}")
    if output.is_json:
        fields = result.to_fields()
        fields.pop("schema")
        output.result(fields, ())
    else:
        from gymfast.demo.table import print_tables

        print_tables(result, Console())
