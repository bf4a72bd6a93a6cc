"""All commands of gymfast, and what a run of one leaves: for the command line tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from gymfast.cli import cli
from gymfast.stores import FileStore
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import FORMAT, StatusRecord, encode


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


def tell(store: FileStore, reader: str, version: int, **more: object) -> None:
    """Puts what a reader of run "demo" would write of itself."""
    now_us = time.time_ns() // 1000
    given = {
        "state": "clean",
        "version": version,
        "root": "0123456789abcdef",
        "newest": version,
        "installed_us": now_us,
        "updated_us": now_us,
        "period_us": 30_000_000,
        "is_stale": False,
        "error": "",
    }
    record = StatusRecord(FORMAT, "demo", reader, **(given | more))
    store.put(RunKeys("demo").status(reader), encode(record))
