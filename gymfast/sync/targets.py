"""What a subscriber installs versions into: live tensors, or several targets as one."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gymfast.delta import State, apply, restore
from gymfast.delta.apply import ApplyReport
from gymfast.delta.tensors import identity
from gymfast.errors import ChecksumError
from gymfast.sync.manifest import PositionRecord
from gymfast.sync.staging import StagedFrame


@dataclass(frozen=True)
class Installed:
    """What writing a sequence of frames changed, all frames together."""

    num_changed: int = 0
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    @classmethod
    def of(cls, reports: Sequence[ApplyReport]) -> Installed:
        """The sum of the reports of single frames."""
        return cls(
            num_changed=sum(report.num_changed for report in reports),
            added=tuple(name for report in reports for name in report.added),
            removed=tuple(name for report in reports for name in report.removed),
            replaced=tuple(name for report in reports for name in report.replaced),
        )


class Target(Protocol):
    """A destination of versions.

    `write` may leave anything behind when it fails; the subscriber then asks for the root, and
    heals from an anchor unless it is the old one. Not thread-safe.
    """

    def root(self) -> str | None:
        """The root of the bytes there, from a pass over all of them; None if there are none.

        Raises FormatError (ChecksumError, ...) if they are no state at all.
        """

    def load(self) -> PositionRecord | None:
        """The position that was saved last and survived; None if there is none."""

    def save(self, position: PositionRecord) -> None:
        """Keeps the position, durably where the destination is durable."""

    def write(self, frames: Sequence[StagedFrame], *, is_known: bool) -> Installed:
        """Installs the frames, in order. `is_known`: the names there are those of the run.

        Raises what gymfast.delta raises; where nothing fits, before the first write.
        """

    def close(self) -> None:
        """Gives resources back."""


class LiveTarget:
    """Live tensors, updated in place: memory that keeps dtype and shape keeps its address."""

    def __init__(
        self,
        weights: MutableMapping[str, Any],
        *,
        allow_new_names: bool = False,
        verify_all: bool = True,
        backend: str = "auto",
        threads: int | None = None,
    ) -> None:
        """A target over `weights`; one pass computes the digests of what they hold now.

        A version whose names are others than those of `weights` is refused, unless
        `allow_new_names` or `weights` is empty, or the names became others in the course of the
        run. `verify_all` reads all bytes again after each version, else only changed units count.
        An entry of `weights` that is replaced by other memory makes the target inconsistent; the
        next anchor is written to what is there then.
        Raises ValueError for tensors that cannot be written in place.
        """
        self._weights, self._backend, self._threads = weights, backend, threads
        self._state = State.attach(weights, backend=backend, threads=threads)
        self._allow_new_names = allow_new_names or not weights
        self._verify_all = verify_all
        self._position: PositionRecord | None = None

    @property
    def state(self) -> State:
        """Tensors and digests."""
        return self._state

    def root(self) -> str | None:
        if not self._state.slots:
            return None
        self._state.require_consistent()
        self._require_same_memory()
        if self._verify_all:
            self._state.verify()
        return self._state.root.hex()

    def load(self) -> PositionRecord | None:
        return self._position

    def save(self, position: PositionRecord) -> None:
        self._position = position

    def write(self, frames: Sequence[StagedFrame], *, is_known: bool) -> Installed:
        if self._moved() and frames and frames[0].step.kind == "anchor":
            self._state = State.attach(self._weights, backend=self._backend, threads=self._threads)
        self._require_same_memory()
        reports = []
        for frame in frames:
            if frame.step.kind == "anchor":
                allow = self._allow_new_names or is_known
                reports.append(restore(self._state, frame.read(), allow_new_names=allow))
            else:
                reports.append(apply(self._state, frame.read()))
        return Installed.of(reports)

    def close(self) -> None:
        return

    def _moved(self) -> str:
        """The first name whose memory is no longer what was attached; an empty text if none is."""
        for name, slot in self._state.slots.items():
            found = identity(self._weights.get(name))
            if slot.tensor.num_bytes and (found is None or found[0] != slot.tensor.address):
                return name
        return ""

    def _require_same_memory(self) -> None:
        if name := self._moved():
            raise ChecksumError(
                f"tensor {name!r} is no longer in the memory that was attached (it was replaced, "
                "moved or removed), so what is served would not be what is written: write to "
                "tensors in place; the next anchor takes over the memory that is there then"
            )


class GroupTarget:
    """Several targets that change together, such as the ranks of an engine: all or inconsistent."""

    def __init__(self, members: Sequence[Target]) -> None:
        """A group of at least one target; each gets every frame."""
        if not members:
            raise ValueError("a group needs at least one member")
        self._members = tuple(members)

    def root(self) -> str | None:
        roots = [member.root() for member in self._members]
        wrong = [i for i, root in enumerate(roots) if root != roots[0]]
        if wrong:
            raise ChecksumError(
                f"rank {wrong[0]} holds state {(roots[wrong[0]] or 'none')[:16]}…, rank 0 "
                f"{(roots[0] or 'none')[:16]}…: the group is inconsistent"
            )
        return roots[0]

    def load(self) -> PositionRecord | None:
        positions = [member.load() for member in self._members]
        return next((position for position in positions if position is not None), None)

    def save(self, position: PositionRecord) -> None:
        for member in self._members:
            member.save(position)

    def write(self, frames: Sequence[StagedFrame], *, is_known: bool) -> Installed:
        found = [member.write(frames, is_known=is_known) for member in self._members]
        return found[0]

    def close(self) -> None:
        for member in self._members:
            member.close()
