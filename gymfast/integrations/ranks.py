"""What the ranks of a trainer tell each other: a failure of one is an error on all."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gymfast.errors import GymfastError

Gather = Callable[[Any], list[Any]]


class Ranks:
    """This rank and the way to all others; every method is called by all ranks, in one order."""

    def __init__(self, rank: int, gather: Gather) -> None:
        """`gather` returns what every rank passed to it, in order of ranks."""
        self.rank = rank
        self.gather = gather

    @property
    def is_first(self) -> bool:
        """True on the rank that speaks to the engines."""
        return self.rank == 0

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A step of all ranks: left by all of them, or with an error on all of them.

        The rank that fails, or whose task is cancelled, raises its own error, the others a
        GymfastError that quotes it.
        """
        failure: Exception | CancelledError | None = None
        try:
            yield
        except (Exception, CancelledError) as error:  # noqa: BLE001 - raised once every rank knows
            failure = error
        texts = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise GymfastError(f"{what} failed on rank {rank}: {text}")


def names_to_leave_out(states: Sequence[dict[str, str]], rank: int) -> set[str]:
    """Names that a lower rank publishes already; `states` maps names to digests, by rank.

    Pipeline stages hold copies of some tensors (tied embeddings, those of MTP blocks). A xor that
    is applied twice reverts itself, so a version has each of them once.
    Raises GymfastError if two ranks hold different bytes under one name, on every rank.
    """
    owners: dict[str, int] = {}
    for other, digests in enumerate(states):
        for name, digest in digests.items():
            owner = owners.setdefault(name, other)
            if states[owner][name] != digest:
                raise GymfastError(
                    f"tensor {name!r} has different bytes on ranks {owner} and {other}: copies on "
                    "pipeline stages must be equal; nothing was published, the training step that "
                    "made them differ has to be found first"
                )
    return {name for name in states[rank] if owners[name] != rank}


def torch_ranks() -> Ranks:
    """The ranks of torch's default process group; this process alone if there is none."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return Ranks(0, lambda value: [value])

    def gather(value: Any) -> list[Any]:
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    return Ranks(dist.get_rank(), gather)
