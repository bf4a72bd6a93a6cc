"""Options and arguments that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gymfast.sync.signatures import Key

PROFILES = ("auto", "fast", "small")

_LARGEST = 1e6  # in seconds, what every wait of Python takes


class FiniteFloat(click.types.FloatParamType):
    """A number that is one: not nan, not infinite, and no more than a million."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not abs(number) <= _LARGEST:
            self.fail(f"{value!r}: expected a number of at most {_LARGEST:.0f}", param, ctx)
        return number


class FiniteRange(click.FloatRange, FiniteFloat):
    """Such a number in a range."""


NUMBER = FiniteFloat()
EXISTING = click.Path(exists=True, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW = click.Path(path_type=Path)

profile_option = click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default="auto",
    show_default=True,
    help="fast: quickest to apply. small: fewest bytes. auto: in between.",
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    envvar="GYMFAST_THREADS",
    show_envvar=True,
    show_default="all cores",
    metavar="N",
    help="Threads of the codec.",
)
force_option = click.option("--force", is_flag=True, help="Replace the output if it exists.")
run_option = click.option("--run", required=True, metavar="RUN", help="Name of the run.")
store_argument = click.argument("store", metavar="STORE")
key_option = click.option(
    "--key-file",
    type=EXISTING_FILE,
    metavar="FILE",
    help="Key that signs the records: 16 bytes or more, or PEM with Ed25519 keys.",
)


def _rate_of(
    ctx: click.Context,  # noqa: ARG001 - as click calls it
    param: click.Parameter,  # noqa: ARG001
    value: str | None,
) -> int | None:
    """Bytes a second, written as for rsync and rclone; None for 0, no limit."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)([BKMG]?)", value, re.ASCII | re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r}: expected 500K, 10M, 1.5G or 0 (no limit)")
    shift = {"B": 0, "M": 20, "G": 30}.get(match[2].upper(), 10)
    num_bytes = int(float(match[1]) * (1 << shift))
    if 0 < num_bytes < _MIN_RATE:
        raise click.BadParameter(f"{value!r} is under {_MIN_RATE >> 10}K, the least there is")
    return num_bytes or None


_MIN_RATE = 64 << 10
bwlimit_option = click.option(
    "--bwlimit",
    callback=_rate_of,
    metavar="RATE",
    help="Transfer at most 10M (MiB/s), 500K or 500 (KiB/s), 1.5G; as for rsync and rclone.",
)


def read_key(path: Path | None) -> Key | None:
    """The key or keys in a file (see read_key_file); None without a file.

    Raises ValueError, which shows none of its bytes, if it cannot be used.
    """
    if path is None:
        return None
    from gymfast.key_file import read_key_file
    from gymfast.key_text import is_pem
    from gymfast.sync.signatures import check_key

    try:
        key = read_key_file(path)
        try:
            return check_key(key)
        except ValueError as error:
            hint = "" if is_pem(key) else ", as head -c 32 /dev/urandom gives"
            raise ValueError(f"{error}{hint}") from None
    except ValueError as error:
        raise ValueError(f"--key-file {path}: {error}") from None
