"""The channel over NCCL: its communicator, and another one when ranks were lost or came."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gymfast.channels.agreement import Terms, agree
from gymfast.channels.base import DEFAULT_DEPTH, DEFAULT_TIMEOUT_S
from gymfast.channels.control import Control
from gymfast.channels.nccl_arena import add_arena
from gymfast.channels.nccl_channel import NcclChannel
from gymfast.channels.nccl_library import load, registrations_of, warn_of_expandable_segments
from gymfast.errors import ChannelError, GymfastError, MissingDependencyError

__all__ = ["NcclChannel", "Way", "choose_way", "open_nccl"]
_log = logging.getLogger(__name__)
_MARGIN_S = 10.0


@dataclass(frozen=True)
class Way:
    """How a communicator comes to be: "make", "shrink" or "grow"; `members` in NCCL's order."""

    how: str
    members: tuple[int, ...]


def choose_way(ranks: Sequence[int], offers: Mapping[int, Sequence[Any]]) -> Way:
    """What all ranks do, by what each offers: members it is among, can shrink, can grow.

    Shrink and grow keep what NCCL has set up; they need one communicator that all old ranks share.
    """
    anew = Way("make", tuple(ranks))
    old = {tuple(members) for members, _, _ in offers.values() if members}
    if set(ranks) - offers.keys():  # some were lost meanwhile
        return anew
    if len(old) != 1 or 0 not in next(iter(old)):
        return anew
    members = next(iter(old))
    stay = [rank for rank in members if rank in ranks]
    new = [rank for rank in ranks if rank not in members]
    if any(not offers[rank][0] for rank in stay):
        return anew
    if new and len(stay) == len(members) and all(offers[rank][2] for rank in ranks):
        return Way("grow", (*members, *new))
    if not new and len(stay) < len(members) and all(offers[rank][1] for rank in stay):
        return Way("shrink", tuple(stay))
    return anew


def open_nccl(
    control: Control,
    *,
    replaces: NcclChannel | None = None,
    device: int | None = None,
    path: str = "",
    cuda_path: str = "",
    depth: int = DEFAULT_DEPTH,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_ctas: int = 0,
    arena_bytes: int = 0,
) -> NcclChannel:
    """A channel over NCCL between the ranks of a formation; called by all of them.

    After ranks were lost or came: form() again, then all call this with the channel that the new
    one replaces (None on ranks that are new), which is closed. It shrinks or grows where NCCL
    and the state of the old channel allow it, and is made anew otherwise. `device` is the number
    of this rank's GPU, by default torch's current one. `arena_bytes` of memory are allocated and
    registered with NCCL for buckets: depth x bucket_bytes for each root (BucketTransfer).
    Raises MissingDependencyError without NCCL or CUDA, ChannelError, on all ranks, if versions or
    settings differ or a rank does not get into the communicator by the deadline.
    """
    warn_of_expandable_segments()

    def channel() -> NcclChannel:
        return NcclChannel(
            load(path, cuda_path),
            control.ranks.index(control.rank),
            len(control.ranks),
            device=_current_device() if device is None else device,
            depth=depth,
            timeout_s=timeout_s,
            control=control,
        )

    first = _agreed(
        control, channel, Terms({}, depth, {"arena_bytes": str(arena_bytes)}), timeout_s
    )
    arena = replaces.arena if replaces is not None else None
    try:
        made = _made(control, channel, first, replaces, max_ctas)
    finally:
        if replaces is not None:
            _close_replaced(replaces, control)
    if arena_bytes == 0:
        return made
    if replaces is not None:
        made.num_failed_registrations = replaces.num_failed_registrations
        arena = None if replaces.is_stuck else arena
    try:
        ways = registrations_of(load(path, cuda_path))
        trouble = partial(_on_trouble, control, made)
        if add_arena(control, made, arena_bytes, ways, arena, trouble):
            return made
    except BaseException:  # the others may be inside NCCL with this rank
        made.discard()
        raise
    made.discard()
    anew = _anew(control, channel, max_ctas)
    anew.num_failed_registrations = made.num_failed_registrations
    return anew


def _made(
    control: Control,
    channel: Callable[[], NcclChannel],
    first: NcclChannel,
    replaces: NcclChannel | None,
    max_ctas: int,
) -> NcclChannel:
    """A channel with a communicator, made in the best way that all ranks can go."""
    timeout_s = first.timeout_s
    offer = [
        list(replaces.members) if replaces else [],
        replaces is not None and replaces.can_shrink,
        first.can_grow and (replaces is None or replaces.is_usable),
    ]
    offers = control.gather(offer, timeout_s)
    way = choose_way(control.ranks, offers) if control.rank == 0 else None
    how = str(control.share(way.how if way else None, timeout_s))
    if how == "make":
        return _anew(control, lambda: first, max_ctas)
    members = way.members if way else ()
    words = _attempt(control, first, _Step(how, members, replaces, max_ctas))
    if not words:
        return first
    _log.warning("NCCL did not %s the communicator, it is made anew: %s", how, words)
    return _anew(control, channel, max_ctas)


def _anew(control: Control, channel: Callable[[], NcclChannel], max_ctas: int) -> NcclChannel:
    made = channel()
    if words := _attempt(control, made, _Step("make", (), None, max_ctas)):
        raise ChannelError(words)
    return made


def _agreed(
    control: Control, channel: Callable[[], NcclChannel], terms: Terms, timeout_s: float
) -> NcclChannel:
    """A channel without a communicator, if all ranks have one and the same environment."""
    made: NcclChannel | None = None
    problem: GymfastError | None = None
    try:
        made = channel()
    except (ChannelError, MissingDependencyError) as error:
        problem = error  # the others hear of it instead of waiting
    environment = made.environment if made else {"NCCL": str(problem)}
    try:
        agree(control, replace(terms, environment={**environment, **terms.environment}), timeout_s)
    except ChannelError:
        if made is not None:
            made.discard()
        raise
    if made is None:
        raise problem or ChannelError("no channel was made")
    return made


@dataclass(frozen=True)
class _Step:
    """One attempt to make a communicator."""

    how: str
    members: tuple[int, ...]  # known on rank 0
    replaces: NcclChannel | None
    max_ctas: int


def _attempt(control: Control, made: NcclChannel, step: _Step) -> str:
    """Why some rank is not in the communicator, in words; the channel is closed then."""
    words = ""
    unique_id = b""
    try:
        if control.rank == 0 and step.how != "shrink":
            unique_id = _unique_id(made, step)
    except (ChannelError, ValueError) as error:
        words = str(error)
    members, unique_id, words = control.share([step.members, unique_id, words], made.timeout_s)
    if not words:
        try:
            with control.watching(lambda rank, text: _on_trouble(control, made, rank, text)):
                _take_part(control, made, step, members, unique_id)
        except (ChannelError, ValueError) as error:  # another thread may have stopped the old one
            words = str(error)
            control.trouble(words)
    # Ranks that wait for one that failed say so only when their own time is over.
    said = control.gather(words, made.timeout_s + _MARGIN_S)
    missing = [f"rank {r} is lost: {control.lost[r]}" for r in control.ranks if r in control.lost]
    every = "; ".join(dict.fromkeys([*missing, *(text for text in said.values() if text)]))
    words = str(control.share(every, made.timeout_s + 2 * _MARGIN_S))
    if words:
        made.discard()
    return words


def _take_part(
    control: Control, made: NcclChannel, step: _Step, members: Sequence[int], unique_id: bytes
) -> None:
    if step.how == "make":
        made.join(unique_id, max_ctas=step.max_ctas)
    elif step.how == "grow":
        is_new = step.replaces is None
        own_id = unique_id if is_new or control.rank == 0 else b""
        made.grow(step.replaces, members, own_id, max_ctas=step.max_ctas)
    elif step.replaces is not None:
        made.shrink(step.replaces)


def _on_trouble(control: Control, made: NcclChannel, rank: int, text: str) -> None:
    """A rank is lost or failed while others wait for it inside NCCL."""
    made.abort(f"rank {rank}: {text}")
    if control.rank == 0:
        control.trouble(f"rank {rank}: {text}")


def _unique_id(made: NcclChannel, step: _Step) -> bytes:
    if step.how == "grow":
        assert step.replaces is not None  # rank 0 is among the old ranks: choose_way
        return step.replaces.id_to_grow()
    return made.new_id()


def _close_replaced(old: NcclChannel, control: Control) -> None:
    """Other ranks are asked to take part only if all of them are there."""
    if set(old.members) <= set(control.ranks) and old.is_usable:
        old.close()
    else:
        old.discard()


def _current_device() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch and torch.cuda.is_available() else 0
