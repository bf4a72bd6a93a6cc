"""Deliberate bugs: each has to be caught, or the campaign proves nothing."""

from __future__ import annotations

import csv
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from unittest import mock

from gymfast.errors import ChainError, StoreError
from gymfast.sync import (
    cleaner,
    commit,
    committer,
    compactor,
    epoch,
    fetcher,
    fold_choice,
    fold_maker,
    installer,
    lease,
    log,
    objects,
    view,
)
from gymfast.sync.chain import enter, follow, is_full
from gymfast.sync.commit import Answer, Step
from gymfast.sync.manifest import FrameRef, StateRecord
from gymfast.sync.retention import Deletion, deletion
from gymfast.sync.snapshot import Snapshot
from tests.campaign.counts import ViolationError
from tests.campaign.history import Profile, play

FOLDS = frozenset({"folds"})
LONG_WAYS = (("anchor_every", 50), ("keep", 12))
MAX_SEEDS = 100
"""Histories of which one has to show a bug."""


@dataclass(frozen=True)
class Mutant:
    """A bug, how to make it, the invariants of which one has to break, and what it takes."""

    make: Callable[[], object]
    invariants: frozenset[str]
    features: frozenset[str] = frozenset()
    changes: tuple[tuple[str, object], ...] = ()

    def profile(self, seed: int) -> Profile:
        """A history of that number in which the bug can show."""
        return replace(Profile.drawn(seed), features=self.features, **dict(self.changes))


def _step(table: dict, where: tuple[Step, Answer], step: Step) -> object:
    return mock.patch.dict(table, {where: step})


def _no_rollback() -> object:
    """What was tried is taken for what was committed."""

    def rollback(self: Snapshot) -> None:
        if self._pending is not None:
            self.promote()

    return mock.patch.object(Snapshot, "rollback", rollback)


def _newest_full(records, keep: int) -> int:
    full = [r.seq for r in records if isinstance(r, StateRecord) and is_full(r)]
    return max(full, default=0)


def _with_epochs(records, *arguments, **options) -> Deletion:
    found = deletion(records, *arguments, **options)
    floor = arguments[1]
    return Deletion(tuple(sorted(seq for seq in records if seq < floor)), found.objects)


def _swallows(self: objects.FrameWriter, data: bytearray) -> list[objects.ObjectRef]:
    """A failed put counts as done."""
    import hashlib

    ref = objects.ObjectRef(hashlib.sha256(data).hexdigest(), len(data))
    try:
        self.store.put(self.keys.object(self.epoch, ref.digest), bytes(data))
    except StoreError:
        self.doomed.clear()
    return [ref]


def _without_key(blob: bytes, where: str, key: bytes | None = None):
    from gymfast.sync.manifest import parse_log_record

    return parse_log_record(blob, where)


def _owner(*arguments, is_owner: bool, **options) -> Deletion:
    return deletion(*arguments, is_owner=True, **options)


def _never_doomed(self: objects.FrameWriter) -> None:
    for key in self._made:
        try:
            self.store.delete(key)
        except StoreError:
            continue
    self._made.clear()
    self.refs.clear()


def _forgets_that_it_asked(self: committer.Committer, nonce: str) -> None:
    self._attempts.append(nonce)


def _claim_without_errors() -> object:
    table = {k: v for k, v in commit.CLAIM.items() if k != (Step.ADVANCE, Answer.ERROR)}
    return mock.patch.object(epoch, "CLAIM", table)


@contextmanager
def _contradicted() -> Iterator[None]:
    """Enters wherever it cannot follow."""

    def lenient(tip, record, digest, run):
        try:
            return follow(tip, record, digest, run)
        except ChainError:
            if not is_full(record):
                raise
            return enter(record, digest, run)

    with (
        mock.patch.object(view.View, "_check_continues", mock.Mock()),
        mock.patch.object(view, "follow", lenient),
        mock.patch.object(log, "follow", lenient),
    ):
        yield


def _fold_of_another_state(self: fold_maker.FoldMaker, base, head, file) -> int:
    """The base is not the one that the record names."""
    return _encode(self, None if base is None else replace(base, path=head.path), head, file)


def _puts_nothing(self: fold_maker.FoldMaker, span, file):
    """The record of a fold comes although the store refused its objects."""
    try:
        return _put_fold(self, span, file)
    except StoreError:
        file.seek(0)
        data = file.read()
        ref = objects.ObjectRef(hashlib.sha256(data).hexdigest(), len(data))
        writer = objects.FrameWriter(self._log.store, self._log.keys, 0, len(data))
        return writer, FrameRef(len(data), (ref,))


def _passed_by_version(found, finished, lowest: int, leased: int | None) -> frozenset:
    """One version too many counts as passed."""
    return frozenset(span for span in found if span.start <= lowest + 1)


def _takes_all_back(self: fold_maker.FoldMaker, fold, writer) -> None:
    """The loser of two compactors deletes what the winner's fold needs, too."""
    keys = self._log.keys.of(fold)
    for ref in writer.refs:
        with suppress(StoreError):
            self._log.store.delete(keys.object(0, ref.digest))


def _gives_up(_: fold_choice.FoldChoice, fold, what: str) -> None:
    """A fold that is gone is as bad as a version that is."""
    raise StoreError(what)


def _newest_first(self: objects.FrameReads):
    """What was asked for last comes first."""
    while self._tasks or self._waiting:
        if self._threads is None:
            task = self._tasks.popleft()
            yield task, task.read()
            continue
        self.start()
        task, future = self._waiting.pop()
        yield task, future.result()


def _takes_puts_for_done(self: objects.FrameWriter, room: int, more: int) -> None:
    """Objects count as stored once their puts were begun."""
    while self._waiting and sum(size for size, _ in self._waiting) + more > room:
        future = self._waiting.popleft()[1]
        with suppress(StoreError):
            self.refs.extend(future.result())


def _patch(owner: object, name: str, value: object) -> Callable[[], object]:
    return lambda: mock.patch.object(owner, name, value)


MUTANTS: dict[str, Mutant] = {
    "takes 'exists' for success": Mutant(
        lambda: _step(commit.COMMIT, (Step.CREATE, Answer.EXISTS), Step.DONE),
        frozenset({"I22", "I23", "I26"}),
        frozenset({"second"}),
    ),
    "goes on after a record of somebody else": Mutant(
        lambda: _step(commit.COMMIT, (Step.READ_BACK, Answer.OTHER), Step.ADOPT),
        frozenset({"I22", "I23"}),
        frozenset({"second"}),
    ),
    "takes an earlier attempt for this one": Mutant(
        lambda: _step(commit.COMMIT, (Step.READ_BACK, Answer.EARLIER), Step.DONE),
        frozenset({"I04", "I20", "I22"}),
        frozenset({"late", "lost", "refused", "cuts"}),
    ),
    "keeps what failed as the committed state": Mutant(
        _no_rollback, frozenset({"I04", "I33"}), frozenset({"refused"})
    ),
    "takes a failed put for done": Mutant(
        lambda: mock.patch.multiple(
            objects.FrameWriter, _put=_swallows, is_confirmed=mock.Mock(return_value=True)
        ),
        frozenset({"I20", "I26"}),
        frozenset({"full", "refused"}),
    ),
    "removes objects whose record may still appear": Mutant(
        _patch(committer.Committer, "note_attempt", _forgets_that_it_asked),
        frozenset({"I20", "I26"}),
        frozenset({"lost", "late", "cuts"}),
        (("is_harsh", True),),
    ),
    "puts objects where a delete is under way": Mutant(
        _patch(objects.FrameWriter, "discard", _never_doomed),
        frozenset({"I20", "I26", "I26 leases"}),
        frozenset({"late", "refused", "full"}),
    ),
    "deletes without reading the leases": Mutant(
        _patch(cleaner.Cleaner, "_leases", lambda _: iter(())),
        frozenset({"I26 leases"}),
        frozenset({"slow", "stops"}),
        (("keep", 1), ("anchor_every", 1)),
    ),
    "keeps no version but the newest full state": Mutant(
        _patch(cleaner, "floor_of", _newest_full),
        frozenset({"I26"}),
        changes=(("keep", 4), ("anchor_every", 1)),
    ),
    "deletes records of epochs": Mutant(
        _patch(cleaner, "deletion", _with_epochs), frozenset({"I26"}), frozenset({"kills"})
    ),
    "lets outsiders delete what is under way": Mutant(
        _patch(cleaner, "deletion", _owner), frozenset({"I20", "I26"}), frozenset({"gc", "slow"})
    ),
    "deletes after one bad read": Mutant(
        _patch(log, "agreed", lambda read: read()),
        frozenset({"I26", "I22"}),
        frozenset({"flips", "gc", "kills"}),
    ),
    "does not look at signatures": Mutant(
        _patch(log, "parse_log_record", _without_key),
        frozenset({"I20", "I22", "I23", "I30", "I82"}),
        frozenset({"forger"}),
        (("has_key", True),),
    ),
    "does not read the target after an install": Mutant(
        _patch(installer.Installer, "_require_root", lambda *_: None),
        frozenset({"I20", "I31"}),
    ),
    "follows a log that contradicts what it held": Mutant(
        _contradicted,
        frozenset({"I32"}),
    ),
    "gives a claim up when the store fails": Mutant(
        _claim_without_errors, frozenset({"errors"}), frozenset({"refused", "kills", "second"})
    ),
    "believes what it misread": Mutant(
        _patch(view.View, "_forget_misread", lambda _: False),
        frozenset({"I03"}),
        frozenset({"flips"}),
        (("is_harsh", True), ("has_key", False), ("num_readers", 4), ("keep", 50)),
    ),
    "leaves a delta of the plan out": Mutant(
        _patch(fetcher.Fetcher, "_plan", lambda self, *a: _shorter(self, *a)),
        frozenset({"I03", "I20", "I30"}),
        frozenset({"slow"}),
    ),
    "a fold leads from another state": Mutant(
        _patch(fold_maker.FoldMaker, "_encode", _fold_of_another_state),
        frozenset({"folds"}),
        FOLDS,
        LONG_WAYS,
    ),
    "offers a fold without its objects": Mutant(
        _patch(fold_maker.FoldMaker, "_put", _puts_nothing),
        frozenset({"folds"}),
        FOLDS | {"refused"},
        LONG_WAYS,
    ),
    "deletes folds that are of use": Mutant(
        _patch(cleaner, "passed_folds", _passed_by_version),
        frozenset({"I26 folds"}),
        FOLDS | {"gc"},
        LONG_WAYS,
    ),
    "takes the objects of another compactor back": Mutant(
        _patch(fold_maker.FoldMaker, "_yield_to_other", _takes_all_back),
        frozenset({"folds", "I21 folds"}),
        FOLDS | {"slow"},
        LONG_WAYS,
    ),
    "stops at a fold that cannot be fetched": Mutant(
        _patch(fold_choice.FoldChoice, "drop", _gives_up),
        frozenset({"I32 folds", "I03"}),
        FOLDS,
        LONG_WAYS,
    ),
    "a compactor waits for a version that retention deleted": Mutant(
        _patch(compactor.Compactor, "_is_kept", lambda _: True),
        frozenset({"I21 folds"}),
        FOLDS | {"kills", "gc", "slow", "stops"},
        (*LONG_WAYS, ("keep", 1)),
    ),
    "takes the piece that was asked for last first": Mutant(
        _patch(objects.FrameReads, "_in_order", _newest_first),
        frozenset({"I03"}),
        frozenset({"far"}),
    ),
    "takes puts for done that overlap": Mutant(
        _patch(objects.FrameWriter, "_take", _takes_puts_for_done),
        frozenset({"I20", "I26"}),
        frozenset({"far", "refused", "full"}),
    ),
    "does not wait for its lease when it goes": Mutant(
        _patch(lease.Lease, "close", lambda self: self.release() or self._requests.close()),
        frozenset({"I61"}),
        frozenset({"far"}),
    ),
}
_plan = fetcher.Fetcher._plan
_encode = fold_maker.FoldMaker._encode
_put_fold = fold_maker.FoldMaker._put


def _shorter(self: fetcher.Fetcher, *arguments):
    plan = _plan(self, *arguments)
    return replace(plan, steps=plan.steps[1:]) if len(plan.steps) > 1 else plan


@contextmanager
def broken(name: str) -> Iterator[Mutant]:
    """The product with that bug."""
    mutant = MUTANTS[name]
    with mutant.make():  # type: ignore[attr-defined]
        yield mutant


def seed_that_catches(name: str, seeds: range) -> tuple[int, ViolationError] | None:
    """The first history that shows the bug, and what it showed; None if none does."""
    with broken(name) as mutant:
        for seed in seeds:
            try:
                play(mutant.profile(seed))
            except ViolationError as error:
                return seed, error
    return None


def main(names: list[str]) -> int:
    """Writes which history shows which bug (docs/reliability.md); with names, only theirs."""
    from tests.campaign.report import MUTANTS_CSV

    logging.disable(logging.CRITICAL)
    known: dict[str, tuple[str, ...]] = {}
    if names:
        with MUTANTS_CSV.open() as file:
            known = {row[0]: tuple(row) for row in csv.reader(file)}
    for name in names or MUTANTS:
        found = seed_that_catches(name, range(MAX_SEEDS))
        assert found is not None, name
        known[name] = (name, str(found[0]), found[1].invariant)
    with MUTANTS_CSV.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("mutant", "seed", "invariant"))
        writer.writerows(known[name] for name in MUTANTS if name in known)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
