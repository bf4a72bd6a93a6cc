"""The key that authenticates frames: `--key-file` of `gymfast delta`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gymfast.cli.options import EXISTING_FILE

Command = Callable[..., Any]


def key_file_option(text: str) -> Callable[[Command], Command]:
    """The option --key-file of a command; text says what the command does with the key."""
    return click.option(
        "--key-file",
        type=EXISTING_FILE,
        metavar="KEY",
        help=f"{text} the key in KEY: its bytes without one final newline, at least 16.",
    )


def read_bearer_key(path: Path | None) -> bytes | None:
    """The key in a file that clients send in a header; raises as read_frame_key does."""
    return read_frame_key(path, source="openssl rand -hex 32")


def read_frame_key(path: Path | None, *, source: str = "head -c 32 /dev/urandom") -> bytes | None:
    """The key in a file (see read_shared_key_file); None without a file.

    Raises UsageError, which shows none of its bytes, if there are fewer than 16, or it is PEM;
    `source` is a command that gives better ones.
    """
    if path is None:
        return None
    from gymfast.delta.authentication import check_key
    from gymfast.key_file import read_shared_key_file

    try:
        key = read_shared_key_file(path)
    except ValueError as error:
        raise click.UsageError(f"--key-file {path}: {error}") from None
    try:
        check_key(key)
    except ValueError as error:
        raise click.UsageError(f"--key-file {path}: {error}, as {source} gives") from None
    return key
