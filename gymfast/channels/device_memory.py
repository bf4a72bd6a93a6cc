"""What a transfer does with memory of a GPU: torch tensors of bytes, on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, SupportsInt

import numpy as np
import numpy.typing as npt

from gymfast.buckets import Piece
from gymfast.channels.base import Arena, Memory
from gymfast.channels.device_pieces import PieceKernels, kernels_of
from gymfast.errors import MissingDependencyError

_WORD = 8  # bytes
_COLS = 1 << 16  # words of a row
_ROWS = 32  # of one step: 16 MiB


def weights(num: int, seed: int) -> npt.NDArray[np.uint64]:
    """Odd 64-bit numbers without a pattern. Source: splitmix64."""
    with np.errstate(over="ignore"):
        step = np.uint64(0x9E3779B97F4A7C15)
        z = np.arange(1, num + 1, dtype=np.uint64) * step + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


class DeviceMemory:
    """Flat torch tensors of bytes on one device.

    On a GPU a bucket is one launch of a kernel of gymfast._cuda, which copies and digests it in one
    pass; where that is not built, and elsewhere, some operations of torch for each piece.

    Copies run on a stream of their own, after what the caller's stream was given before the
    transfer and before what it is given after it. Nothing waits for the device until the digests
    are read, at the end of a transfer.

    The digest is sum(word[i] * weight[i]) mod 2**64 over the 8-byte words of the pieces, each
    padded with zeros, with odd weights that depend on the place. It is exact and the same in any
    order of summation; a change within one word always shows, others go unseen with a chance of
    about 2**-63. It guards against mistakes and damage, not against an adversary.
    """

    digest_name = "weighted sum of words"

    def __init__(self, device: Any, kernels: ModuleType | Literal["auto"] | None = "auto") -> None:
        """Memory of a device that torch knows.

        `kernels` is gymfast._cuda, where it is built and the device is one of CUDA, or a module
        that stands in for it; None leaves the work to torch.
        Raises MissingDependencyError without torch.
        """
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError(
                "gymfast.channels.device_memory needs torch: install gymfast[torch]"
            ) from error
        self._torch: Any = torch
        self._device = torch.device(device)
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        self._kernels: PieceKernels | None = None
        module = kernels_of(self._device.type) if kernels == "auto" else kernels
        if module is not None:
            self._kernels = PieceKernels(module, torch, self._device, self._current_stream)
        self._cols = self._to_device(weights(_COLS, 1))
        self._rows = self._to_device(weights(_ROWS, 2))

    @property
    def has_kernels(self) -> bool:
        """Whether a bucket is one launch."""
        return self._kernels is not None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        cuda = self._torch.cuda
        caller = cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        try:
            with cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def empty(self, num_bytes: int) -> Memory:
        return self._torch.empty(num_bytes, dtype=self._torch.uint8, device=self._device)

    def of_arena(self, arena: Arena) -> Memory | None:
        if self._device.type == "cuda":
            return self._torch.as_tensor(arena, device=self._device)
        return self._torch.from_numpy(np.asarray(arena)) if arena.is_managed else None

    def pack(
        self, bucket: Memory, pieces: Sequence[Piece], tensors: Sequence[Memory]
    ) -> SupportsInt:
        if self._kernels is not None:
            return self._kernels.move(bucket, pieces, tensors, is_packing=True)
        for piece, tensor in zip(pieces, tensors, strict=True):
            part = tensor.narrow(0, piece.tensor_offset, piece.num_bytes)
            bucket.narrow(0, piece.bucket_offset, piece.num_bytes).copy_(part, non_blocking=True)
        return self.digest(bucket, pieces)

    def unpack(
        self, bucket: Memory, pieces: Sequence[Piece], tensors: Sequence[Memory]
    ) -> SupportsInt:
        if self._kernels is not None:
            return self._kernels.move(bucket, pieces, tensors, is_packing=False)
        found = self.digest(bucket, pieces)
        for piece, tensor in zip(pieces, tensors, strict=True):
            part = bucket.narrow(0, piece.bucket_offset, piece.num_bytes)
            tensor.narrow(0, piece.tensor_offset, piece.num_bytes).copy_(part, non_blocking=True)
        return found

    def digest(self, memory: Memory, pieces: Sequence[Piece]) -> SupportsInt:
        if self._kernels is not None:
            return self._kernels.move(memory, pieces, (), is_packing=False)
        total = self._torch.zeros((), dtype=self._torch.int64, device=self._device)
        row = 0
        for piece in pieces:
            for words in self._words(memory.narrow(0, piece.bucket_offset, piece.num_bytes)):
                num_rows = -(-len(words) // _COLS)
                rows = self._row_weights(row + num_rows)
                row += num_rows
                total += self._sum(words, rows[row - num_rows : row])
        value: SupportsInt = total
        return value

    def _current_stream(self) -> int:
        if self._stream is None:
            return 0
        return int(self._torch.cuda.current_stream(self._device).cuda_stream)

    def _sum(self, words: Any, rows: Any) -> Any:
        """Words of whole rows and of one that may be shorter; int64 wraps as modulo 2**64."""
        whole = len(words) // _COLS
        parts = (words[: whole * _COLS].view(whole, _COLS) * self._cols).sum(1) * rows[:whole]
        total = parts.sum()
        if rest := len(words) - whole * _COLS:
            total = total + (words[whole * _COLS :] * self._cols[:rest]).sum() * rows[whole]
        return total

    def _words(self, part: Any) -> Iterator[Any]:
        """Steps of 64-bit words, without a copy where the bytes are aligned; then the rest."""
        torch = self._torch
        step, whole = _ROWS * _COLS * _WORD, part.numel() // _WORD * _WORD
        for begin in range(0, whole, step):
            some = part[begin : min(begin + step, whole)]
            if some.storage_offset() % _WORD or some.data_ptr() % _WORD:
                some = some.clone()
            yield some.view(torch.int64)
        if whole < part.numel():
            last = torch.zeros(_WORD, dtype=torch.uint8, device=self._device)
            last[: part.numel() - whole] = part[whole:]
            yield last.view(torch.int64)

    def _row_weights(self, num: int) -> Any:
        if num > len(self._rows):
            self._rows = self._to_device(weights(2 * num, 2))
        return self._rows

    def _to_device(self, numbers: npt.NDArray[np.uint64]) -> Any:
        return self._torch.from_numpy(numbers.view(np.int64)).to(self._device)
