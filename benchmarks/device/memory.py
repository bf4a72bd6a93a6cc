"""Memory and clock of what is measured: a CUDA device, or the host for a module that is a shim."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
HOST_CLOCK = "host"
_ALIGN = 256
_POISON = 0xA5  # an output that nobody wrote must not look right


class Device:
    """Where tensors (torch.uint8 and int64) lie and how a run of work is timed."""

    def __init__(self, *, is_host: bool) -> None:
        self.is_host = is_host
        self.name = "cpu" if is_host else "cuda"
        self.clock = HOST_CLOCK if is_host else "CUDA events"

    @property
    def stream(self) -> int:
        """The stream that torch uses now, as the native module takes it."""
        return 0 if self.is_host else int(torch.cuda.current_stream().cuda_stream)

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """Aligned bytes that hold garbage; on a device of exactly this size, for memcheck."""
        room = num_bytes + _ALIGN if self.is_host else num_bytes
        raw = torch.full((room,), _POISON, dtype=torch.uint8, device=self.name)
        start = -raw.data_ptr() % _ALIGN if self.is_host else 0
        return raw[start : start + num_bytes]

    def words(self, *shape: int) -> torch.Tensor:
        """64-bit words that hold garbage."""
        return torch.full(shape, -_POISON, dtype=torch.int64, device=self.name)

    def upload(self, array: NDArray[np.generic], shift: int = 0) -> torch.Tensor:
        """The bytes of an array, `shift` bytes behind an aligned address."""
        flat = array.reshape(-1).view(np.uint8)
        room = self.bytes(flat.size + shift)[shift:]
        room.copy_(torch.from_numpy(flat))
        return room

    def download(self, tensor: torch.Tensor) -> U8:
        """The bytes of a tensor, once everything queued before has run."""
        return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()

    def wait(self) -> None:
        if not self.is_host:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        """Time of the work that `run` queues: between two events, on the host by its clock."""
        if self.is_host:
            return self.wall_seconds(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def wall_seconds(self, run: Callable[[], object]) -> float:
        """Time on the host until all work of `run` is done: for code that waits inside."""
        self.wait()
        start_s = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start_s
