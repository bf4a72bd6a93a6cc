"""`gymfast hf-delta`: version directories of the published format."""

from __future__ import annotations

import click

from gymfast.cli.lazy import LazyGroup

COMMANDS = {
    "convert": "Turn a version into a frame, or a frame into a version.",
    "inspect": "Show what a version holds.",
    "publish": "Write a new version: a delta or a full one.",
    "pull": "Bring a local checkpoint up to a version, crash-safely.",
    "verify": "Check a version, or a local checkpoint after pulls.",
}

_EPILOG = """\b
Examples:
  gymfast hf-delta publish new/ --old old/ --source run/ --version 7
  gymfast hf-delta inspect run/weight_v000007
  gymfast hf-delta pull --base old --source run --local replica --target 7
  gymfast hf-delta verify replica/
"""


@click.group(cls=LazyGroup, package=__name__, commands_help=COMMANDS, epilog=_EPILOG)
def command() -> None:
    """Read and write version directories as slime, miles and SGLang do.

    A version is a directory weight_vNNNNNN with safetensors files of zstd frames
    (a delta), or an ordinary checkpoint (a full version). Version 0 is the base
    checkpoint. The format is described in docs/hf-delta.md.
    """
