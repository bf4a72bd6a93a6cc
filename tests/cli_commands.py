"""All commands of gymfast, and what a run of one leaves: for the command line tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from gymfast.cli import cli


@dataclass(frozen=True)
class Result:
    """What one run of the command line left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout."""
        (line,) = self.out.splitlines()
        return json.loads(line)


Gymfast = Callable[..., Result]


def walk_commands(
    command: click.Command = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and group with its path."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, **command.context_settings)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from walk_commands(found, (*path, name))
