"""`gymfast sync verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymfast.cli.options import (
    EXISTING,
    bwlimit_option,
    key_option,
    read_key,
    run_option,
    store_argument,
    threads_option,
)
from gymfast.cli.output import Output, with_output
from gymfast.cli.sync.folders import naming_folder

if TYPE_CHECKING:
    from gymfast.delta import FrameInfo
    from gymfast.sync.log import Log
    from gymfast.sync.manifest import StateRecord

_EPILOG = """\b
Examples:
  gymfast sync verify /mnt/weights replica/ --run demo
  gymfast sync verify /mnt/weights replica/ --run demo --version 41 --json
"""


@click.command("verify", epilog=_EPILOG)
@store_argument
@click.argument("dest", type=EXISTING)
@run_option
@click.option(
    "--version",
    type=click.IntRange(min=0),
    metavar="N",
    help="The version it should be.  [default: whichever it is]",
)
@threads_option
@bwlimit_option
@key_option
@with_output
def command(
    output: Output,
    store: str,
    dest: Path,
    run: str,
    version: int | None,
    threads: int | None,
    bwlimit: int | None,
    key_file: Path | None,
) -> None:
    """Compare the checkpoint DEST with a published version, bit for bit.

    Every byte of DEST is read; its digests are compared with those that the
    publisher committed. If DEST is no version, the first tensor that differs from
    version N (or from the newest) is named.
    """
    from gymfast.delta.checkpoint import digest_checkpoint
    from gymfast.delta.frame import root_of
    from gymfast.stores import open_store
    from gymfast.sync.bandwidth import limited
    from gymfast.sync.keys import RunKeys
    from gymfast.sync.log import Log
    from gymfast.sync.manifest import StateRecord
    from gymfast.sync.status import find_state

    log = Log(limited(open_store(store), bwlimit), RunKeys(run), read_key(key_file))
    records, _ = log.read_all()
    with naming_folder(store):
        wanted = find_state(records, version, run)
    with output.progress(f"read {dest}") as advance:
        entries = digest_checkpoint(dest, threads=threads, progress=advance)
    root = root_of(entries).hex()
    states = [r for r in records.values() if isinstance(r, StateRecord) and r.root == root]
    same = [r.version for r in states if version in (None, r.version)]
    if not same:
        from gymfast.cli.delta.compare import check_result

        check_result(dest, _frame_of(log, wanted), entries, f"version {wanted.version} of {run}")
    newest = find_state(records, None, run).version
    fields = {"dest": str(dest), "version": max(same), "newest": newest, "root": root}
    output.result(fields, [f"{dest}: exactly version {max(same)}; the newest is {newest}"])


def _frame_of(log: Log, record: StateRecord) -> FrameInfo:
    """What the frame of a version says, its digests of all tensors among it."""
    from gymfast.delta import inspect
    from gymfast.sync.objects import read_frame

    return inspect(b"".join(read_frame(log.store, log.keys, record)))
