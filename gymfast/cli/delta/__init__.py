"""`gymfast delta`: frames from checkpoints and back."""

from __future__ import annotations

import click

from gymfast.cli.lazy import LazyGroup

COMMANDS = {
    "apply": "Turn BASE into the next version with a frame.",
    "encode": "Write the frame that turns OLD into NEW.",
    "inspect": "Show what a frame holds.",
    "verify": "Check a frame, alone or against checkpoints.",
}

_EPILOG = """\b
Examples:
  gymfast delta encode old/ new/ -o step.gfd --profile small
  gymfast delta inspect step.gfd
  gymfast delta verify step.gfd --base old/ --result new/
  gymfast delta apply old/ step.gfd -o result/
"""


@click.group(cls=LazyGroup, package=__name__, commands_help=COMMANDS, epilog=_EPILOG)
def command() -> None:
    """Make, apply and look into frames.

    A frame holds everything that turns one version of the weights into the next
    one, bit for bit. Checkpoints are safetensors files, or directories with
    model.safetensors.index.json and the shards it names.
    """
