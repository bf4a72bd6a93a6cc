"""The C++ back end: thin calls into gymfast._core, which raises the FormatErrors itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gymfast import _core
from gymfast.delta import memory
from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks
from gymfast.delta.geometry import Geometry
from gymfast.delta.memory import U8
from gymfast.delta.records import BlocksRecord


class CpuBackend(Backend):
    """The back end that `select("cpu")` returns; GIL released, `threads` workers."""

    name = "cpu"
    kinds = (memory.CPU,)

    def check64(self, *parts: bytes | bytearray | memoryview) -> int:
        """fold64 of the digest of the concatenation of parts."""
        return _core.check64(*parts)

    def digest_blocks(
        self,
        data: U8,
        geometry: Geometry,
        threads: int,
        first_block: int = 0,
        num_blocks: int | None = None,
    ) -> NDArray[np.uint64]:
        """Partial digests of all blocks or of a range, [num_blocks, 2]."""
        if first_block == 0 and num_blocks is None:
            return _core.digest_blocks(data, *_flat(geometry), threads)
        count = geometry.num_blocks - first_block if num_blocks is None else num_blocks
        return _core.digest_blocks(data, *_flat(geometry), threads, first_block, count)

    def class_params(self, base: U8, unit_bytes: int) -> tuple[int, int]:
        """class_shift and class_base of a base tensor."""
        return _core.class_params(base, unit_bytes)

    def encode_blocks(
        self,
        base: U8,
        new: U8,
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
        """See Backend; the undo blob is private to csrc/cpu/codec.cpp."""
        body, num_changed, log = _core.encode_blocks(
            base,
            new,
            *_flat(geometry),
            params.profile,
            params.class_shift,
            params.class_base,
            params.has_base,
            digests,
            first_block,
            num_blocks,
            update,
            undo,
            threads,
        )
        return EncodedBlocks(body, num_changed, log)

    def rollback_blocks(self, base: U8, undo: bytes | memoryview, geometry: Geometry) -> None:
        """Puts back the old values of an undo blob of this back end."""
        _core.rollback_blocks(base, undo, *_flat(geometry))

    def apply_blocks(
        self,
        data: U8,
        body: bytes | memoryview,
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        first_block: int,
        num_blocks: int,
        threads: int,
    ) -> int:
        """See Backend."""
        span = first_block, num_blocks
        return self._apply(data, body, geometry, params, digests, span, threads, None)

    def apply_and_read(
        self,
        data: U8,
        sections: Sequence[BlocksRecord],
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        threads: int,
    ) -> tuple[int, list[NDArray[np.uint64]]]:
        """See Backend; each block is read while it is in the cache."""
        num_changed, read = 0, []
        for section in sections:
            span = section.first_block, section.num_blocks
            found = np.empty((section.num_blocks, 2), np.uint64)
            num_changed += self._apply(
                data, section.body, geometry, params, digests, span, threads, found
            )
            read.append(found)
        return num_changed, read

    def _apply(
        self,
        data: U8,
        body: bytes | memoryview,
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        span: tuple[int, int],
        threads: int,
        found: NDArray[np.uint64] | None,
    ) -> int:
        return _core.apply_blocks(
            data,
            body,
            *_flat(geometry),
            params.class_shift,
            params.class_base,
            params.has_base,
            digests,
            *span,
            threads,
            found,
        )


def _flat(geometry: Geometry) -> tuple[int, int, int, int, int]:
    """num_units, unit_bytes, cols, tile_rows, tile_cols."""
    return (
        geometry.num_units,
        geometry.unit_bytes,
        geometry.cols,
        geometry.tile_rows,
        geometry.tile_cols,
    )
