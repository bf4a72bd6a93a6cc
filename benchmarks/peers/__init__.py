"""What other systems ship, re-written on the same buffers; each entry says what it stands for."""

from __future__ import annotations

from benchmarks.codec import Codec
from benchmarks.peers.pco import Pcodec
from benchmarks.peers.sparse import CooZstd, Gap16XorZstd, Int32Values
from benchmarks.peers.xor import XorBlosc2, XorLz4, XorZstd

PEERS: tuple[type[Codec], ...] = (
    XorZstd,
    CooZstd,
    Gap16XorZstd,
    Int32Values,
    Pcodec,
    XorBlosc2,
    XorLz4,
)

__all__ = ["PEERS"]
