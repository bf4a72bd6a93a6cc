"""`gymfast sim`: laws from logs, and runs replayed, with the simulator."""

from __future__ import annotations

import click

from gymfast.cli.lazy import LazyGroup

COMMANDS = {
    "backtest": "Replay a recorded run, and tell the error.",
    "fit": "Fit laws to the phase times in a log.",
}

_EPILOG = """\b
Examples:
  gymfast sim fit starts.csv --where provider=modal --where mode=burst
  gymfast sim fit pool.jsonl --phase boot --plot boot.svg -o boot.toml
  gymfast sim backtest pool.jsonl --scenario run.toml
"""


@click.group(cls=LazyGroup, package=__name__, commands_help=COMMANDS, epilog=_EPILOG)
def command() -> None:
    """Predict how many sandboxes a run needs, from measured times.

    The simulator is the package gymfast_sim; docs/simulator.md says what it models,
    docs/sim-fit.md how a log is written.
    """
