"""Proof that nothing wrong is served: what receivers hold against the trainer's own list."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors

from gymfast.demo.events import Published, Served

NamedBytes = tuple[str, bytes | bytearray | memoryview]


def fingerprint(tensors: Iterable[NamedBytes]) -> str:
    """SHA-256 over names and bytes of all tensors in name order.

    Shares no code with the codec, so that a mistake there cannot hide itself.
    """
    digest = hashlib.sha256()
    for name, data in sorted(tensors, key=lambda pair: pair[0]):
        size = memoryview(data).nbytes
        digest.update(f"{name}\n{size}\n".encode())
        digest.update(data)
    return digest.hexdigest()


_deserialize: Callable[[bytes], list[tuple[str, dict[str, bytes]]]] = safetensors.deserialize


def read_checkpoint(path: Path) -> list[NamedBytes]:
    """Names and bytes of a safetensors file, read as any other program would.

    Raises OSError if it is not there.
    """
    return [(name, tensor["data"]) for name, tensor in _deserialize(path.read_bytes())]


@dataclass(frozen=True)
class OutsideRead:
    """What a program that is no part of gymfast found on disk.

    `version` is the one that the position file beside the checkpoint declared clean before and
    after the read; None if it declared none, so that nothing may be served.
    """

    version: int | None
    fingerprint: str


def read_from_outside(path: Path) -> OutsideRead | None:
    """The checkpoint as an engine would load it; None if there is none yet."""
    try:
        before = _clean_version(path)
        found = fingerprint(read_checkpoint(path))
    except (FileNotFoundError, safetensors.SafetensorError):
        return None
    return OutsideRead(before if before == _clean_version(path) else None, found)


def _clean_version(path: Path) -> int | None:
    position = path.with_name(f".gymfast.position.{path.name}")
    fields = json.loads(position.read_bytes())
    return int(fields["tip"]["version"]) if fields["state"] == "clean" else None


@dataclass
class Audit:
    """The trainer's list and everything that was served; neither trusts the other.

    A served version may arrive before the trainer's own line: it is judged at the end.
    """

    published: dict[int, Published] = field(default_factory=dict)
    served: list[tuple[str, Served]] = field(default_factory=list)
    outside_reads: list[OutsideRead] = field(default_factory=list)

    def add_published(self, event: Published) -> None:
        """Take down what the trainer says it published."""
        self.published[event.version] = event

    def add_served(self, receiver: str, event: Served) -> None:
        """Take down what a receiver serves."""
        self.served.append((receiver, event))

    def add_outside_read(self, found: OutsideRead) -> None:
        """Take down what a third program read from disk."""
        self.outside_reads.append(found)

    def is_known(self, found: str) -> bool:
        """True if these are exactly the bytes of some published version."""
        return any(event.fingerprint == found for event in self.published.values())

    def wrong(self) -> list[str]:
        """One sentence for each thing served that the trainer never published as such."""
        sentences = [
            sentence
            for receiver, event in self.served
            if (sentence := self._judge(receiver, event))
        ]
        sentences += [
            f"the checkpoint was declared to be version {read.version}, but held other bytes"
            for read in self.outside_reads
            if read.version is not None and not self._is_right(read)
        ]
        return sentences

    def _is_right(self, read: OutsideRead) -> bool:
        truth = self.published.get(-1 if read.version is None else read.version)
        return truth is not None and truth.fingerprint == read.fingerprint

    def _judge(self, receiver: str, event: Served) -> str:
        truth = self.published.get(event.version)
        if truth is None:
            return f"{receiver} served version {event.version}, which the trainer did not publish"
        if event.root != truth.root:
            return f"{receiver} served version {event.version} with root {event.root[:12]}…"
        if event.fingerprint != truth.fingerprint:
            return f"{receiver} served version {event.version} with other bytes than the trainer's"
        if event.kept_pointers is False:
            return f"{receiver} moved its tensors in memory at version {event.version}"
        return ""
