"""How often each invariant was really tried, and how often it broke."""

from __future__ import annotations

import subprocess
from collections import Counter

WHAT = {
    "I03": "histories at whose end every reader has exactly the newest version",
    "I04": "publishes that failed: state rolled back exactly, the next one exact",
    "I20": "looks at a reader: exactly a committed version, or nothing is served",
    "folds": "folds offered: exactly the way from one committed state to another",
    "I21": "publishers killed: what was committed stays, the next publisher goes on",
    "I21 folds": "compactors at the end, killed or not: everything is folded",
    "I22": "places of a log that were written: one record each, versions contiguous",
    "I22 races": "places of a log that were wanted and already taken",
    "I23": "publishers that were replaced: nothing committed, refused for ever",
    "I24": "stores that ignore create-only: refused by a publisher, nothing committed",
    "I25": "publishes while the store is full: refused, nothing half",
    "I26": "deletes of retention: nothing that a kept version or a reader with a lease needs",
    "I26 leases": "deletes while a reader with a lease was reading",
    "I26 folds": "deletes of folds by retention: none that a kept version or a lease needs",
    "I27": "calls of processes: nothing outside their own run, no writes that are not theirs",
    "I30": "installs over more than one version: one install, exact",
    "I30 folds": "installs by folds: exact",
    "I31": "installs onto memory that was damaged: refused before it is served, or healed",
    "I32": "old logs, swapped objects and frozen runs shown to readers: refused or flagged",
    "I32 folds": "readers shown whole, damaged, swapped, missing folds: newest version, exact",
    "I33": "publishes: no changes reported exactly if nothing changed",
    "I34": "looks at a reader while writes are visible late and in any order",
    "I61": "readers and compactors that are closed: no thread of theirs and no lease stays",
    "I82": "forgeries put into signed runs: nothing of them is served",
    "I83": "keys of writes: none leads out of the store",
    "errors": "histories: every error that a caller meets is one of gymfast, none of Python",
    "I84": "contents and errors of signed runs: no key in them",
}


class ViolationError(AssertionError):
    """An invariant that does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Counts(Counter[str]):
    """Trials per invariant; other keys are what happened."""

    def check(self, invariant: str, is_true: object, text: str) -> None:
        """Counts a trial; ViolationError if it failed."""
        self[invariant] += 1
        if not is_true:
            raise ViolationError(invariant, text)


def commit() -> str:
    """The commit of the checkout, with a plus if anything in it was changed."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
