"""The back end that follows the tensors: the CPU's for arrays, a GPU's for tensors of torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gymfast.delta import memory
from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks, select
from gymfast.delta.geometry import Geometry
from gymfast.delta.memory import Data
from gymfast.delta.records import BlocksRecord
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

    def digest_blocks(
        self,
        data: Data,
        geometry: Geometry,
        threads: int,
        first_block: int = 0,
        num_blocks: int | None = None,
    ) -> NDArray[np.uint64]:
        """See Backend."""
        return self._of(data).digest_blocks(data, geometry, threads, first_block, num_blocks)

    def class_params(self, base: Data, unit_bytes: int) -> tuple[int, int]:
        """See Backend."""
        return self._of(base).class_params(base, unit_bytes)

    def encode_blocks(
        self,
        base: Data,
        new: Data,
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        first_block: int,
        num_blocks: int,
        *,
        update: bool,
        undo: bool,
        threads: int,
    ) -> EncodedBlocks:
        """See Backend."""
        return self._of(base).encode_blocks(
            *(base, new, geometry, params, digests, first_block, num_blocks),
            update=update,
            undo=undo,
            threads=threads,
        )

    def rollback_blocks(self, base: Data, undo: bytes | memoryview, geometry: Geometry) -> None:
        """See Backend."""
        self._of(base).rollback_blocks(base, undo, geometry)

    def apply_blocks(
        self,
        data: Data,
        body: bytes | memoryview,
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        first_block: int,
        num_blocks: int,
        threads: int,
    ) -> int:
        """See Backend."""
        return self._of(data).apply_blocks(
            data, body, geometry, params, digests, first_block, num_blocks, threads
        )

    def sections_per_call(self, data: Data, geometry: Geometry, params: BlockParams) -> int:
        """See Backend."""
        return self._of(data).sections_per_call(data, geometry, params)

    def encode_sections(
        self,
        base: Data,
        new: Data,
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        first_block: int,
        num_blocks: int,
        *,
        update: bool,
        undo: bool,
        threads: int,
    ) -> list[EncodedBlocks]:
        """See Backend."""
        return self._of(base).encode_sections(
            *(base, new, geometry, params, digests, first_block, num_blocks),
            update=update,
            undo=undo,
            threads=threads,
        )

    def apply_sections(
        self,
        data: Data,
        sections: Sequence[BlocksRecord],
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        threads: int,
    ) -> int:
        """See Backend."""
        return self._of(data).apply_sections(data, sections, geometry, params, digests, threads)

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
