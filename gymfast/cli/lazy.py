"""A click group whose commands are imported when they are used, not when they are listed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Group of the commands `<package>.<name>`, each a module with an attribute `command`.

    A hyphen in a name is an underscore in that of the module.
    `commands_help` holds name and one-line help, so that `--help` imports none of them.
    """

    def __init__(self, *, package: str, commands_help: Mapping[str, str], **attrs: Any) -> None:
        super().__init__(**attrs)
        self._package = package
        self._commands_help = commands_help

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """Names of all commands, in alphabetical order."""
        return sorted(self._commands_help)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of this name, imported now; None if there is none."""
        if cmd_name not in self._commands_help:
            return None
        module = importlib.import_module(f"{self._package}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self._commands_help[name]) for name in self.list_commands(ctx)]
            )
