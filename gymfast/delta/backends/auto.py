"""The back end that follows the tensors: the CPU's for arrays, a GPU's for tensors of torch."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gymfast.delta import memory
from gymfast.delta.backends import Backend, EncodedBlocks, select
from gymfast.delta.geometry import Geometry
from gymfast.delta.memory import Data
from gymfast.errors import MissingDependencyError


class AutoBackend(Backend):
    """The back end that `select("auto")` returns; all back ends give the same bytes.

    Tensors in CUDA memory, and those in pinned memory beside them, go to "cuda" where
    gymfast._cuda is built, else to "triton".
    """

    name = "auto"
    kinds = (memory.CPU, memory.CUDA, memory.PINNED)

    def __init__(self, cpu: Backend) -> None:
        self._cpu = cpu

    def takes(self, kind: str) -> bool:
        """See Backend; MissingDependencyError if no back end of a GPU is installed."""
        return kind == memory.CPU or self._device.takes(kind)

    def check64(self, *parts: bytes | bytearray | memoryview) -> int:
        """See Backend."""
        return self._cpu.check64(*parts)

    # Whatever follows the tensor in a call goes on as it is: see Backend.

    def digest_blocks(self, data: Data, *args: Any, **options: Any) -> NDArray[np.uint64]:
        """See Backend."""
        return self._of(data).digest_blocks(data, *args, **options)

    def class_params(self, base: Data, unit_bytes: int) -> tuple[int, int]:
        """See Backend."""
        return self._of(base).class_params(base, unit_bytes)

    def encode_blocks(self, base: Data, *args: Any, **options: Any) -> EncodedBlocks:
        """See Backend."""
        return self._of(base).encode_blocks(base, *args, **options)

    def rollback_blocks(self, base: Data, undo: bytes | memoryview, geometry: Geometry) -> None:
        """See Backend."""
        self._of(base).rollback_blocks(base, undo, geometry)

    def apply_blocks(self, data: Data, *args: Any, **options: Any) -> int:
        """See Backend."""
        return self._of(data).apply_blocks(data, *args, **options)

    def sections_per_call(self, data: Data, *args: Any, **options: Any) -> int:
        """See Backend."""
        return self._of(data).sections_per_call(data, *args, **options)

    def encode_sections(self, base: Data, *args: Any, **options: Any) -> list[EncodedBlocks]:
        """See Backend."""
        return self._of(base).encode_sections(base, *args, **options)

    def apply_sections(self, data: Data, *args: Any, **options: Any) -> int:
        """See Backend."""
        return self._of(data).apply_sections(data, *args, **options)

    def apply_and_read(
        self, data: Data, *args: Any, **options: Any
    ) -> tuple[int, list[NDArray[np.uint64]]]:
        """See Backend."""
        return self._of(data).apply_and_read(data, *args, **options)

    def _of(self, data: Data) -> Backend:
        return self._cpu if isinstance(data, np.ndarray) else self._device

    @cached_property
    def _device(self) -> Backend:
        reasons = []
        for name in ("cuda", "triton"):
            try:
                return select(name)
            except MissingDependencyError as error:
                reasons.append(str(error))
        raise MissingDependencyError(
            f"a tensor is in CUDA memory, and no back end for it is installed: {'; '.join(reasons)}"
        )
