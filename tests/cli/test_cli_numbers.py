"""Options that are numbers: what is none, or more than any wait takes, is a usage error."""

from __future__ import annotations

import click
import pytest
from cli_commands import Gymfast, walk_commands

OPTIONS = {
    f"{' '.join(path)} {param.opts[0]}": param
    for path, command in walk_commands()
    for param in command.params
    if isinstance(param.type, click.types.FloatParamType)
}


def test_there_are_such_options() -> None:
    assert len(OPTIONS) >= 15
    assert "relay --freshness" in OPTIONS
    assert "sync status --timeout" in OPTIONS


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_refuses_what_is_no_finite_number(option: str) -> None:
    param = OPTIONS[option]
    for text in ("nan", "-nan", "inf", "-inf", "infinity", "1e400", "1e300", "1000001"):
        with pytest.raises(click.BadParameter, match=rf"'{text}': expected a number of at most"):
            param.type.convert(text, param, None)
    assert param.type.convert("1", param, None) == 1.0


@pytest.mark.parametrize(
    "call",
    [
        ("relay", "store", "--freshness", "nan"),
        ("relay", "store", "--cache-gb", "inf"),
        ("relay", "store", "--cache-gb", "nan"),
        ("sync", "status", "store", "--run", "demo", "--min-ready", "1", "--timeout", "nan"),
        ("sync", "watch", "store", "replica", "--run", "demo", "--interval", "inf"),
        ("table", "--rtt-ms", "nan"),
    ],
    ids=" ".join,
)
def test_the_error_names_option_and_value(gymfast: Gymfast, call: tuple[str, ...]) -> None:
    done = gymfast(*call)
    assert done.code == 2
    text = f"Invalid value for '{call[-2]}': '{call[-1]}': expected a number of at most 1000000"
    assert text in " ".join(done.err.split())


def test_a_rate_of_hundreds_of_digits_is_a_usage_error(gymfast: Gymfast) -> None:
    done = gymfast("relay", "store", "--bwlimit", "9" * 400)
    assert done.code == 2 and "expected 500K" in done.err
