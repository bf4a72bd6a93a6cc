"""How often each invariant was really tried, and how often it broke."""

from __future__ import annotations

import subprocess
from collections import Counter

WHAT = {
    "I03": "histories at whose end every reader has exactly the newest version",
    "I04": "publishes that failed: state rolled back exactly, the next one exact",
    "I20": "looks at a reader: exactly a committed version, or nothing is served",
    "I21": "publishers killed: what was committed stays, the next publisher goes on",
    "I22": "places of a log that were written: one record each, versions contiguous",
    "I22 races": "places of a log that were wanted and already taken",
    "I23": "publishers that were replaced: nothing committed, refused for ever",
    "I26": "deletes of retention: nothing that a kept version or a reader with a lease needs",
    "I26 leases": "deletes while a reader with a lease was reading",
    "I27": "calls of processes: nothing outside their own run",
    "I30": "installs over more than one version: one install, exact",
    "I31": "installs onto memory that was damaged: refused before it is served, or healed",
    "I32": "old logs, swapped objects and frozen runs shown to readers: refused or flagged",
    "I33": "publishes: no changes reported exactly if nothing changed",
    "I34": "looks at a reader while writes are visible late and in any order",
    "I82": "forgeries put into signed runs: nothing of them is served",
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
