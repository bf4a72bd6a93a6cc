"""Which tensors of a checkpoint an engine has to load together, learned from its own loader."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from gymfast.errors import CoverageError

Names = tuple[str, ...]


@dataclass(frozen=True)
class LoadGroup:
    """Tensors that go to the loader in one call, and the live parameters that it then fills.

    `parameters` is None before the first load, and where the loader does not tell.
    """

    names: Names
    parameters: frozenset[str] | None = None

    @property
    def modules(self) -> frozenset[str]:
        """The modules that own the parameters: each is fused, packed and processed as a whole."""
        return frozenset(name.rpartition(".")[0] for name in self.parameters or ())

    def filled(self, parameters: Collection[str] | None) -> LoadGroup:
        """The group, with what a load of it filled.

        Raises CoverageError if an earlier load filled something else.
        """
        found = None if parameters is None else frozenset(parameters)
        if self.parameters not in (None, found):
            different = sorted(self.parameters ^ (found or frozenset()))
            raise CoverageError(
                f"the loader filled other parameters than the last time: {different[:3]} of "
                f"{len(different)} differ, for the group of {self.names[0]!r}"
            )
        return LoadGroup(self.names, found)


def first_groups(names: Iterable[str]) -> list[LoadGroup]:
    """Names by the layer they belong to: the outermost number in a name and what precedes it.

    Names without a number (embedding, norm, head) are one group: they may be tied.
    """
    layers: dict[Names, list[str]] = {}
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        layer = () if place is None else tuple(parts[: place + 1])
        layers.setdefault(layer, []).append(name)
    return [LoadGroup(tuple(layer)) for layer in layers.values()]


def merge(groups: Sequence[LoadGroup]) -> list[LoadGroup]:
    """Groups of which no two fill the same module; one group if the loader did not tell."""
    if any(group.parameters is None for group in groups):
        return [LoadGroup(tuple(name for group in groups for name in group.names))]
    merged: list[LoadGroup] = []
    for group in groups:
        joined = group
        for other in [found for found in merged if found.modules & joined.modules]:
            merged.remove(other)
            parameters = (other.parameters or frozenset()) | (joined.parameters or frozenset())
            joined = LoadGroup(other.names + joined.names, parameters)
        merged.append(joined)
    return merged


def touched(groups: Sequence[LoadGroup], changed: Collection[str]) -> list[LoadGroup]:
    """The groups that hold a changed tensor, each whole."""
    wanted = set(changed)
    return [group for group in groups if wanted.intersection(group.names)]
