"""The AUTH section: HMAC-SHA256 over a frame (section 3.5 of docs/wire-format.md)."""

from __future__ import annotations

import hmac

from gymfast.delta.frame_parser import check_magic
from gymfast.delta.records import MAGIC, SECTION_HEADER_BYTES, SectionType
from gymfast.delta.source import MemorySource, Source
from gymfast.delta.varint import Buffer
from gymfast.errors import ChecksumError, FormatError

HMAC_SHA256 = 1
ALGORITHMS = {HMAC_SHA256: "hmac-sha256"}
AUTH_BODY_BYTES = 33
MIN_KEY_BYTES = 16
_BAD_AUTHENTICATION = 64
_AUTH_BYTES = SECTION_HEADER_BYTES + AUTH_BODY_BYTES
_AUTH_START = bytes((SectionType.AUTH, 0)) + AUTH_BODY_BYTES.to_bytes(6, "little")
_ROOT_BYTES = 64  # base_root and new_root
_ROWS_AT = _ROOT_BYTES + 8  # behind frame_check
_END_BYTES = 8
_PIECE_BYTES = 2**20  # hashed at a time
_LEAST_END_BYTES = SECTION_HEADER_BYTES + _ROWS_AT + _END_BYTES


def check_key(key: bytes | None) -> None:
    """Raises TypeError or ValueError, without its bytes, for a key of under 16 bytes."""
    if key is None:
        return
    if not isinstance(key, bytes):
        raise TypeError(f"the key is a {type(key).__name__}, expected bytes")
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"the key has {len(key)} bytes, expected at least {MIN_KEY_BYTES}")


class Tagger:
    """Computes the tag of one frame from its bytes as they leave. Not thread-safe."""

    def __init__(self, key: bytes) -> None:
        """A tagger for a frame of which nothing has left; raises like check_key."""
        check_key(key)
        self._hmac = hmac.new(key, digestmod="sha256")
        self._num_bytes = 0

    def update(self, *parts: Buffer) -> None:
        """Takes the next bytes of the frame, up to AUTH."""
        for part in parts:
            self._hmac.update(part)
            self._num_bytes += len(part)

    def tag(self, *end: Buffer) -> bytes:
        """The 32-byte tag; end is what END says: roots and rows. To be called once, last."""
        for part in (*end, self._num_bytes.to_bytes(8, "little")):
            self._hmac.update(part)
        return self._hmac.digest()


def check_authentication(frame: memoryview, key: bytes) -> None:
    """Returns if the holder of this key made the frame (R31); looks at nothing else before that.

    Raises FormatError 64 if the frame has no tag where it has to be, ChecksumError 64 if the tag
    is another, FormatError 10, 11 or 20 if this is no frame of this version.
    """
    check_source(MemorySource(frame), key)


def check_source(source: Source, key: bytes) -> None:
    """What check_authentication does, for a frame that is read in pieces."""
    tagger = Tagger(key)
    check_magic(source.read(0, min(len(MAGIC), source.num_bytes)))
    end_at = _end_of_auth(source)
    if end_at is None:
        raise FormatError(
            "no tag in front of END, and a key was given: the frame was encoded without a key, cut "
            "or altered; nothing of it was used",
            _BAD_AUTHENTICATION,
        )
    auth_at = end_at - _AUTH_BYTES
    for start in range(0, auth_at, _PIECE_BYTES):
        tagger.update(source.read(start, min(start + _PIECE_BYTES, auth_at)))
    body = source.read(end_at + SECTION_HEADER_BYTES, source.num_bytes)
    found = tagger.tag(body[:_ROOT_BYTES], body[_ROWS_AT:-_END_BYTES])
    if not hmac.compare_digest(found, source.read(end_at - len(found), end_at)):
        raise ChecksumError(
            "the tag of the frame is not the one that this key gives: the frame was altered, or "
            "encoded with another key; nothing of it was used",
            _BAD_AUTHENTICATION,
        )


def authentication_of(frame: memoryview) -> str:
    """The algorithm of the tag that a parsed frame carries, unchecked; empty if there is none."""
    return authentication_of_source(MemorySource(frame))


def authentication_of_source(source: Source) -> str:
    """What authentication_of says, for a frame that is read in pieces."""
    end_at = _end_of_auth(source)
    return "" if end_at is None else ALGORITHMS[_byte(source, end_at - AUTH_BODY_BYTES)]


def _end_of_auth(source: Source) -> int | None:
    """Where END starts if a section AUTH of a known algorithm stands in front of it, else None."""
    num_bytes = source.num_bytes
    end_bytes = int.from_bytes(source.read(max(0, num_bytes - _END_BYTES), num_bytes), "little")
    end_at = num_bytes - end_bytes
    auth_at = end_at - _AUTH_BYTES
    if auth_at < len(MAGIC) or end_bytes < _LEAST_END_BYTES:
        return None
    if _byte(source, end_at) != SectionType.END:
        return None
    is_auth = source.read(auth_at, auth_at + len(_AUTH_START)) == _AUTH_START
    return end_at if is_auth and _byte(source, end_at - AUTH_BODY_BYTES) in ALGORITHMS else None


def _byte(source: Source, at: int) -> int:
    return source.read(at, at + 1)[0]
