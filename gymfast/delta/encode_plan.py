"""What a frame will say of each tensor, decided before its first byte is written."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

from gymfast.delta.frame import Kind
from gymfast.delta.geometry import Geometry
from gymfast.delta.memory import CPU, CUDA, PINNED, kind_of
from gymfast.delta.state import State
from gymfast.delta.tensors import (
    Identity,
    Weights,
    check_name,
    identity,
    place_of_value,
    spec_of,
)

MAX_DIMS = 32


@dataclass(frozen=True)
class Entry:
    """One tensor of the frame to be written; value is what the caller passed, None if removed.

    `memory` tells which values share their bytes, as gymfast.delta.tensors.identity does; `place`
    is where they lie.
    """

    kind: Kind
    name: str
    dtype: str
    shape: tuple[int, ...]
    geometry: Geometry
    value: Any = field(default=None, repr=False)
    target: str = ""
    memory: Identity | None = field(default=None, repr=False)
    place: str = CPU


def plan_frame(state: State, new: Weights) -> list[Entry]:
    """What the frame says of each tensor: those of new in order, then those removed.

    Raises TypeError and ValueError for weights that a frame cannot carry.
    """
    items = list(new.items())  # alive together, so that equal addresses mean equal memory
    if not items:
        raise ValueError("the new weights are empty: a version without tensors is refused")
    first: dict[Identity, str] = {}
    entries = []
    for name, value in items:
        key = identity(value)
        target = first.setdefault(key, name) if key else name
        target = "" if target == name else target
        entries.append(_entry(state, check_name(name), value, target, key))
    names = {entry.name for entry in entries}
    removed = [name for name in state.slots if name not in names]
    for name in removed:
        slot = state.slots[name]
        entries.append(Entry(Kind.REMOVED, name, *slot.spec, slot.geometry))
    return entries


def _entry(state: State, name: str, value: Any, target: str, memory: Identity | None) -> Entry:
    dtype, shape = spec_of(value, name)
    if len(shape) > MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {len(shape)} dims, expected at most {MAX_DIMS}")
    slot = state.slots.get(name)
    if slot is not None and slot.spec == (dtype, shape):
        kind, geometry = Kind.DELTA, slot.geometry
    else:
        kind = Kind.ADDED if slot is None else Kind.REPLACED
        geometry = state.plan(dtype, shape)
    place = place_of_value(value)
    if place == PINNED:  # a tensor of a pinned state, which the CPU can read as it is
        value, place = value.on_host(), CPU
    if slot is not None and kind is Kind.DELTA and not target:
        _require_reachable(name, slot.tensor.place, place)
    return Entry(
        Kind.ALIAS if target else kind, name, dtype, shape, geometry, value, target, memory, place
    )


def _require_reachable(name: str, base: str, new: str) -> None:
    if base == new or (base == PINNED and kind_of(new) == CUDA):
        return
    raise ValueError(
        f"new tensor {name!r} is in {new} memory, the state holds it in {base} memory: pass the "
        "new weights where the old ones were, or make the state from weights on that device "
        "(State.copy_of; snapshot='pinned' keeps it in CPU memory that the device reaches)"
    )


def refuse_shared(state: State, entries: list[Entry]) -> None:
    """ValueError if new weights lie in the memory of the state, whose update would change them."""
    tensors = {id(s): (n, s.tensor) for n, s in state.slots.items() if s.tensor.num_bytes}
    ranges = sorted((t.address, t.address + t.num_bytes, n) for n, t in tensors.values())
    for entry in entries:
        key = entry.memory
        if key is None or not isinstance(key[0], int):
            continue
        start, end = key[0], key[0] + max(1, entry.geometry.num_bytes)
        at = bisect.bisect_left(ranges, (end,)) - 1
        if at >= 0 and ranges[at][1] > start:
            raise ValueError(
                f"new tensor {entry.name!r} shares memory with {ranges[at][2]!r} of the state, so "
                "no change could be seen: make the state with State.copy_of"
            )
