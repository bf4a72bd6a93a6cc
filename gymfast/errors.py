"""Errors of gymfast: bad data or peer, and the world.

Mistakes of the caller stay ValueError and TypeError.
"""

from __future__ import annotations


class GymfastError(Exception):
    """Base of all errors that gymfast raises; `exit_code` is what the command line returns."""

    exit_code = 1


class FormatError(GymfastError):
    """Bytes that break a rule of docs/wire-format.md; `number` is its stable error number."""

    exit_code = 3

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


class ChecksumError(FormatError):
    """Bytes whose digest is not the one stated."""


class CoverageError(FormatError):
    """Tensors missing at the receiver, or not named by the sender."""


class ChainError(GymfastError):
    """A version that does not follow from the one held."""

    exit_code = 3


class StoreError(GymfastError):
    """A store that failed or answered something impossible."""


class NotFoundError(StoreError):
    """An object or version that is not there (yet)."""

    exit_code = 5


class ConflictError(StoreError):
    """Somebody else created the object first, or a newer publisher fenced this one."""

    exit_code = 6


class DeadlineError(GymfastError):
    """A wait that ended without an answer."""

    exit_code = 4


class BudgetError(GymfastError):
    """Work that does not fit the declared memory or disk budget."""

    exit_code = 7


class ChannelError(GymfastError):
    """A live channel that broke; `ranks` are those that it lost or that failed, as far as known."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SandboxError(GymfastError):
    """A sandbox that failed for reasons of its own; never a zero reward."""


class MissingDependencyError(GymfastError):
    """An optional part that is not installed; the text names the extra."""
