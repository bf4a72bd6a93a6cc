"""`gymfast sync`: versions of a run in a store."""

from __future__ import annotations

import click

from gymfast.cli.lazy import LazyGroup

COMMANDS = {
    "compact": "Fold many versions into one frame, for readers far behind.",
    "fsck": "Check every record and object of a run.",
    "gc": "Delete what no reader needs any more.",
    "publish": "Commit a checkpoint as the next version.",
    "pull": "Bring a local checkpoint to a version.",
    "status": "Show versions, sizes and readers of a run.",
    "verify": "Compare a local checkpoint with a version.",
    "watch": "Follow a run: pull each version as it appears.",
}

_EPILOG = """\b
Examples:
  gymfast sync publish /mnt/weights checkpoint/ --run demo
  gymfast sync watch /mnt/weights replica/ --run demo
  gymfast sync status /mnt/weights --run demo --json
"""


@click.group(cls=LazyGroup, package=__name__, commands_help=COMMANDS, epilog=_EPILOG)
def command() -> None:
    """Publish versions of a run, follow them, check and clean a store.

    STORE is a folder or a URL (s3://bucket/prefix, gs://, az://, file:/path). A run
    is one training job in it: its versions are committed one after the other, each
    at most once, and a reader ends with exactly the published bytes or keeps the
    version it had.
    """
