"""Memory, streams and calls of the device that a tensor of the CUDA back end is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from gymfast.delta import memory
from gymfast.errors import BudgetError

Result = TypeVar("Result")
_PINNED_BYTES = 1 << 16  # from here on a copy through pinned memory is worth its allocation


@dataclass(frozen=True)
class Device:
    """Where the kernels for a tensor run; for pinned memory on the current device of torch."""

    sample: torch.Tensor

    @property
    def place(self) -> str:
        place = memory.place_of(self.sample)
        return memory.CUDA if place == memory.PINNED else place

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.place).cuda_stream)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Fresh bytes on the device, freed in the order of the current stream.

        Raises BudgetError if there are not so many.
        """
        try:
            data: torch.Tensor = memory.empty(num_bytes, self.place)
        except MemoryError as error:
            raise BudgetError(
                f"a call of the codec needs {num_bytes} bytes of {self.place} memory, which are "
                f"not free ({error}): free memory of the device, or take back end 'cpu' with "
                "weights in CPU memory"
            ) from error
        return data

    def upload(self, array: NDArray[np.generic], out: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes of an array on the device, in the first bytes of `out` if it is given."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target = self.empty(flat.size) if out is None else out[: flat.size]
        memory.assign(target, flat)
        return target

    def run(self, operation: Callable[..., Result], *arguments: object) -> Result:
        """The result of an operation of gymfast._cuda on the current stream of the device."""
        with torch.cuda.device(self.place):  # a thread's own device may be another
            return operation(*arguments, self.stream)

    def wait(self) -> None:
        """Until the kernels given so far are done."""
        torch.cuda.current_stream(self.place).synchronize()

    def download(self, data: torch.Tensor) -> memory.U8:
        """Bytes of the device as an array; waits for what the current stream does to them."""
        if data.numel() < _PINNED_BYTES:
            array: memory.U8 = data.cpu().numpy()
            return array
        out: torch.Tensor = memory.empty(data.numel(), memory.PINNED)
        out.copy_(data, non_blocking=True)
        self.wait()
        pinned: memory.U8 = out.numpy()
        return pinned
