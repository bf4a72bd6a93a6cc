"""What all ranks have to have in common before a byte moves, and how they find out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymfast.buckets import BucketPlan, BucketTensor, difference
from gymfast.channels.control import Control
from gymfast.errors import ChannelError

PROTOCOL = 2


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
