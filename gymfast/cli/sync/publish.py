"""`gymfast sync publish`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import (
    EXISTING,
    bwlimit_option,
    key_option,
    profile_option,
    read_key,
    run_option,
    store_argument,
    threads_option,
)
from gymfast.cli.output import Output, format_size, with_output
from gymfast.cli.sync.folders import naming_folder, require_parent
from gymfast.errors import ChainError, NotFoundError

if TYPE_CHECKING:
    from gymfast.delta.encode import Profile
    from gymfast.stores import Store
    from gymfast.sync import Publisher, PublishReport
    from gymfast.sync.signatures import Key

_EPILOG = """\b
Examples:
  gymfast sync publish /mnt/weights checkpoint/ --run demo
  gymfast sync publish /mnt/weights new/ --run demo --base old/
  gymfast sync publish /mnt/weights old/ new/ --run demo --profile small
"""


@click.command("publish", epilog=_EPILOG)
@store_argument
@click.argument("checkpoints", metavar="CHECKPOINT...", type=EXISTING, nargs=-1, required=True)
@run_option
@click.option(
    "--base",
    type=EXISTING,
    metavar="OLD",
    help="The newest version as a checkpoint: publish a delta on it.",
)
@click.option("--anchor", is_flag=True, help="Publish a full state, whatever --base says.")
@profile_option
@click.option(
    "--keep", type=click.IntRange(min=1), metavar="N", help="Versions that stay.  [default: 50]"
)
@click.option(
    "--anchor-every",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Deltas between full states.  [default: 50]",
)
@click.option(
    "--single-writer",
    is_flag=True,
    help="Nobody else publishes: for a store without create-only writes.",
)
@threads_option
@bwlimit_option
@key_option
@with_output
def command(
    output: Output,
    store: str,
    checkpoints: tuple[Path, ...],
    run: str,
    base: Path | None,
    anchor: bool,
    profile: Profile,
    keep: int | None,
    anchor_every: int | None,
    single_writer: bool,
    threads: int | None,
    bwlimit: int | None,
    key_file: Path | None,
) -> None:
    """Commit checkpoints as the next versions of a run.

    STORE is a URL (docs/stores.md), or a folder, made if it is not there; the one
    above it has to be. Each CHECKPOINT becomes one version: the first a full state
    (with --base a delta), every further one a delta on the one before. This
    publisher takes the run over: one that still runs elsewhere is fenced, and its
    next publish fails with exit code 6.
    """
    from gymfast.cli.sync.checkpoints import check_weights
    from gymfast.stores import open_store
    from gymfast.sync import Publisher
    from gymfast.sync.publish_report import DEFAULT_ANCHOR_EVERY, DEFAULT_KEEP

    for path in (*checkpoints, *([base] if base else [])):
        check_weights(path)
    require_parent(store)
    if base is not None and not anchor:
        with naming_folder(store):
            _check_base(output, open_store(store), run, base, read_key(key_file))
    publisher = Publisher(
        store,
        run,
        profile=profile,
        threads=threads,
        keep=keep or DEFAULT_KEEP,
        anchor_every=anchor_every or DEFAULT_ANCHOR_EVERY,
        single_writer=single_writer,
        max_bytes_per_s=bwlimit,
        key=read_key(key_file),
    )
    if base is not None and not anchor:
        _adopt(output, publisher, base)
    for checkpoint in checkpoints:
        report = _publish(output, publisher, checkpoint, anchor=anchor)
        output.result({"checkpoint": str(checkpoint), **asdict(report)}, [_to_text(report)])


def _check_base(output: Output, store: Store, run: str, base: Path, key: Key | None) -> None:
    """Refuse a base that is not the newest version, before this publisher fences another."""
    from gymfast.delta.checkpoint import digest_checkpoint
    from gymfast.delta.frame import root_of
    from gymfast.sync.status import read_status

    newest = read_status(store, run, key=key).newest
    if newest is None:
        raise NotFoundError(f"run '{run}' has no version yet that {base} could be: omit --base")
    with output.progress(f"check {base}") as advance:
        root = root_of(digest_checkpoint(base, progress=advance)).hex()
    if root != newest.root:
        raise ChainError(
            f"{base} is not version {newest.version}, the newest of run '{run}': pull that "
            "version and name it with --base, or publish a full state without --base"
        )


def _adopt(output: Output, publisher: Publisher, base: Path) -> None:
    from gymfast.cli.sync.checkpoints import read_weights

    with output.progress(f"read {base}") as advance:
        weights = read_weights(base, advance)
    if not publisher.adopt(weights):
        raise ChainError(
            f"{base} is not version {publisher.version}: somebody else published meanwhile, or "
            f"wrote to {base}; nothing was published"
        )


def _publish(
    output: Output, publisher: Publisher, checkpoint: Path, *, anchor: bool
) -> PublishReport:
    from gymfast.cli.sync.checkpoints import read_weights

    with output.progress(f"read {checkpoint}") as advance:
        weights = read_weights(checkpoint, advance)
    with output.progress("publish") as advance:
        return publisher.publish(weights, anchor=anchor, advance=advance)


def _to_text(report: PublishReport) -> str:
    size_ratio = report.frame_bytes / max(1, report.raw_bytes)
    changed_ratio = report.num_changed / max(1, report.num_units)
    phases = ", ".join(f"{n} {s:.2f}" for n, s in asdict(report.seconds).items() if s >= 0.005)
    return (
        f"version {report.version}: {report.kind} of {format_size(report.frame_bytes)} for "
        f"{format_size(report.raw_bytes)} of weights ({size_ratio:.3%}), {changed_ratio:.3%} of "
        f"the units changed; seconds: {phases or 'under 0.01'}"
    )
