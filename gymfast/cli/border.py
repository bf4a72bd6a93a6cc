"""The border of the command line: an exception becomes one message and an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

TRACEBACK_VARIABLE = "GYMFAST_TRACEBACK"
_PROGRAM = "gymfast"
_COMPLETION_VARIABLE = "_GYMFAST_COMPLETE"  # the name that the scripts of click use


class StdoutError(OSError):
    """The data of a command could not be written; it is told on stderr only."""


@dataclass(frozen=True)
class Failure:
    """What is told about a failed command; `kind` is the class of the error."""

    command: str
    kind: str
    message: str
    exit_code: int
    number: int | None = None

    def to_json(self) -> str:
        """The failure as one object of the schema of its command."""
        error: dict[str, str | int] = {"kind": self.kind, "message": self.message}
        error["exit_code"] = self.exit_code
        if self.number is not None:
            error["number"] = self.number
        return json.dumps({"schema": f"gymfast.{self.command}/1", "error": error})


def run(cli: click.Group, args: Sequence[str] | None = None) -> int:
    """Run `cli`; returns the exit code of docs/cli.md and never raises an Exception."""
    words = list(sys.argv[1:] if args is None else args)
    code = 0
    try:
        code = _invoke(cli, words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wanted
        _forget_stdout()
        code = 0
    except OSError as error:
        _forget_stdout()
        if code == 0:  # otherwise the failure is told already: click writes the help itself
            _tell(f"Error: stdout: {error.strerror or error}")
            code = 1
    return code


def start_logging(verbose: int) -> None:
    """Send log records to stderr: warnings always, INFO from 1, DEBUG from 2."""
    import logging

    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


def _invoke(cli: click.Group, words: list[str]) -> int:
    try:
        return _call(cli, words)
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.UsageError as error:
        return _report(words, _of_usage(error), _usage_text(error))
    except (KeyboardInterrupt, click.Abort):
        return _report(words, Failure(_command_of(cli, words), "Interrupted", "interrupted", 130))
    except (BrokenPipeError, StdoutError):
        raise
    except Exception as error:  # noqa: BLE001 - the border: no traceback leaves it
        if os.environ.get(TRACEBACK_VARIABLE):
            import traceback

            traceback.print_exc()
        return _report(words, _of_exception(_command_of(cli, words), error))


def _call(cli: click.Group, words: list[str]) -> int:
    """What `click.Command.main` does, without its own judgement of errors."""
    if instruction := os.environ.get(_COMPLETION_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, _PROGRAM, _COMPLETION_VARIABLE, instruction)
    with cli.make_context(_PROGRAM, words) as context:
        cli.invoke(context)
    return 0


def _report(words: list[str], failure: Failure, text: str = "") -> int:
    if "--json" in words:
        print(failure.to_json(), flush=True)
    _tell(text or f"Error: {failure.message}")
    return failure.exit_code


def _usage_text(error: click.UsageError) -> str:
    """The message after the usage of its command, the same for every version of click."""
    message = error.format_message()
    if error.ctx is None or message.startswith("Usage:"):  # a group without a command: its help
        return message
    hint = f"Try '{error.ctx.command_path} --help' for help."
    return f"{error.ctx.get_usage()}\n{hint}\n\nError: {message}"


def _of_usage(error: click.UsageError) -> Failure:
    path = error.ctx.command_path.split()[1:] if error.ctx else []
    return Failure(".".join(path) or "cli", "UsageError", error.format_message(), error.exit_code)


def _of_exception(command: str, error: Exception) -> Failure:
    from gymfast.errors import FormatError, GymfastError

    kind = type(error).__name__
    if isinstance(error, FormatError):
        return Failure(command, kind, str(error), error.exit_code, error.number)
    if isinstance(error, GymfastError):
        return Failure(command, kind, str(error), error.exit_code)
    if isinstance(error, OSError):
        return Failure(command, kind, _describe_os_error(error), 1)
    if isinstance(error, MemoryError):
        return Failure(command, kind, f"out of memory {error}".strip(), 7)
    if isinstance(error, ValueError | TypeError):
        return Failure(command, kind, str(error) or kind, 1)
    hint = f"this is a bug in gymfast; {TRACEBACK_VARIABLE}=1 shows where"
    return Failure(command, kind, f"internal error: {kind}: {error} ({hint})", 1)


def _describe_os_error(error: OSError) -> str:
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None]
    reason = error.strerror or str(error) or type(error).__name__
    return ": ".join([" -> ".join(names), reason]) if names else reason


def _command_of(cli: click.Group, words: list[str]) -> str:
    """Dotted name of the command that `words` call, found without parsing options."""
    path: list[str] = []
    group: click.Command | None = cli
    for word in words:
        if not isinstance(group, click.Group):
            break
        if word in group.list_commands(click.Context(group)):
            path.append(word)
            group = group.get_command(click.Context(group), word)
    return ".".join(path) or "cli"


def _tell(text: str) -> None:
    """Write to stderr; a closed stderr is nobody's error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _forget_stdout() -> None:
    """Send what Python still holds for stdout to nowhere, so that its exit flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
