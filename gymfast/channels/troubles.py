"""What the control plane learns of ranks, told to the channel while rounds are under way."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from gymfast.channels.base import Channel
from gymfast.channels.control import Control


@contextmanager
def heeding(control: Control, channel: Channel, roots: Collection[int]) -> Iterator[None]:
    """Rounds in the block wait for no rank that is lost or failed; without a root they end.

    Rank 0 passes on what it learns: others may wait for bytes that such a rank was to pass on.
    Ranks of the channel are positions in `control.ranks`.
    """

    def heed(rank: int, why: str) -> None:
        if rank not in control.ranks:
            return
        if channel.survives_loss and rank not in roots:
            channel.lose(control.ranks.index(rank), why)
        else:
            channel.abort(f"rank {rank}: {why}")
        if control.rank == 0:
            control.trouble(why, of=rank)

    with control.watching(heed):
        for rank, why in control.lost.items():
            heed(rank, why)
        yield
