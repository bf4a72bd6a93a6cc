"""What all ranks have to have in common before a byte moves, and how they find out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymfast.buckets import BucketPlan, BucketTensor, difference
from gymfast.channels.control import Control
from gymfast.errors import ChannelError

PROTOCOL = 2
WAITED = "it waited for rank "
"""So begins what a rank says that failed for no reason of its own."""


@dataclass(frozen=True)
class Terms:
    """Plans by their roots, the depth of the channel, and what else has to be equal."""

    plans: Mapping[int, BucketPlan]
    depth: int
    environment: Mapping[str, str]

    def offer(self) -> list[Any]:
        """All of it in short: equal for equal terms only."""
        digests = [[root, plan.digest] for root, plan in self.plans.items()]
        return [PROTOCOL, self.depth, digests, [list(i) for i in sorted(self.environment.items())]]

    def listing(self) -> list[Any]:
        """The plans in full."""
        return [
            [
                root,
                plan.bucket_bytes,
                [[t.name, t.dtype, t.shape, t.num_bytes] for t in plan.tensors],
            ]
            for root, plan in self.plans.items()
        ]


def agree(control: Control, terms: Terms, timeout_s: float) -> None:
    """Returns if the terms of all ranks are equal; called by all of them.

    Raises ChannelError, on all ranks, with the first difference and whose it is.
    """
    offers = control.gather(terms.offer(), timeout_s)
    odd = next((rank for rank, offer in offers.items() if offer != offers[0]), -1)
    words = ""
    if control.rank == 0:
        missing = sorted(set(control.ranks) - set(offers))
        words = "; ".join(f"rank {rank} is lost: {control.lost[rank]}" for rank in missing)
    odd, words = control.share([odd, words], timeout_s)
    if odd < 0 and not words:
        return
    if not words:
        listings = control.gather(terms.listing() if control.rank == odd else None, timeout_s)
        if control.rank == 0:
            words = _explain(terms, odd, offers[odd], listings.get(odd) or [])
        words = control.share(words, timeout_s)
    raise ChannelError(words, (odd,) if odd >= 0 else ())


def exchange(
    control: Control,
    what: str,
    value: Any,
    problem: str,
    gather_s: float,
    share_s: float | None = None,
) -> dict[int, Any]:
    """What each rank passes, by rank, if all are there and have no problem; called by all of them.

    Raises ChannelError, on all ranks, that names those which are lost, else those which failed;
    its words begin with `what`. Rank 0 waits for `gather_s`, others may wait longer for rank 0.
    """
    found = control.gather([problem, value], gather_s)
    gone = {rank: why for rank, why in control.lost.items() if rank in control.ranks}
    lost = {rank: f"is lost: {why}" for rank, why in gone.items()}
    said = {rank: text for rank, (text, _) in found.items() if text}
    causes = {rank: text for rank, text in said.items() if not text.startswith(WAITED)} or said
    failed = {rank: f"says: {text}" for rank, text in causes.items()}
    values = [[rank, value] for rank, (_, value) in found.items()]
    answer = [values, sorted((lost or failed).items())]
    values, troubles = control.share(answer, gather_s if share_s is None else share_s)
    if troubles:
        words = "; ".join(f"rank {rank} {text}" for rank, text in troubles)
        ranks = tuple(int(rank) for rank, _ in troubles)
        raise ChannelError(f"{what} of ranks {control.ranks}: {words}", ranks)
    return {int(rank): value for rank, value in values}


def require_equal(what: str, found: Mapping[int, Any]) -> None:
    """Raises ChannelError that names the first rank which has another value than rank 0."""
    for rank, value in found.items():
        if value != found[0]:
            words = f"{what} is {value!r} there and {found[0]!r} on rank 0"
            raise ChannelError(f"rank {rank} cannot take part: {words}", (rank,))


def _explain(terms: Terms, odd: int, offer: list[Any], listing: list[Any]) -> str:
    """In what another rank differs from this one, in words."""
    what = f"rank {odd} cannot take part: "
    if offer[:1] != [PROTOCOL]:  # another one may offer other things
        return (
            f"{what}it speaks protocol {offer[:1]}, rank 0 speaks {[PROTOCOL]}: install the same "
            "gymfast on both"
        )
    _, depth, _, environment = offer
    if depth != terms.depth:
        return f"{what}its channel has depth {depth}, that of rank 0 {terms.depth}"
    theirs = dict(environment)
    for name in sorted(terms.environment.keys() | theirs.keys()):
        here, there = terms.environment.get(name), theirs.get(name)
        if here != there:
            return f"{what}{name} is {there!r} there and {here!r} on rank 0"
    plans = {
        root: BucketPlan([BucketTensor(n, d, tuple(s), b) for n, d, s, b in rows], size)
        for root, size, rows in listing
    }
    if plans.keys() != terms.plans.keys():
        return f"{what}its roots are {sorted(plans)}, those of rank 0 {sorted(terms.plans)}"
    for root, plan in terms.plans.items():
        if words := difference(plan, plans[root]):
            return f"{what}in the plan of root {root}, {words} (here: rank 0)"
    return f"{what}it was lost before it said in what its plan differs"
