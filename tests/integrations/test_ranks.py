"""What one rank of a trainer meets, all of them hear of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gymfast.errors import GymfastError
from gymfast.integrations.ranks import Ranks


@pytest.mark.parametrize("error", [ValueError("no room"), asyncio.CancelledError("stopped")])
def test_a_rank_that_fails_or_is_cancelled_tells_the_others_first(error: BaseException) -> None:
    told: list[Any] = []

    def gather(value: Any) -> list[Any]:
        told.append(value)
        return [value, None]

    with pytest.raises(type(error)) as raised, Ranks(0, gather).together("encoding"):
        raise error
    assert raised.value is error
    assert told == [f"{type(error).__name__}: {error}"]
    with (
        pytest.raises(GymfastError, match="encoding failed on rank 0"),
        Ranks(1, lambda _: [told[0], None]).together("encoding"),
    ):
        pass
