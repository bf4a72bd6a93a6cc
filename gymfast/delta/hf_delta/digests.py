"""The three digests of the directory format, fed piece by piece: xxh3-128, blake3, adler32."""

from __future__ import annotations

import re
import zlib
from typing import Protocol

from gymfast.delta.files import Buffer
from gymfast.errors import ChecksumError, FormatError, MissingDependencyError

HEX_DIGITS = {"xxh3-128": 32, "blake3": 64, "adler32": 8}
DEFAULT_ALGORITHM = "xxh3-128"


class Hasher(Protocol):
    """A digest in the making."""

    def update(self, data: Buffer, /) -> object:
        """Takes the next bytes."""
        ...

    def hexdigest(self) -> str:
        """The digest of all bytes so far, in lower case."""
        ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_hasher(algorithm: str) -> Hasher:
    """An empty digest.

    Raises ValueError for an unknown algorithm, MissingDependencyError if its package is not there.
    """
    if algorithm not in HEX_DIGITS:
        raise ValueError(f"digest {algorithm!r} is unknown, expected {', '.join(HEX_DIGITS)}")
    try:
        if algorithm == "xxh3-128":
            import xxhash

            hasher: Hasher = xxhash.xxh3_128()
        elif algorithm == "blake3":
            import blake3

            hasher = blake3.blake3()
        else:
            hasher = _Adler32()
    except ImportError as error:
        raise MissingDependencyError(
            f"digests of {algorithm} need {error.name}: install gymfast[interop]"
        ) from error
    return hasher


def check_stated(digest: object, algorithm: str, where: str) -> str:
    """The digest that a file states of a tensor; raises FormatError if it cannot be one."""
    digits = HEX_DIGITS[algorithm]
    if not isinstance(digest, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", digest):
        found = "no digest" if digest is None else f"digest {digest!r}"
        raise FormatError(
            f"{where}: {found}, expected {digits} lower-case hexadecimal digits of {algorithm}: "
            "the publisher wrote it wrong; publish this version again"
        )
    return digest


def check_equal(found: str, stated: str, where: str, hint: str) -> None:
    """Raises ChecksumError, with both digests and what to do, if they differ."""
    if found != stated:
        raise ChecksumError(f"{where}: digest {found}, expected {stated}: {hint}")
