"""The checkpoint of an engine in parts, as a trainer's buckets brought it: what deltas apply to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gymfast.delta import State, apply, as_tensor
from gymfast.delta.memory import CPU
from gymfast.delta.records import Digest
from gymfast.delta.state import Slot
from gymfast.delta.tensors import like
from gymfast.errors import ChainError
from gymfast.integrations.sglang_messages import RECORD, Part, PartFrame, Parts, root_of_parts

Named = Sequence[tuple[str, Any]]
_Mark = tuple[str, tuple[int, ...], Digest]


class PartsCopy:
    """States in CPU memory, one for each bucket of a trainer's rank, and what the model holds.

    An error of a part is kept, and refuses the update that it belongs to. Not thread-safe.
    """

    def __init__(self) -> None:
        """A copy of no parts."""
        self.failure = ""
        self._parts: dict[str, State] = {}
        self._update_id = ""
        self._loaded: dict[str, _Mark] = {}

    @property
    def is_empty(self) -> bool:
        """True if there is no part."""
        return not self._parts

    def clear(self) -> None:
        """Forgets all parts: the model holds something else."""
        self._parts, self._loaded, self.failure = {}, {}, ""

    def take(self, update_id: str, action: Part | PartFrame, frame: bytes, named: Named) -> Named:
        """Makes a part what a message says; the tensors that are to be loaded at once.

        The first part of an update forgets the error of the one before, a full one all parts.
        Raises ChainError for a frame of a part that is not here, FormatError if it is damaged or
        made for another base, TypeError for a tensor that no frame can carry.
        """
        is_staged = isinstance(action, PartFrame) or action.is_staged
        if update_id != self._update_id:
            self._update_id, self.failure = update_id, ""
            if not is_staged:
                self.clear()
        if isinstance(action, PartFrame):
            if action.key not in self._parts:
                raise ChainError(f"a frame came for part {action.key!r}, which is not here")
            apply(self._parts[action.key], frame)
            return []
        tensors = [(name, tensor) for name, tensor in named if name != RECORD]
        state = State(backend="cpu")
        state.add_all({name: as_tensor(value, name).copy(CPU) for name, value in tensors})
        self._parts[action.key] = state
        return [] if is_staged else tensors

    def require(self, parts: Parts) -> None:
        """Raises ChainError if these parts are not exactly that version."""
        if self.failure:
            raise ChainError(self.failure)
        if self.root != parts.root:
            raise ChainError(
                f"the {len(self._parts)} parts have digest {self.root[:16]}…, version "
                f"{parts.version} has {parts.root[:16]}…: send all tensors"
            )
        self._slots()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._slots())

    @property
    def root(self) -> str:
        """The digest of all parts."""
        return root_of_parts({key: state.root.hex() for key, state in self._parts.items()})

    def changed(self) -> list[str]:
        """Names whose bytes are not those that the model holds, removed ones too."""
        marks = self._marks()
        gone = [name for name in self._loaded if name not in marks]
        return [name for name, mark in marks.items() if self._loaded.get(name) != mark] + gone

    def tensors(self, names: Iterable[str], sample: Any) -> Iterable[tuple[str, Any]]:
        """Pairs of name and tensor of the sort of `sample`, sharing the memory of the copy."""
        slots = self._slots()
        for name in names:
            yield name, like(slots[name].tensor, sample)

    def mark_loaded(self) -> None:
        """The model holds all of it now."""
        self._loaded = self._marks()

    def _marks(self) -> dict[str, _Mark]:
        return {name: (*slot.spec, slot.digest) for name, slot in self._slots().items()}

    def _slots(self) -> dict[str, Slot]:
        """All tensors by name; stages of a pipeline may hold copies of one."""
        slots: dict[str, Slot] = {}
        for key, state in self._parts.items():
            for name, slot in state.slots.items():
                held = slots.setdefault(name, slot)
                if (held.spec, held.digest) != (slot.spec, slot.digest):
                    raise ChainError(f"tensor {name!r} is in two parts, and differs in {key!r}")
        return slots
