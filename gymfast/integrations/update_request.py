"""What a trainer asks of an engine's copy: follow a run, then take versions, frames or buckets."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gymfast.errors import FormatError
from gymfast.integrations.canonical import CanonicalCopy, bucket_of
from gymfast.key_file import read_key_file


@dataclass(frozen=True)
class InitRequest:
    """Which run to follow; without a store, frames and buckets come with the updates."""

    store: str = ""
    run: str = ""
    staging_dir: str | None = None
    timeout_s: float = 60.0
    key_file: str | None = None

    def __post_init__(self) -> None:
        if bool(self.store) != bool(self.run):
            raise ValueError(f"store is {self.store!r} and run {self.run!r}: name both or neither")

    def require_shared(self) -> InitRequest:
        """The request itself. Raises ValueError for a store that no other process can see."""
        if self.store.lower().startswith("memory:"):
            raise ValueError(f"store is {self.store!r}, which no engine can see: use file:/PATH")
        return self

    def open(self) -> CanonicalCopy:
        """An empty copy that follows the run. Raises what `Subscriber` raises, OSError."""
        if not self.store:
            return CanonicalCopy()
        return CanonicalCopy.of_run(
            self.store,
            self.run,
            staging_dir=self.staging_dir,
            timeout_s=self.timeout_s,
            key=read_key_file(self.key_file) if self.key_file else None,
        )


@dataclass(frozen=True)
class UpdateRequest:
    """Exactly one of: a version of the run, a frame, a bucket of whole tensors.

    Bytes may come as base64 text; a bucket is a mapping of tensors, or a safetensors file. With
    `is_full` all tensors are loaded, as after a sleep that discarded the weights.
    """

    version: int | None = None
    frame: bytes | str | None = None
    bucket: Mapping[str, Any] | bytes | str | None = None
    is_last: bool = True
    is_full: bool = False
    update_kind: ClassVar[str] = "dense"  # vLLM 0.24 asks each request for it

    def __post_init__(self) -> None:
        given = [n for n in ("version", "frame", "bucket") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(
                f"an update names {given or 'none'} of version, frame, bucket: not one"
            )
        if not self.is_last and self.bucket is None:
            raise ValueError("is_last is False, which is for buckets only")

    def carry_out(self, copy: CanonicalCopy) -> None:
        """Brings the copy to the new state. Raises what it raises, FormatError for bad base64."""
        if self.version is not None:
            copy.pull(self.version)
        elif self.frame is not None:
            copy.put_frame(_bytes_of(self.frame))
        elif self.bucket is not None:
            bucket = self.bucket
            tensors = bucket if isinstance(bucket, Mapping) else bucket_of(_bytes_of(bucket))
            copy.put_bucket(tensors, is_last=self.is_last)


def _bytes_of(data: bytes | str) -> bytes:
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise FormatError(f"{len(data)} characters are no base64 text: {error}") from error
