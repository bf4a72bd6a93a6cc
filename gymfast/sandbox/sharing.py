"""How classes share a pool that is too small for all of them, and how a pool comes to its targets.

Fair and deterministic: room is dealt one sandbox to each class in turn until it is used up or a
class has what it wants. A class that has more than its share drains: its sandboxes end when they
are released, so that no class waits for ever behind one whose work does not end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gymfast.sandbox.policy import (
    Abort,
    Action,
    Cancel,
    ClassView,
    Create,
    Decision,
    Drain,
    Memory,
    Terminate,
    View,
)

_SHORT: Memory = (1,)
"""Remembered while a class has less than it wants: then all classes have to be looked at."""


def towards(
    view: View,
    memory: Memory,
    wanted: Callable[[int, ClassView], int],
    *,
    most: int,
    max_size: int,
    floors: Callable[[int], int] | None = None,
    aborts: bool = False,
) -> tuple[Decision, Memory]:
    """Creations and ends that bring each class to what it wants, or to its share of max_size.

    `most` is at least what all want together. Only classes that changed are looked at, unless
    max_size binds or did so at the call before. `floors` are kept whatever others want.
    """
    looked: Iterable[int] = view.changed
    is_tight = most > max_size
    if is_tight or memory:
        looked = range(len(view.classes))
    targets = {i: wanted(i, view.classes[i]) for i in looked}
    is_bound = is_tight and sum(targets.values()) > max_size
    if is_bound:
        kept = [0 if floors is None else min(floors(i), t) for i, t in targets.items()]
        more = [t - k for t, k in zip(targets.values(), kept, strict=True)]
        dealt = shares(more, max_size - sum(kept), view.classes, kept)
        targets = {i: k + d for i, (k, d) in enumerate(zip(kept, dealt, strict=True))}
    actions: list[Action] = []
    room, short = max_size - view.alive, []
    for i, target in targets.items():
        one = view.classes[i]
        over = one.alive - target
        if over < 0:
            short.append((one.oldest_ticket, i, -over))
        ends = _ends(i, one, max(over, 0), drains=is_bound, aborts=aborts)
        room += sum(a.count for a in ends if not isinstance(a, Drain))
        actions += ends
    is_short = is_bound
    for _, i, missing in sorted(short):
        count = min(missing, room)
        is_short |= count < missing
        if count > 0:
            actions.append(Create(i, count))
            room -= count
    return Decision(tuple(actions)), _SHORT if is_short else ()


def _ends(
    i: int, one: ClassView, over: int, *, drains: bool, aborts: bool
) -> list[Cancel | Abort | Terminate | Drain]:
    """What a class gives up: what waits at limits first, then what is idle."""
    found: list[Cancel | Abort | Terminate | Drain] = []
    cancelled = min(over, one.pending)
    ended = min(over - cancelled, one.idle)
    aborted = min(over - cancelled - ended, one.starting) if aborts else 0
    if cancelled:
        found.append(Cancel(i, cancelled))
    if ended:
        found.append(Terminate(i, ended))
    if aborted:
        found.append(Abort(i, aborted))
    drained = min(over - cancelled - ended - aborted, one.busy) if drains else 0
    if drained != one.draining:
        found.append(Drain(i, drained))
    return found


def shares(
    wanted: Sequence[int], room: int, classes: Sequence[ClassView], kept: Sequence[int]
) -> list[int]:
    """The room, dealt in turn until nobody wants more; `kept` is what each has besides.

    What is left of the last turn goes to classes that have more than the full turns already, so
    that nothing moves without need, then to those whose rollouts wait longest. If there is not
    one for each class, those whose rollouts wait longest come first.
    """
    left, num = room, len(wanted)
    level = max(wanted, default=0)
    for one in sorted(wanted):
        if one * num > left:
            level, left = divmod(left, num)
            break
        left, num = left - one, num - 1
    found = [min(one, level) for one in wanted]
    hungry = [i for i, one in enumerate(wanted) if one > level]
    hungry.sort(
        key=lambda i: (
            level > 0 and classes[i].alive - kept[i] <= level,
            classes[i].oldest_ticket,
            i,
        )
    )
    for i in hungry[:left]:
        found[i] += 1
    return found


def by_ticket(classes: Sequence[ClassView]) -> list[int]:
    """Classes by how long their rollouts wait; those without a queue last, by number."""
    return sorted(range(len(classes)), key=lambda i: classes[i].oldest_ticket)


def even(total: int, parts: int, i: int) -> int:
    """Part i of a total in equal parts; the first ones get what is left."""
    return total // parts + (i < total % parts)
