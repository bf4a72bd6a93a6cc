"""The arena of a channel over NCCL: allocated once, registered once with each communicator.

NCCL wants all ranks to pass registered memory or none: what one rank cannot, none does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from gymfast.channels.base import Arena
from gymfast.channels.control import Control
from gymfast.channels.nccl_channel import NcclChannel
from gymfast.errors import ChannelError

_log = logging.getLogger(__name__)
_MARGIN_S = 10.0
_DONE, _SKIPPED = "done", "skipped"


def add_arena(
    control: Control,
    channel: NcclChannel,
    num_bytes: int,
    ways: Sequence[str],
    arena: Arena | None,
    on_trouble: Callable[[int, str], None],
) -> bool:
    """Whether the communicator can be used after it; called by all ranks, with the same `ways`.

    The channel has an arena then, the given one if it is as large, if all ranks have theirs
    registered in the first of the ways that NCCL does not skip. A failure is a warning and is
    counted: rounds go on with other memory. Raises ChannelError if a rank is lost.
    """
    if not ways:
        _log.info("this NCCL, with these settings, registers no memory: transfers go on without")
        return True
    words = _on_all(control, channel, _take(channel, num_bytes, arena))
    if any(words):
        _go_without(channel, words)
        return True
    for how in ways:
        with control.watching(on_trouble):
            outcome = _register(control, channel, how)
        outcomes = _on_all(control, channel, outcome)
        if set(outcomes) == {_DONE}:
            return True
        if failed := [text for text in outcomes if text not in (_DONE, _SKIPPED)]:
            return _go_without(channel, failed, is_usable=how != "window")
        channel.deregister_arena()
    _log.info("NCCL skips the registration of memory here: transfers go on without")
    channel.arena = None
    return True


def _take(channel: NcclChannel, num_bytes: int, arena: Arena | None) -> str:
    """Why there is no arena, or nothing."""
    try:
        channel.take_arena(num_bytes, arena)
    except ChannelError as error:
        return f"rank {channel.rank}: {error}"
    return ""


def _register(control: Control, channel: NcclChannel, how: str) -> str:
    try:
        return _DONE if channel.register_arena(how) else _SKIPPED
    except (ChannelError, ValueError) as error:
        if how == "window":  # the others wait for this rank
            control.trouble(str(error))
        return str(error)


def _on_all(control: Control, channel: NcclChannel, text: str) -> list[str]:
    """What all ranks said."""
    said = control.gather(text, channel.timeout_s + _MARGIN_S)
    lost = [f"rank {r} is lost: {control.lost[r]}" for r in control.ranks if r in control.lost]
    shared: Any = control.share([lost, list(said.values())], channel.timeout_s + 2 * _MARGIN_S)
    if shared[0]:
        raise ChannelError("; ".join(shared[0]))
    return [str(one) for one in shared[1]]


def _go_without(channel: NcclChannel, words: list[str], *, is_usable: bool = True) -> bool:
    """Warns, and gives the arena up where nothing can be under way in it."""
    if is_usable:
        channel.deregister_arena()
        channel.arena = None
    channel.num_failed_registrations += 1
    every = "; ".join(dict.fromkeys(text for text in words if text))
    _log.warning("buckets are not registered with NCCL, transfers go on without: %s", every)
    return is_usable
