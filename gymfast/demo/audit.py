"""Proof that nothing wrong is served: what receivers hold against the trainer's own list."""

from __future__ import annotations

import hashlib
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
    """Names and bytes of a safetensors checkpoint, read as any other program would.

    `path` is a file or a folder of files. Raises OSError if it is not there.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return [
        (name, tensor["data"]) for file in files for name, tensor in _deserialize(file.read_bytes())
    ]


@dataclass
class Audit:
    """The trainer's list and everything that was served; neither trusts the other.

    A served version may arrive before the trainer's own line: it is judged at the end.
    """

    published: dict[int, Published] = field(default_factory=dict)
    served: list[tuple[str, Served]] = field(default_factory=list)
    outside_reads: list[str] = field(default_factory=list)

    def add_published(self, event: Published) -> None:
        """Take down what the trainer says it published."""
        self.published[event.version] = event

    def add_served(self, receiver: str, event: Served) -> None:
        """Take down what a receiver serves."""
        self.served.append((receiver, event))

    def add_outside_read(self, found: str) -> None:
        """Take down the fingerprint of a checkpoint that a third program read from disk."""
        self.outside_reads.append(found)

    def wrong(self) -> list[str]:
        """One sentence for each thing served that the trainer never published as such."""
        known = {event.fingerprint for event in self.published.values()}
        sentences = [
            sentence
            for receiver, event in self.served
            if (sentence := self._judge(receiver, event))
        ]
        strangers = sum(found not in known for found in self.outside_reads)
        if strangers:
            sentences.append(f"{strangers} reads of the checkpoint found a state nobody published")
        return sentences

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
