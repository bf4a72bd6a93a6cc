"""Carries out the steps of a frame on live memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from gymfast.delta.apply_plan import Action, Spec, Step
from gymfast.delta.backends import Backend
from gymfast.delta.geometry import Geometry
from gymfast.delta.memory import CPU, assign, count_different
from gymfast.delta.read_back import ReadBack, compare
from gymfast.delta.records import BlocksRecord, Digest
from gymfast.delta.state import Rows, Slot, State, room_for, zero_rows
from gymfast.delta.tensors import Tensor, like, overlapping, why_not_live, zeros
from gymfast.delta.workers import OrderedWorkers
from gymfast.errors import ChecksumError, FormatError, GymfastError

_RESULT_MISMATCH = 61


class LiveReceiver:
    """A state whose tensors may still wait for their first digest (an apply_plan.Receiver)."""

    def __init__(self, state: State, waiting: dict[str, Tensor] | None = None) -> None:
        """A receiver around a state; waiting tensors have no slot in it yet."""
        self.state = state
        self.owns_memory = state.owns_memory
        self.waiting = waiting or {}
        self._slots = {id(slot.tensor): slot for slot in state.slots.values()}

    def specs(self) -> dict[str, Spec]:
        """Dtype and shape of all tensors, by name."""
        known = {name: slot.spec for name, slot in self.state.slots.items()}
        return known | {name: (t.dtype, t.shape) for name, t in self.waiting.items()}

    def digest(self, name: str, geometry: Geometry | None) -> Digest:
        """Digest of a tensor; the geometry (if given) becomes that of its blocks."""
        if name in self.waiting:
            self._take(name, lambda tensor: self.state.slot_of(tensor, geometry))
        if geometry is not None:
            self.state.use_geometry(name, geometry)
        return self.state.slots[name].digest

    def memory(self, name: str) -> object:
        """Equal for names that share their memory."""
        waiting = self.waiting.get(name)
        return id(self.state.slots[name].tensor if waiting is None else waiting)

    def take_unread(self, name: str, geometry: Geometry) -> None:
        """Makes a waiting tensor part of the state without a look at its bytes."""
        rows = zero_rows(name, geometry)
        self._take(name, lambda tensor: Slot(tensor, geometry, rows))

    def _take(self, name: str, make: Callable[[Tensor], Slot]) -> None:
        tensor = self.waiting.pop(name)
        slot = self._slots.get(id(tensor)) or make(tensor)
        self._slots[id(tensor)] = self.state.slots[name] = slot


def check_writable(steps: list[Step], state: State) -> None:
    """Raises ValueError, before any write, if a tensor to be changed cannot be written in place."""
    written = [s.name for s in steps if s.action in (Action.PATCH, Action.COPY)]
    problems = [
        f"{name!r} {why}" for name in written if (why := why_not_live(state.slots[name].tensor))
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(
            f"cannot be updated in place: {', '.join(problems[:3])}{more}; nothing was written; "
            "pass contiguous writable tensors"
        )
    distinct = {id(slot): (name, slot.tensor) for name, slot in state.slots.items()}
    pair = overlapping(distinct.values()) if written else None
    if pair is not None:
        raise ValueError(
            f"tensors {pair[0]!r} and {pair[1]!r} share part of their memory, so that an update of "
            "one would change the other: nothing was written; pass only one of them"
        )


class Executor:
    """Carries out planned steps on a state; what has to be built is built before the first write.

    `reset` is for anchors: memory that is kept starts from zeros. With `done` the blocks that are
    changed in place are read again, and noted there.
    """

    def __init__(
        self, state: State, steps: list[Step], *, reset: bool, done: ReadBack | None = None
    ) -> None:
        self._state = state
        self._steps = steps
        self._reset = reset
        self._done = done
        self._rows: dict[str, Rows] = {}
        self.num_changed = 0

    def run(self) -> None:
        """All steps. Raises ChecksumError if it fails half way: the state is then inconsistent."""
        built = {s.name: new_slot(s, self._place_of(s.name)) for s in self._of(Action.BUILD)}
        self._write(built, list(self._of(Action.BUILD)))
        if self._reset:
            self._rows = {
                s.name: zero_rows(s.name, s.record.geometry) for s in self._of(Action.PATCH)
            }
        if not built and all(s.action in (Action.KEEP, Action.SKIP) for s in self._steps):
            return
        with _half_written(self._state):
            patches = list(self._of(Action.PATCH))
            for step in patches:
                self._prepare(step)
            self._write(self._state.slots, patches, self._done)
            self._state.slots.update(built)
            for step in self._of(Action.COPY):
                self._copy(step)
            for step in self._of(Action.TIE):
                self._state.slots[step.name] = self._state.slots[step.record.target]
            for step in self._of(Action.REMOVE):
                del self._state.slots[step.name]
            if self._state.mapping is not None:
                self._update_mapping(self._state.mapping)

    def _place_of(self, name: str) -> str:
        """Where a tensor is built: where the old one of that name is, else by the first one."""
        slot = self._state.slots.get(name)
        return self._state.usual_place if slot is None else slot.tensor.place

    def _of(self, action: Action) -> Iterator[Step]:
        return (step for step in self._steps if step.action is action)

    def _write(
        self, slots: Mapping[str, Slot], steps: list[Step], done: ReadBack | None = None
    ) -> None:
        pairs = [(slots[step.name], step) for step in steps]
        self.num_changed += write_blocks(pairs, self._state.backend, self._state.threads, done)

    def _prepare(self, step: Step) -> None:
        slot = self._state.slots[step.name]
        if self._reset:
            slot.tensor.data[:] = 0
            slot.geometry = step.record.geometry
            slot.rows = self._rows.pop(step.name)
        self._state.use_geometry(step.name, step.record.geometry)

    def _copy(self, step: Step) -> None:
        slot, target = self._state.slots[step.name], self._state.slots[step.record.target]
        self.num_changed += count_different(slot.tensor.data, target.tensor.data)
        assign(slot.tensor.data, target.tensor.data)
        slot.geometry, slot.rows = target.geometry, target.rows.copy()

    def _update_mapping(self, mapping: MutableMapping[str, Any]) -> None:
        sample = next(iter(mapping.values()), np.zeros(0))
        for step in self._of(Action.BUILD):
            tensor = self._state.slots[step.name].tensor
            mapping[step.name] = like(tensor, mapping.get(step.name, sample))
        for step in self._of(Action.TIE):
            mapping[step.name] = mapping[step.record.target]
        for step in self._of(Action.REMOVE):
            del mapping[step.name]


def new_slot(step: Step, place: str) -> Slot:
    """A tensor of zeros, at a place, for the blocks of a step.

    Raises BudgetError if there is no memory for a tensor of that size.
    """
    geometry = step.record.geometry
    rows = zero_rows(step.name, geometry)
    with room_for(step.name, geometry.num_bytes, place):
        tensor = zeros(*step.spec, place)
    return Slot(tensor, geometry, rows)


def write_blocks(
    pairs: Sequence[tuple[Slot, Step]],
    backend: Backend,
    threads: int,
    done: ReadBack | None = None,
) -> int:
    """Units changed, once all blocks of all steps are in place and give the digests of END.

    With `done` what was written is read again, section by section, and noted there.
    Raises FormatError and ChecksumError for the first block or tensor that is not as the frame
    says; other tensors may be written then, and no thread writes any more.
    """
    workers: OrderedWorkers[tuple[Slot, Step], int]
    in_place = any(slot.tensor.place != CPU for slot, _ in pairs)  # see EncodePass
    num_sections = sum(len(step.blocks) for _, step in pairs)
    workers = OrderedWorkers(threads, num_sections, in_place=in_place)
    if done is not None:
        done.begin(slot for slot, _ in pairs)

    def jobs() -> Iterator[tuple[tuple[Slot, Step], Callable[[], int] | None]]:
        for slot, step in pairs:
            data, params = slot.tensor.data, step.params
            per_call = backend.sections_per_call(data, slot.geometry, params) if step.blocks else 1
            for first in range(0, len(step.blocks), per_call):
                sections = step.blocks[first : first + per_call]
                job = partial(_write_sections, slot, step, sections, backend)
                yield (slot, step), partial(job, threads=workers.job_threads, done=done)
            yield (slot, step), None

    num_changed = 0
    for (slot, step), count in workers.run(jobs()):
        num_changed += count or 0
        if count is None:
            with naming(step.name):
                check_result(slot.digest, step)
    return num_changed


def _write_sections(
    slot: Slot,
    step: Step,
    sections: Sequence[BlocksRecord],
    backend: Backend,
    *,
    threads: int,
    done: ReadBack | None,
) -> int:
    """Called on any thread."""
    data, rows = slot.tensor.data, slot.rows
    with naming(step.name):
        if done is None:
            return backend.apply_sections(data, sections, slot.geometry, step.params, rows, threads)
        num_changed, found = backend.apply_and_read(
            data, sections, slot.geometry, step.params, rows, threads
        )
    for section, digests in zip(sections, found, strict=True):
        compare(step.name, slot, section.first_block, digests)
        done.note(slot, section.first_block, section.num_blocks)
    return num_changed


def check_result(found: Digest, step: Step) -> None:
    """Raises ChecksumError 61 if a tensor does not have the digest that END states (R28)."""
    if found != step.final:
        raise ChecksumError(
            f"digest {found[0]:016x}{found[1]:016x} after all blocks, the frame says "
            f"{step.final[0]:016x}{step.final[1]:016x}",
            _RESULT_MISMATCH,
        )


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Puts the name of a tensor in front of the FormatErrors of a back end."""
    try:
        yield
    except FormatError as error:
        raise type(error)(f"tensor {name!r}: {error}", error.number) from error


@contextmanager
def _half_written(state: State) -> Iterator[None]:
    state.is_consistent = False
    try:
        yield
    except GymfastError as error:
        text = (
            f"{error}; tensors were already written, so the base is now inconsistent: restore it "
            "from an anchor (gymfast.delta.restore)"
        )
        if isinstance(error, FormatError):
            raise ChecksumError(text, error.number) from error
        raise type(error)(text) from error
    state.is_consistent = True
