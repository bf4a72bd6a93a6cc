"""What gymfast is measured against: a plain copy, and the XOR image in zstd level 1."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Zstd:
    """A zstd library at level 1; `name` says which one."""

    name: str
    compress: Callable[[U8], bytes]
    decompress: Callable[[bytes], bytes]


def load_zstd() -> Zstd | None:
    """The first zstd library that is installed, the fastest first; None if there is none."""
    for name in ("zstandard", "compression.zstd", "backports.zstd"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if name == "zstandard":
            compressor, decompressor = module.ZstdCompressor(level=1), module.ZstdDecompressor()
            return Zstd(name, compressor.compress, decompressor.decompress)
        return Zstd(name, partial(module.compress, level=1), module.decompress)
    return None


class XorZstd:
    """XOR of every tensor with its old bytes, each as one zstd-1 frame; nothing is verified.

    This is the default way of slime, miles and SkyRL without their digest of the result.
    """

    def __init__(self, zstd: Zstd, state: dict[str, U8]) -> None:
        self._zstd = zstd
        self._sent = {name: data.copy() for name, data in state.items()}
        self._held = {name: data.copy() for name, data in state.items()}
        self._image = np.empty(max(data.size for data in state.values()), np.uint8)

    def encode(self, new: dict[str, U8]) -> list[bytes]:
        """One zstd frame for each tensor."""
        frames = []
        for name, data in new.items():
            image = self._image[: data.size]
            np.bitwise_xor(_words(self._sent[name]), _words(data), out=_words(image))
            frames.append(self._zstd.compress(image))
        return frames

    def promote(self, new: dict[str, U8]) -> None:
        """Make `new` the base of the next version; not part of the encode time."""
        for name, data in new.items():
            np.copyto(self._sent[name], data)

    def apply(self, frames: list[bytes]) -> None:
        """Decode and XOR into the tensors held."""
        for data, frame in zip(self._held.values(), frames, strict=True):
            image = np.frombuffer(self._zstd.decompress(frame), np.uint8)
            np.bitwise_xor(_words(data), _words(image), out=_words(data))

    def holds(self, state: dict[str, U8]) -> bool:
        """True if the receiver's tensors are exactly these."""
        return all(np.array_equal(self._held[name], data) for name, data in state.items())


def copy_all(source: dict[str, U8], target: dict[str, U8]) -> None:
    """Copy every tensor with the C library's memcpy."""
    for name, data in source.items():
        np.copyto(target[name], data)


def _words(data: U8) -> NDArray[np.generic]:
    """The same bytes in the widest words that divide them: XOR runs at full width."""
    return data.view(np.uint64) if data.size % 8 == 0 else data
