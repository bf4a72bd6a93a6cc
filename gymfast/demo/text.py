"""Real text that every Python installation carries: the sources of its standard library."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gymfast.errors import GymfastError

MIN_BYTES = 64 * 1024


def load_text(limit_bytes: int = 4_000_000) -> NDArray[np.uint8]:
    """Bytes of the standard library's top-level modules, in name order, cut at `limit_bytes`.

    Raises GymfastError if this Python ships no readable sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        data = path.read_bytes()
        parts.append(data)
        size += len(data)
        if size >= limit_bytes:
            break
    if size < MIN_BYTES:
        raise GymfastError(
            f"the standard library in {folder} has {size} bytes of sources, the demo needs "
            f"{MIN_BYTES}: use a Python installation that ships its .py files"
        )
    return np.frombuffer(b"".join(parts)[:limit_bytes], dtype=np.uint8)


def known_words(text: NDArray[np.uint8], min_count: int = 4) -> frozenset[bytes]:
    """Words of the text that occur at least `min_count` times; the reward counts them."""
    counts: dict[bytes, int] = {}
    for word in split_words(text.tobytes()):
        counts[word] = counts.get(word, 0) + 1
    return frozenset(word for word, count in counts.items() if count >= min_count and len(word) > 1)


def split_words(data: bytes) -> list[bytes]:
    """Runs of ASCII letters in the data."""
    return re.findall(rb"[A-Za-z]+", data)
