"""What a frame will do to each tensor of a receiver, decided and checked before the first write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from gymfast.delta.backends import BlockParams
from gymfast.delta.frame import BlocksRecord, EndEntry, Kind, ParsedFrame, TensorRecord, root_of
from gymfast.delta.geometry import Geometry
from gymfast.delta.records import Digest
from gymfast.errors import ChainError, ChecksumError, CoverageError, FormatError

Spec = tuple[str, tuple[int, ...]]
_BASE_MISMATCH = 60
_COVERAGE = 62
_ROOT_MISMATCH = 63


class Action(Enum):
    """What becomes of one tensor."""

    KEEP = "unchanged in this frame"
    SKIP = "already in the new state"
    PATCH = "changed in place"
    BUILD = "made anew"
    TIE = "becomes a second name of its target"
    COPY = "gets the bytes of its target"
    REMOVE = "removed"


@dataclass(frozen=True)
class Step:
    """One tensor of a frame and what to do with it."""

    record: TensorRecord
    entry: EndEntry
    blocks: tuple[BlocksRecord, ...]
    final: Digest
    action: Action

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.record.name

    @property
    def spec(self) -> Spec:
        """Dtype and shape in the new state."""
        return self.record.dtype, self.record.shape

    @property
    def params(self) -> BlockParams:
        """What a back end needs to decode the blocks (the profile plays no part in that)."""
        record = self.record
        has_base = record.kind is Kind.DELTA
        return BlockParams(0, record.class_shift, record.class_base, has_base)


class Receiver(Protocol):
    """What is asked of whoever holds the tensors: live memory or a checkpoint."""

    owns_memory: bool  # nobody else knows its addresses, so that names may become tied

    def specs(self) -> dict[str, Spec]:
        """Dtype and shape of all tensors, by name."""

    def digest(self, name: str, geometry: Geometry | None) -> Digest:
        """Digest of a tensor; the geometry (if given) is the one its blocks will have."""

    def memory(self, name: str) -> object:
        """Equal for names that share their memory, and only for those."""


def unplanned(frame: ParsedFrame) -> list[Step]:
    """A step for each tensor of a frame in its order, all of them with Action.KEEP."""
    blocks: dict[int, list[BlocksRecord]] = {}
    for section in frame.blocks:
        blocks.setdefault(section.tensor, []).append(section)
    finals = {name: digest for name, _, _, digest in frame.new_entries()}
    return [
        Step(record, entry, tuple(blocks.get(i, ())), finals.get(record.name, (0, 0)), Action.KEEP)
        for i, (record, entry) in enumerate(zip(frame.tensors, frame.end.entries, strict=True))
    ]


def plan_steps(frame: ParsedFrame, receiver: Receiver) -> list[Step]:
    """The steps of a frame in its order; reads every tensor of the receiver, writes none.

    Raises CoverageError for names that do not fit, FormatError and ChecksumError if the base is
    not the one the frame was made for.
    """
    check_new_root(frame)
    specs = receiver.specs()
    check_coverage(frame, specs)
    return _Planner(frame, receiver, specs).steps()


def plan_restore(frame: ParsedFrame, receiver: Receiver, *, allow_new_names: bool) -> list[Step]:
    """The steps that make a receiver, whatever its bytes, hold the state of an anchor.

    Raises ChainError if the frame is no anchor, CoverageError if names differ and may not.
    """
    if any(record.kind not in (Kind.ADDED, Kind.ALIAS) for record in frame.tensors):
        raise ChainError(
            f"this frame is a delta against {frame.end.base_root.hex()[:16]}…, expected an anchor: "
            "nothing was written; pull the newest anchor"
        )
    check_new_root(frame)
    specs = receiver.specs()
    if not allow_new_names:
        _check_names({record.name for record in frame.tensors}, specs)

    def action(step: Step) -> Action:
        is_same = specs.get(step.name) == step.spec
        if step.record.kind is Kind.ADDED:
            return Action.PATCH if is_same else Action.BUILD
        if is_tied(step.record, specs, receiver):
            return Action.KEEP
        return Action.COPY if is_same and not receiver.owns_memory else Action.TIE

    steps = [replace(step, action=action(step)) for step in unplanned(frame)]
    return share(follow(steps), specs, receiver)


def check_new_root(frame: ParsedFrame) -> None:
    """Raises FormatError 63 if the roots of END are not those that its digests give (R30)."""
    found = root_of(frame.new_entries())
    if found != frame.end.new_root:
        raise FormatError(
            f"new_root {frame.end.new_root.hex()[:16]}…, the digests give {found.hex()[:16]}…: "
            "the writer of this frame is broken; publish again",
            _ROOT_MISMATCH,
        )


def check_coverage(frame: ParsedFrame, specs: dict[str, Spec]) -> None:
    """Raises CoverageError if the frame changes a tensor that is not there, or misses one (R29)."""
    named = {record.name for record in frame.tensors}
    if all(record.kind is Kind.REMOVED for record in frame.tensors):
        raise CoverageError(
            f"the frame leaves no tensor, this side holds {len(specs)}: a version without tensors "
            "is refused; publish the full weights",
            _COVERAGE,
        )
    needed = {r.name for r in frame.tensors if r.kind in (Kind.DELTA, Kind.REPLACED)}
    _check_names(needed, specs, optional=named - needed)


def _check_names(
    needed: set[str], specs: dict[str, Spec], optional: frozenset[str] | set[str] = frozenset()
) -> None:
    missing = sorted(needed - specs.keys())
    extra = sorted(specs.keys() - needed - optional)
    if not missing and not extra:
        return
    problems = []
    if missing:
        problems.append(
            f"{len(missing)} tensors of the frame are not here, first {missing[0]!r}"
            f"{_nearest(missing[0], extra or specs)}"
        )
    if extra:
        problems.append(
            f"{len(extra)} of the {len(specs)} tensors here are not in the frame, first "
            f"{extra[0]!r}{_nearest(extra[0], missing or (needed | optional))}"
        )
    raise CoverageError(
        "; ".join(problems) + "; nothing was written; rename the tensors of one side, or pass only "
        "the part of the mapping that the publisher sends",
        _COVERAGE,
    )


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """The three most similar names, and the prefix that one side lacks if that is all."""
    names = list(candidates)
    if not names:
        return ""
    same_end = [n for n in names if n.endswith("." + name) or name.endswith("." + n)]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    text = f" (nearest: {', '.join(map(repr, dict.fromkeys(same_end[:1] + close)))}"
    if same_end:
        prefix = max(name, same_end[0], key=len).removesuffix(min(name, same_end[0], key=len))
        text += f"; they differ by the prefix {prefix!r}"
    return text + ")"


class _Planner:
    def __init__(self, frame: ParsedFrame, receiver: Receiver, specs: dict[str, Spec]) -> None:
        self._frame = frame
        self._receiver = receiver
        self._specs = specs
        self._digests: dict[str, Digest] = {}

    def steps(self) -> list[Step]:
        """All steps; shared memory and roots are checked last, once all digests are known."""
        steps = [replace(step, action=self._action(step)) for step in unplanned(self._frame)]
        steps = share(follow(steps), self._specs, self._receiver)
        if not any(step.action is Action.SKIP for step in steps):
            self._check_base_root()
        return steps

    def _action(self, step: Step) -> Action:
        name, record, entry, stated = step.name, step.record, step.entry, step.spec
        here = self._specs.get(name)
        if here is None:
            return {
                Kind.ADDED: Action.BUILD,
                Kind.REMOVED: Action.SKIP,
                Kind.ALIAS: Action.TIE,
            }[record.kind]
        if here != stated and record.kind in (Kind.DELTA, Kind.REMOVED):
            raise FormatError(
                f"tensor {name!r} is {_text(here)} here, the frame was made for {_text(stated)}: "
                "nothing was written; load an anchor, or the checkpoint that this run started from",
                _BASE_MISMATCH,
            )
        geometry = record.geometry if here == stated else None
        digest = self._digests[name] = self._receiver.digest(name, geometry)
        is_new = here == stated and digest == step.final
        if record.kind is Kind.ALIAS:
            if is_tied(record, self._specs, self._receiver):
                return Action.KEEP
            if here != stated or self._receiver.owns_memory:
                return Action.TIE
            return Action.SKIP if is_new else Action.COPY
        if record.kind is Kind.ADDED and not is_new:
            raise CoverageError(
                f"tensor {name!r} is here already ({_text(here)}, other bytes), the frame adds it: "
                "nothing was written; this is another base than the frame was made for; use "
                "gymfast.delta.restore to load an anchor over it",
                _COVERAGE,
            )
        if record.kind is not Kind.REMOVED and is_new:
            return Action.KEEP if entry.new_digest is None else Action.SKIP
        if digest != entry.base_digest:
            raise ChecksumError(_wrong_base(name, digest, entry), _BASE_MISMATCH)
        return {
            Kind.DELTA: Action.PATCH,
            Kind.REPLACED: Action.BUILD,
            Kind.REMOVED: Action.REMOVE,
        }[record.kind]

    def _check_base_root(self) -> None:
        digests = self._digests
        found = root_of((name, *self._specs[name], digests[name]) for name in digests)
        if found not in (self._frame.end.base_root, self._frame.end.new_root):
            raise ChecksumError(
                f"the tensors here have root {found.hex()[:16]}…, the frame was made for "
                f"{self._frame.end.base_root.hex()[:16]}…: nothing was written; pull the versions "
                "in between, or an anchor",
                _ROOT_MISMATCH,
            )


def is_tied(record: TensorRecord, specs: dict[str, Spec], receiver: Receiver) -> bool:
    """Whether an alias has the memory of its target at the receiver."""
    name, target = record.name, record.target
    return target in specs and receiver.memory(name) == receiver.memory(target)


def follow(steps: list[Step]) -> list[Step]:
    """The steps; names tied to a tensor that is made anew are to be tied to the new one."""
    built = {step.name for step in steps if step.action is Action.BUILD}
    return [
        replace(step, action=Action.TIE)
        if step.action is Action.KEEP and step.record.target in built
        else step
        for step in steps
    ]


def share(steps: list[Step], specs: dict[str, Spec], receiver: Receiver) -> list[Step]:
    """The steps; of the names that share their memory one is written.

    Raises CoverageError if such names would have to hold different bytes.
    """
    leaves = (Action.BUILD, Action.REMOVE, Action.TIE)
    groups: dict[object, list[Step]] = {}
    for step in steps:
        if step.name in specs and step.action not in leaves:
            groups.setdefault(receiver.memory(step.name), []).append(step)
    done: set[str] = set()
    for group in groups.values():
        _check_group(group)
        done.update(step.name for step in _but_one_writer(group))
    return [replace(step, action=Action.KEEP) if step.name in done else step for step in steps]


def _but_one_writer(group: list[Step]) -> Iterator[Step]:
    """The steps of a group that need not write because another one does."""
    patches = [step for step in group if step.action is Action.PATCH]
    writers = patches or [step for step in group if step.action is Action.COPY]
    for step in group:
        if step.action in (Action.PATCH, Action.COPY) and step is not writers[0]:
            yield step


def _check_group(group: list[Step]) -> None:
    first = group[0]
    for step in group[1:]:
        if (step.spec, step.final) != (first.spec, first.final):
            raise CoverageError(
                f"tensors {first.name!r} and {step.name!r} share their memory here, but have "
                "different bytes in the new state: nothing was written; give them separate memory",
                _COVERAGE,
            )


def _text(spec: Spec) -> str:
    return f"{spec[0]} {list(spec[1])}"


def _wrong_base(name: str, found: Digest, entry: EndEntry) -> str:
    expected = entry.base_digest or (0, 0)
    return (
        f"tensor {name!r} has digest {found[0]:016x}{found[1]:016x} here, the frame was made for "
        f"{expected[0]:016x}{expected[1]:016x}: nothing was written; pull the versions in between, "
        "or an anchor"
    )
