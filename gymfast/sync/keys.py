"""Where the objects of a run lie in a store (docs/sync-protocol.md section 2)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gymfast.sync.manifest import COUNT_MAX, RUN_PATTERN, FoldRecord, FrameRecord

_NUMBER = re.compile(r"[0-9]{20}")
_SPAN = re.compile(r"(full|[0-9]{20})-([0-9]{20})")


@dataclass(frozen=True)
class RunKeys:
    """The keys of one run; nothing outside `<run>/` is ever touched (I27)."""

    run: str

    def __post_init__(self) -> None:
        if not re.match(RUN_PATTERN, self.run):
            raise ValueError(
                f"run {self.run!a}: expected 1 to 128 of [A-Za-z0-9._-], not starting with a dot"
            )

    @property
    def log_prefix(self) -> str:
        """Prefix of all records of the log."""
        return f"{self.run}/log/"

    @property
    def objects_prefix(self) -> str:
        """Prefix of all parts of frames."""
        return f"{self.run}/objects/"

    @property
    def floors_prefix(self) -> str:
        """Prefix of the marks that retention sets before it deletes."""
        return f"{self.run}/floors/"

    @property
    def readers_prefix(self) -> str:
        """Prefix of all leases."""
        return f"{self.run}/readers/"

    @property
    def status_prefix(self) -> str:
        """Prefix of what readers tell of themselves."""
        return f"{self.run}/status/"

    @property
    def probe_prefix(self) -> str:
        """Prefix of what the test of create-only writes has under way."""
        return f"{self.run}/probe/"

    @property
    def hint(self) -> str:
        """The one object that is replaced: advice where the log ends."""
        return f"{self.run}/hint"

    @property
    def ahead_prefix(self) -> str:
        """Prefix of the notes of objects whose record is being made."""
        return f"{self.run}/ahead/"

    @property
    def folds_prefix(self) -> str:
        """Prefix of all records of folds."""
        return f"{self.run}/folds/"

    @property
    def folded_prefix(self) -> str:
        """Prefix of all parts of the frames of folds."""
        return f"{self.run}/folded/"

    def record(self, seq: int) -> str:
        """Key of a record of the log."""
        return f"{self.log_prefix}{seq:020d}"

    def object(self, epoch: int, digest: str) -> str:
        """Key of an object that a publisher of this epoch wrote."""
        return f"{self.objects_prefix}{epoch:020d}/{digest}"

    def ahead(self, number: int) -> str:
        """Key of a note, which is replaced for each record."""
        return f"{self.ahead_prefix}{number:02d}"

    def floor(self, seq: int) -> str:
        """Key of the mark that records before `seq` may be gone."""
        return f"{self.floors_prefix}{seq:020d}"

    def reader(self, reader_id: str) -> str:
        """Key of the lease of a reader."""
        return f"{self.readers_prefix}{reader_id}"

    def status(self, reader_id: str) -> str:
        """Key of what a reader tells of itself."""
        return f"{self.status_prefix}{reader_id}"

    def fold(self, span: Span) -> str:
        """Key of the record of a fold."""
        return f"{self.folds_prefix}{span}"

    def of(self, record: FrameRecord) -> RunKeys:
        """These keys, with `object` for the frame of that record."""
        return FoldKeys(self.run, span_of_fold(record)) if isinstance(record, FoldRecord) else self


@dataclass(frozen=True, order=True)
class Span:
    """The versions that a fold leads from and to; `base` is -1 for a full state."""

    base: int
    version: int

    def __str__(self) -> str:
        base = "full" if self.is_full else f"{self.base:020d}"
        return f"{base}-{self.version:020d}"

    @property
    def start(self) -> int:
        """The version that a reader has to hold; that of the fold itself for a full state."""
        return self.version if self.is_full else self.base

    @property
    def is_full(self) -> bool:
        """True if the fold needs no base."""
        return self.base < 0


@dataclass(frozen=True)
class FoldKeys(RunKeys):
    """The keys of a run as seen by one fold: its objects lie under its own name."""

    span: Span

    def object(self, epoch: int, digest: str) -> str:  # noqa: ARG002 - of no publisher
        return f"{self.folded_prefix}{self.span}/{digest}"


def span_of_fold(fold: FoldRecord) -> Span:
    """The span of a fold."""
    return Span(fold.base_version, fold.version)


def span_of(key: str, prefix: str) -> Span | None:
    """The span in the key of a fold's record below the prefix; None for any other key."""
    name = key.removeprefix(prefix)
    found = None if name == key else _SPAN.fullmatch(name)
    if found is None:
        return None
    base = -1 if found[1] == "full" else int(found[1])
    version = int(found[2])
    return Span(base, version) if base < version <= COUNT_MAX else None


def folded_of(key: str, prefix: str) -> Span | None:
    """The span in the key of an object of a fold below the prefix; None for any other key."""
    head, _, _ = key.rpartition("/")
    return span_of(head, prefix)


def number_of(key: str, prefix: str) -> int | None:
    """The 20-digit number that is all of a key after the prefix; None for any other key.

    Numbers that no record can hold, 0 and those from 2^53 on, are none.
    """
    name = key.removeprefix(prefix)
    if name == key or not _NUMBER.fullmatch(name) or not 1 <= int(name) <= COUNT_MAX:
        return None
    return int(name)


def object_of(key: str, prefix: str) -> tuple[int, str] | None:
    """Epoch and digest in the key of an object below the prefix; None for any other key."""
    head, _, digest = key.rpartition("/")
    epoch = number_of(head, prefix)
    return None if epoch is None else (epoch, digest)
