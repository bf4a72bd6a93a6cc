"""Memory of torch tensors: what is packed, and a digest that misses no change."""

from __future__ import annotations

import numpy as np
import pytest

from gymfast.buckets import Piece
from gymfast.channels.device_memory import DeviceMemory, weights

torch = pytest.importorskip("torch")

ROW = 1 << 16


def expected(parts: list[bytes]) -> int:
    """The digest in exact numbers of Python."""
    total, row = 0, 0
    for part in parts:
        whole = len(part) // 8 * 8
        for begin, end in [
            (b, min(b + 32 * ROW * 8, whole)) for b in range(0, whole, 32 * ROW * 8)
        ]:
            words = np.frombuffer(part[begin:end], np.uint64)
            for first in range(0, len(words), ROW):
                of_row = words[first : first + ROW]
                line = sum(
                    int(w) * int(c) for w, c in zip(of_row, weights(len(of_row), 1), strict=True)
                )
                total += line * int(weights(row + 1, 2)[row])
                row += 1
        if rest := part[whole:]:
            word = int.from_bytes(rest, "little")
            total += word * int(weights(1, 1)[0]) * int(weights(row + 1, 2)[row])
            row += 1
    return total % 2**64


def as_u64(digest) -> int:
    return int(digest) % 2**64


@pytest.mark.parametrize("sizes", [[1], [8], [15, 0, 3], [8 * ROW], [8 * ROW + 17, 4096, 9]])
def test_the_digest_is_the_stated_sum(sizes: list[int]) -> None:
    data = np.random.default_rng(0).integers(0, 256, sum(sizes) + 8 * len(sizes), dtype=np.uint8)
    starts = np.cumsum([0, *(-(-size // 8) * 8 for size in sizes)])[:-1]
    pieces = [Piece(0, 0, int(b), size) for b, size in zip(starts, sizes, strict=True)]
    parts = [data[b : b + size].tobytes() for b, size in zip(starts, sizes, strict=True)]
    memory = DeviceMemory("cpu")
    assert as_u64(memory.digest(torch.from_numpy(data), pieces)) == expected(parts)
    shifted = torch.from_numpy(np.concatenate([data[:3], data]))[3:]
    assert as_u64(memory.digest(shifted, pieces)) == expected(parts)


def test_any_byte_changes_the_digest_and_so_does_the_order() -> None:
    memory, pieces = DeviceMemory("cpu"), [Piece(0, 0, 0, 40), Piece(1, 0, 48, 11)]
    bucket = torch.arange(64, dtype=torch.uint8)
    before = int(memory.digest(bucket, pieces))
    for place in [*range(40), *range(48, 59)]:
        changed = bucket.clone()
        changed[place] ^= 128
        assert int(memory.digest(changed, pieces)) != before
    swapped = bucket.clone()
    swapped[:8], swapped[8:16] = bucket[8:16], bucket[:8]
    assert int(memory.digest(swapped, pieces)) != before
    padding = bucket.clone()
    padding[40:48] = 255
    assert int(memory.digest(padding, pieces)) == before


def test_pieces_go_into_buckets_and_out_again() -> None:
    memory = DeviceMemory("cpu")
    tensor, bucket = torch.arange(100, dtype=torch.uint8), memory.empty(64)
    bucket.zero_()
    with memory.in_use():
        packed = int(memory.pack(bucket, [Piece(0, 10, 3, 20)], [tensor]))
        assert bucket.tolist() == [0] * 3 + list(range(10, 30)) + [0] * 41
        back = torch.zeros(100, dtype=torch.uint8)
        unpacked = int(memory.unpack(bucket, [Piece(0, 10, 3, 20)], [back]))
    assert packed == unpacked == int(memory.digest(bucket, [Piece(0, 0, 3, 20)]))
    assert back.tolist() == [0] * 10 + list(range(10, 30)) + [0] * 70
