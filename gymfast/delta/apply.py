"""Applying frames in place to live tensors, and looking into frames without a base."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from gymfast.delta.apply_live import Executor, LiveReceiver, check_writable, new_slot, write_blocks
from gymfast.delta.apply_plan import (
    Action,
    Step,
    check_new_root,
    plan_restore,
    plan_steps,
    unplanned,
)
from gymfast.delta.authentication import authentication_of
from gymfast.delta.backends import select
from gymfast.delta.frame import (
    EndEntry,
    FrameInfo,
    Kind,
    ParsedFrame,
    Status,
    TensorRecord,
    frame_info,
)
from gymfast.delta.parse import Frame, parse, with_modes
from gymfast.delta.read_back import ReadBack
from gymfast.delta.records import Digest
from gymfast.delta.state import State, gather, num_threads
from gymfast.errors import ChecksumError

_ROOT_MISMATCH = 63


@dataclass(frozen=True)
class ApplyReport:
    """What applying a frame did; num_changed counts units, skipped names tensors already new."""

    base_root: bytes
    new_root: bytes
    num_changed: int
    num_tensors: int
    skipped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


def apply(
    base: MutableMapping[str, Any] | State,
    frame: Frame,
    *,
    backend: str = "auto",
    threads: int | None = None,
    key: bytes | None = None,
    done: ReadBack | None = None,
) -> ApplyReport:
    """Turns base into the state that the frame describes, in place.

    Tensors that change keep their memory; those added, replaced or removed change the mapping.
    All sections, names, dtypes, shapes and digests are checked before the first write; tensors
    that already are in the new state are skipped, so applying a frame twice is a no-op. A State
    has its own back end and threads. Writes go past autograd and its version counters. With a key
    a frame that the holder of the key did not encode is refused, unread. With `done` each block
    that changes is read again right after it was written, and `State.verify(done)` reads the rest.
    Raises FormatError (also as ChecksumError, CoverageError) for a frame that is damaged or made
    for another base, ValueError for tensors that cannot be written in place, ChainError for a
    state left inconsistent. Nothing was written then, unless the error says "inconsistent".
    """
    parsed = parse(frame, _parser_for(base, backend), key)
    receiver = _receiver(base, backend, threads)
    state = receiver.state
    state.require_consistent()
    if state.owns_memory:
        _untie(state, parsed)
    steps = plan_steps(parsed, receiver)
    check_writable(steps, state)
    return _execute(parsed, state, steps, Executor(state, steps, reset=False, done=done))


def restore(
    base: MutableMapping[str, Any] | State,
    anchor: Frame,
    *,
    allow_new_names: bool = False,
    backend: str = "auto",
    threads: int | None = None,
    key: bytes | None = None,
) -> ApplyReport:
    """Makes base hold the state of an anchor, whatever its bytes were; heals inconsistent states.

    Memory is kept where dtype and shape are the same. Names have to be the same on both sides,
    unless allow_new_names says that tensors may appear and disappear. With a key the anchor has
    to be authenticated by it.
    Raises ChainError if the frame is a delta, CoverageError if names differ, FormatError if it is
    damaged, ValueError for tensors that cannot be written in place.
    """
    parsed = parse(anchor, _parser_for(base, backend), key)
    receiver = _receiver(base, backend, threads)
    state = receiver.state
    if state.owns_memory:
        _untie(state, parsed)
    steps = plan_restore(parsed, receiver, allow_new_names=allow_new_names)
    for step in steps:
        if step.name in receiver.waiting:
            receiver.take_unread(step.name, step.record.geometry)
    check_writable(steps, state)
    # What goes is a step like the others: nothing is written until all that can be refused was.
    named = {step.name for step in steps}
    steps += [_removal(name, receiver) for name in receiver.specs() if name not in named]
    return _execute(parsed, state, steps, Executor(state, steps, reset=True))


def _removal(name: str, receiver: LiveReceiver) -> Step:
    """The step that takes away a tensor that an anchor does not name, whatever its bytes are."""
    dtype, shape = receiver.specs()[name]
    geometry = receiver.state.plan(dtype, shape)
    if name in receiver.waiting:
        receiver.take_unread(name, geometry)
    record = TensorRecord(Kind.REMOVED, name, dtype, shape, geometry)
    return Step(record, EndEntry(Status.REMOVED), (), (0, 0), Action.REMOVE)


def inspect(frame: Frame) -> FrameInfo:
    """What a frame says, tensor by tensor; every section is checked, no payload is decoded.

    Raises FormatError with the number of the broken rule.
    """
    return _info(frame, parse(frame))


def verify(
    frame: Frame, *, backend: str = "auto", threads: int | None = None, key: bytes | None = None
) -> FrameInfo:
    """What a frame says, after all that can be checked without its base.

    That is every section, the root of the new state, and the payloads of tensors that need no
    base: an anchor is decoded completely. Holds one such tensor in memory at a time. With a key
    the tag of the frame is checked first.
    Raises FormatError with the number of the broken rule.
    """
    parsed = parse(frame, backend, key)
    check_new_root(parsed)
    codec = select(backend)
    for step in unplanned(parsed):
        if step.record.kind in (Kind.ADDED, Kind.REPLACED):
            place = codec.kinds[0]
            write_blocks([(new_slot(step, place), step)], codec, num_threads(threads))
    return _info(frame, parsed)


def _info(frame: Frame, parsed: ParsedFrame) -> FrameInfo:
    authentication = authentication_of(memoryview(frame).cast("B"))
    return replace(frame_info(with_modes(parsed)), authentication=authentication)


def _parser_for(base: object, backend: str) -> str:
    return base.backend.name if isinstance(base, State) else backend


def _receiver(
    base: MutableMapping[str, Any] | State, backend: str, threads: int | None
) -> LiveReceiver:
    if isinstance(base, State):
        return LiveReceiver(base)
    state = State(backend=backend, threads=threads)
    state.owns_memory, state.mapping = False, base
    return LiveReceiver(state, gather(base))


def _untie(state: State, parsed: ParsedFrame) -> None:
    """Own memory for names that are tied in a state of ours, and differ in the new state."""
    finals = {name: digest for name, _, _, digest in parsed.new_entries()}
    kept: dict[int, Digest] = {}
    for record in parsed.tensors:
        if record.kind in (Kind.DELTA, Kind.ADDED) and record.name in state.slots:
            final = finals[record.name]
            if kept.setdefault(id(state.slots[record.name]), final) != final:
                state.untie(record.name)


def _execute(
    parsed: ParsedFrame, state: State, steps: list[Step], executor: Executor
) -> ApplyReport:
    known = set(state.slots)
    executor.run()
    if state.root != parsed.end.new_root:
        state.is_consistent = False
        raise ChecksumError(
            "the root of the new state is not the one of the frame: the base is now inconsistent; "
            "restore it from an anchor (gymfast.delta.restore)",
            _ROOT_MISMATCH,
        )
    state.is_consistent = True
    return report_of(parsed, steps, known, executor.num_changed)


def report_of(
    parsed: ParsedFrame, steps: list[Step], known: set[str], num_changed: int
) -> ApplyReport:
    """The report of steps that were carried out; known are the names that were there before."""
    made = [s.name for s in steps if s.action in (Action.BUILD, Action.TIE)]
    return ApplyReport(
        base_root=parsed.end.base_root,
        new_root=parsed.end.new_root,
        num_changed=num_changed,
        num_tensors=sum(step.record.kind is not Kind.REMOVED for step in steps),
        skipped=tuple(s.name for s in steps if s.action is Action.SKIP),
        added=tuple(name for name in made if name not in known),
        removed=tuple(s.name for s in steps if s.action is Action.REMOVE),
        replaced=tuple(name for name in made if name in known),
    )
