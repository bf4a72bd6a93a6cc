"""Every interleaving of two publishers and two readers, with crashes and lost or late replies.

The model has the store (log, objects, creates still under way) and, per party, what it remembers.
What a publisher does next comes from the tables of gymfast.sync.commit, what follows what from
gymfast.sync.chain: the code that runs in production. Deltas carry the state they were really made
against, so that a wrong base shows as a wrong state at a reader, with no digest to catch it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from sync.logs import RUN, SCHEMA, frame_ref, hex_of, nonce_of

from gymfast.errors import ChainError
from gymfast.sync.chain import EMPTY_ROOT, Tip, enter, follow, is_full
from gymfast.sync.commit import CLAIM, COMMIT, Answer, Step, classify
from gymfast.sync.manifest import EpochRecord, LogRecord, VersionRecord, digest_of, encode


class Made(NamedTuple):
    """A record, the state its delta was really made against, and the claim it was made under."""

    record: LogRecord
    digest: str
    made_on: str = ""
    claim: int = 0


class Writer(NamedTuple):
    """What a publisher process remembers; step None: idle, claimed if its tip is of its epoch."""

    step: Step | None = None
    is_claiming: bool = True
    tip: Tip = Tip()
    epoch: int = 0
    snapshot: str | None = None
    attempt: Made | None = None
    num_publishes: int = 0
    num_starts: int = 0
    claim: int = 0
    earlier: tuple[str, ...] = ()


class Reader(NamedTuple):
    """What a reader holds: content is a state, or "torn"; `applying` is written at the moment."""

    tip: Tip = Tip()
    content: str = ""
    served: int = -1
    applying: Made | None = None


class World(NamedTuple):
    """One state of everything."""

    log: tuple[Made, ...] = ()
    objects: frozenset[str] = frozenset()
    late: tuple[Made, ...] = ()
    writers: tuple[Writer, ...] = (Writer(), Writer())
    readers: tuple[Reader, ...] = (Reader(), Reader())
    faults_left: int = 2
    crashes_left: int = 1
    num_claims: int = 0


class ViolationError(AssertionError):
    """An invariant that does not hold, with the steps that lead there."""


@dataclass(frozen=True)
class Rules:
    """The protocol; a broken variant changes one of them.

    `trusts_puts`: the store promises to show what was put, so nobody looks for the objects.
    """

    commit: dict[tuple[Step, Answer], Step] = field(default_factory=lambda: COMMIT)
    first_step: Step = Step.PUT
    promotes_early: bool = False
    checks_base: bool = True
    claims_by_record: bool = True
    trusts_puts: bool = False
    max_publishes: int = 2
    max_starts: int = 2


@cache
def _epoch_record(tip: Tip, nonce: str) -> Made:
    record = EpochRecord(1, RUN, tip.seq + 1, tip.epoch + 1, nonce, tip.record, 0, nonce)
    return Made(record, digest_of(encode(record)))


@cache
def _version_record(writer: Writer, nonce: str, root: str, checks_base: bool) -> Made:
    tip, snapshot = writer.tip, writer.snapshot or ""
    is_delta = tip.version is not None and (snapshot == tip.root or not checks_base)
    is_delta = is_delta and writer.snapshot is not None
    version = 0 if tip.version is None else tip.version + 1
    record = VersionRecord(
        1, RUN, tip.seq + 1, writer.epoch, nonce, tip.record, 0, version,
        "delta" if is_delta else "anchor", version - 1 if is_delta else -1,
        tip.root if is_delta else EMPTY_ROOT, root, SCHEMA, 1, 1, 1, frame_ref(nonce),
    )  # fmt: skip
    return Made(record, digest_of(encode(record)), snapshot, writer.claim)


@cache
def _tip_after(tip: Tip, made: Made) -> Tip:
    return follow(tip, made.record, made.digest, RUN).tip


def explore(rules: Rules | None = None, start: World | None = None, max_states: int = 10**7) -> int:
    """Number of states reached; ViolationError with the path if one breaks an invariant."""
    rules = rules or Rules()
    first = start or World()
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        try:
            moves = list(_moves(world, rules))
            for label, after in moves:
                if after not in came_from:
                    came_from[after] = (world, label)
                    check(after)
                    queue.append(after)
        except (ViolationError, ChainError) as error:
            raise ViolationError(f"{error}\n{_path(came_from, world)}") from error
        assert len(came_from) <= max_states, "the model outgrew its bounds"
    return len(came_from)


def _path(came_from: dict[World, tuple[World, str] | None], world: World) -> str:
    labels: list[str] = []
    step = came_from[world]
    while step is not None:
        labels.append(step[1])
        step = came_from[step[0]]
    return "\n".join(reversed(labels))


def check(world: World) -> None:
    """Raises ViolationError if the log or a reader is wrong."""
    tip = Tip()
    roots: dict[int, str] = {}
    for made in world.log:
        record, before = made.record, tip
        try:
            tip = _tip_after(tip, made)
        except ChainError as error:
            raise ViolationError(f"the log is no chain: {error}") from error
        if isinstance(record, VersionRecord):
            if record.nonce not in world.objects:
                raise ViolationError(f"version {record.version} is visible without its objects")
            if record.kind == "delta" and made.made_on != before.root:
                raise ViolationError(
                    f"version {record.version} was not made on the last committed one"
                )
            roots[record.version] = record.root
    for reader in world.readers:
        is_at_rest = reader.served >= 0 and not reader.applying and reader.content != "torn"
        if is_at_rest and reader.content != roots[reader.served]:
            raise ViolationError(f"a reader serves wrong bytes as version {reader.served}")


Moves = Iterator[tuple[str, World]]


def _moves(world: World, rules: Rules) -> Moves:
    for i, writer in enumerate(world.writers):
        for label, after in _writer_moves(world, i, writer, rules):
            yield f"writer {i}: {label}", after
    for i, reader in enumerate(world.readers):
        for label, after in _reader_moves(world, i, reader):
            yield f"reader {i}: {label}", after
    for writer in world.writers:
        yield from _fenced_objects_go(world, writer)
    for made in world.late:
        rest = tuple(other for other in world.late if other is not made)
        yield "a late create arrives", _created(world._replace(late=rest), made)[0]


def _fenced_objects_go(world: World, writer: Writer) -> Moves:
    """Retention of a newer publisher removes what no record of an older epoch names."""
    made = writer.attempt
    if made is None or made in world.log or made.record.nonce not in world.objects:
        return
    if made.claim < world.num_claims:
        left = world.objects - {made.record.nonce}
        yield "objects of a fenced attempt are removed", world._replace(objects=left)


def _created(world: World, made: Made) -> tuple[World, bool]:
    """The store after a create-only write, and whether the record is new."""
    if made.record.seq != len(world.log) + 1:
        return world, False
    num_claims = world.num_claims
    if isinstance(made.record, EpochRecord):
        num_claims += 1
    elif made.claim != num_claims:
        raise ViolationError("a fenced publisher committed a version")
    return world._replace(log=(*world.log, made), num_claims=num_claims), True


def _with_writer(world: World, i: int, writer: Writer) -> World:
    writers = tuple(writer if j == i else w for j, w in enumerate(world.writers))
    return world._replace(writers=writers)


def _writer_moves(world: World, i: int, writer: Writer, rules: Rules) -> Moves:
    if writer.step is Step.FENCED:
        return
    if world.crashes_left and writer.num_starts and writer.num_starts < rules.max_starts:
        crashed = Writer(num_publishes=writer.num_publishes, num_starts=writer.num_starts)
        yield "crash", _with_writer(world, i, crashed)._replace(crashes_left=world.crashes_left - 1)
    if writer.step is None:
        if writer.is_claiming:
            if writer.num_starts < rules.max_starts:
                yield from _start(world, i, writer, rules)
        elif writer.num_publishes < rules.max_publishes:
            yield from _begin_publish(world, i, writer, rules)
        return
    for label, answer, after in _answers(world, writer, rules):
        step = (CLAIM if writer.is_claiming else rules.commit)[writer.step, answer]
        entered = _settle(_enter_step(after, i, writer, step, rules), i, rules)
        yield f"{writer.step.name} {label}", entered


def _settle(world: World, i: int, rules: Rules) -> World:
    """Takes the steps that have one outcome, whatever the others do meanwhile, at once."""
    while True:
        writer = world.writers[i]
        if writer.step not in (Step.CONFIRM, Step.READ_BACK, Step.ADVANCE):
            return world
        answers = list(_answers(world, writer, rules))
        if len(answers) != 1:
            return world
        step = (CLAIM if writer.is_claiming else rules.commit)[writer.step, answers[0][1]]
        world = _enter_step(answers[0][2], i, writer, step, rules)


def _start(world: World, i: int, writer: Writer, rules: Rules) -> Moves:
    """Reads the log, up to any record: visibility may lag."""
    for length in range(len(world.log) + 1):
        if length < len(world.log) and not world.faults_left:
            continue
        tip = Tip()
        for made in world.log[:length]:
            tip = _tip_after(tip, made)
        lag = int(length < len(world.log))
        left = world._replace(faults_left=world.faults_left - lag)
        started = writer._replace(tip=tip, num_starts=writer.num_starts + 1)
        if rules.claims_by_record or not world.log:
            attempt = _epoch_record(tip, nonce_of(f"claim {i} {started.num_starts}"))
            after = started._replace(step=Step.CREATE, attempt=attempt)
        else:
            claim = world.num_claims + 1
            after = started._replace(is_claiming=False, epoch=tip.epoch, claim=claim)
            left = left._replace(num_claims=claim)
        yield f"start at record {length}", _with_writer(left, i, after)


def _begin_publish(world: World, i: int, writer: Writer, rules: Rules) -> Moves:
    number = writer.num_publishes + 1
    root = hex_of(f"weights {i} {number}")
    nonce = nonce_of(f"publish {i} {number}")
    attempt = _version_record(writer, nonce, root, rules.checks_base)
    snapshot = root if rules.promotes_early else writer.snapshot
    begun = writer._replace(
        step=rules.first_step,
        attempt=attempt,
        num_publishes=number,
        snapshot=snapshot,
        earlier=(*writer.earlier, nonce),
    )
    yield f"publish {number}", _with_writer(world, i, begun)


def _answers(world: World, writer: Writer, rules: Rules) -> Iterator[tuple[str, Answer, World]]:
    """What the store may answer to the next step, and the world after it."""
    made = writer.attempt
    assert made is not None
    faulty = world._replace(faults_left=world.faults_left - 1)
    if writer.step is Step.PUT:
        yield "ok", Answer.OK, world._replace(objects=world.objects | {made.record.nonce})
        if world.faults_left:
            yield "failed", Answer.ERROR, faulty
    elif writer.step is Step.CONFIRM:
        if rules.trusts_puts or made.record.nonce in world.objects:
            yield "answered", Answer.OK, world
        else:
            yield from _read_back(world, writer, made)
    elif writer.step is Step.CREATE:
        after, is_new = _created(world, made)
        yield "answered", Answer.OK if is_new else Answer.EXISTS, after
        if world.faults_left:
            lost = after._replace(faults_left=faulty.faults_left)
            if is_new:
                yield "done, reply lost", Answer.ERROR, lost
            yield "not done", Answer.ERROR, faulty
            if is_new:
                yield "under way", Answer.ERROR, faulty._replace(late=(*faulty.late, made))
    elif writer.step is Step.READ_BACK:
        yield from _read_back(world, writer, made)
    else:
        yield "ok", Answer.OK, world  # ADVANCE


def _read_back(world: World, writer: Writer, made: Made) -> Iterator[tuple[str, Answer, World]]:
    if made.record.seq <= len(world.log):
        found = world.log[made.record.seq - 1]
        yield "found", classify(found.record, made.record.nonce, writer.earlier), world
    else:
        yield "absent", Answer.ABSENT, world
        yield "absent, no time left", Answer.GIVE_UP, world


def _enter_step(world: World, i: int, writer: Writer, step: Step, rules: Rules) -> World:
    """The world once the writer has taken note of its next step."""
    made = writer.attempt
    assert made is not None
    after = writer._replace(step=step)
    if step is Step.ADVANCE or step is Step.ADOPT:
        tip = _tip_after(writer.tip, world.log[made.record.seq - 1])
        after = after._replace(tip=tip, earlier=())
        if step is Step.ADVANCE:
            attempt = _epoch_record(tip, made.record.nonce)
            after = after._replace(attempt=attempt)
        else:
            after = after._replace(step=None, attempt=None)
    elif step is Step.DONE:
        after = _done(world, writer, made)
    elif step is Step.FAILED:
        after = (
            Writer(num_starts=rules.max_starts)
            if writer.is_claiming
            else after._replace(step=None, attempt=None)
        )
    return _with_writer(world, i, after)


def _done(world: World, writer: Writer, made: Made) -> Writer:
    if made not in world.log:
        raise ViolationError("a publisher was told of a commit that the log does not hold")
    tip = _tip_after(writer.tip, made)
    after = writer._replace(step=None, attempt=None, tip=tip, earlier=())
    if writer.is_claiming:
        epoch = made.record.epoch
        return after._replace(is_claiming=False, epoch=epoch, claim=epoch)
    assert isinstance(made.record, VersionRecord)
    return after._replace(snapshot=made.record.root)


def _with_reader(world: World, i: int, reader: Reader) -> World:
    """The readers sorted: they are interchangeable."""
    readers = [reader if j == i else r for j, r in enumerate(world.readers)]
    readers.sort(key=lambda r: (r.tip.seq, r.content, r.served, r.applying is None))
    return world._replace(readers=tuple(readers))


def _reader_moves(world: World, i: int, reader: Reader) -> Moves:
    """Follows the log record by record; a crash between two writes leaves torn content."""
    if reader.applying is not None:
        yield "applied", _with_reader(world, i, _applied(reader, reader.applying))
        if world.crashes_left:
            torn = reader._replace(content="torn", applying=None)
            crashed = world._replace(crashes_left=world.crashes_left - 1)
            yield "crash while applying", _with_reader(crashed, i, torn)
        return
    made, tip = _next_for(world, reader)
    if made is not None:
        begun = reader._replace(applying=made, tip=tip)
        yield f"apply version {made.record.version}", _with_reader(world, i, begun)


def _next_for(world: World, reader: Reader) -> tuple[Made | None, Tip]:
    if reader.content in ("", "torn"):
        full = [m for m in world.log if is_full(m.record)]
        if not full or full[-1].record.seq < reader.tip.seq:
            return None, reader.tip
        return full[-1], enter(full[-1].record, full[-1].digest, RUN).tip
    tip = reader.tip
    for made in world.log[tip.seq :]:
        tip = _tip_after(tip, made)
        if isinstance(made.record, VersionRecord):
            return made, tip
    return None, tip


def _applied(reader: Reader, made: Made) -> Reader:
    record = made.record
    assert isinstance(record, VersionRecord)
    is_right = record.kind == "anchor" or reader.content == made.made_on
    content = record.root if is_right else "garbage"
    if record.version < reader.served:
        raise ViolationError("a reader went back to an older version")
    return reader._replace(content=content, served=record.version, applying=None)


Variant = Callable[[], Rules]


def _without_read_back() -> Rules:
    """Takes "exists" for "mine"."""
    return Rules(commit={**COMMIT, (Step.CREATE, Answer.EXISTS): Step.DONE})


def _record_first() -> Rules:
    """Creates the record, then puts the objects."""
    commit = {
        **COMMIT,
        (Step.CREATE, Answer.OK): Step.PUT,
        (Step.PUT, Answer.OK): Step.DONE,
    }
    return Rules(commit=commit, first_step=Step.CREATE)


def _promotes_early() -> Rules:
    """Diffs against what was written, not against what was committed (R29)."""
    return Rules(promotes_early=True, checks_base=False)


def _claims_without_record() -> Rules:
    """Reads the newest epoch instead of claiming one in the log; goes on after a conflict."""
    commit = {**COMMIT, (Step.READ_BACK, Answer.OTHER): Step.ADOPT}
    return Rules(commit=commit, claims_by_record=False)


def _keeps_snapshot_of_a_lost_attempt() -> Rules:
    """Takes an earlier attempt that was committed late for this one."""
    return Rules(commit={**COMMIT, (Step.READ_BACK, Answer.EARLIER): Step.DONE})


BROKEN: dict[str, Variant] = {
    "takes 'exists' for success": _without_read_back,
    "creates the record before the objects": _record_first,
    "promotes the snapshot before the commit": _promotes_early,
    "does not claim its epoch in the log": _claims_without_record,
    "takes an earlier attempt for this one": _keeps_snapshot_of_a_lost_attempt,
}
