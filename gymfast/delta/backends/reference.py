"""The whole specification in NumPy: the oracle of all other back ends, written to be read.

Usable on up to a few million elements; it ignores `threads`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gymfast.delta import memory
from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks
from gymfast.delta.backends.reference_decode import decode_block
from gymfast.delta.backends.reference_digest import (
    block_units,
    check64,
    digest_blocks,
    digest_units,
    fold32,
    unit_view,
)
from gymfast.delta.backends.reference_encode import encode_block
from gymfast.delta.backends.reference_rice import I64
from gymfast.delta.backends.reference_values import sample_class_params
from gymfast.delta.frame_fields import read_block_table
from gymfast.delta.geometry import Geometry
from gymfast.delta.memory import U8
from gymfast.delta.records import Mode
from gymfast.delta.varint import encode_varint
from gymfast.errors import ChecksumError, FormatError

_BAD_BLOCK_INDEX = 50
_RESULT_CHECK = 58


class ReferenceBackend(Backend):
    """The back end that `select("reference")` returns."""

    name = "reference"
    kinds = (memory.CPU,)

    def check64(self, *parts: bytes | bytearray | memoryview) -> int:
        """fold64 of the digest of the concatenation of parts."""
        return check64(*parts)

    def digest_blocks(
        self,
        data: U8,
        geometry: Geometry,
        threads: int,  # noqa: ARG002
        first_block: int = 0,
        num_blocks: int | None = None,
    ) -> NDArray[np.uint64]:
        """Partial digests of a range of blocks, [num_blocks, 2]."""
        end = geometry.num_blocks if num_blocks is None else first_block + num_blocks
        return digest_blocks(_checked(data, geometry), geometry, range(first_block, end))

    def class_params(self, base: U8, unit_bytes: int) -> tuple[int, int]:
        """class_shift and class_base of a base tensor."""
        return sample_class_params(unit_view(base, unit_bytes), unit_bytes)

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
        threads: int,  # noqa: ARG002
    ) -> EncodedBlocks:
        """See Backend; the undo blob is pairs of unit offset and old value, 8 bytes each."""
        unit_bytes = geometry.unit_bytes
        base_units = unit_view(_checked(base, geometry), unit_bytes)
        new_units = unit_view(_checked(new, geometry), unit_bytes)
        _check_range(geometry, first_block, num_blocks)
        tables, payloads, changed = [], [], [np.zeros(0, np.int64)]
        rows = digests[first_block : first_block + num_blocks].copy()
        for i in range(num_blocks):
            at = block_units(geometry, first_block + i)
            old, fresh = base_units[at].astype(np.int64), new_units[at].astype(np.int64)
            mode, payload = encode_block(old, fresh, unit_bytes, params)
            rows[i] += _digest_change(at, old, fresh, unit_bytes)
            tables.append(_table_entry(mode, payload, rows[i]))
            payloads.append(payload)
            changed.append(at[old != fresh])
        where = np.concatenate(changed)
        log = np.stack([where, base_units[where].astype(np.int64)], axis=1).astype("<i8")
        digests[first_block : first_block + num_blocks] = rows
        if update:
            base_units[where] = new_units[where]
        body = b"".join(tables + payloads) if where.size else b""
        return EncodedBlocks(body, where.size, log.tobytes() if undo else b"")

    def rollback_blocks(self, base: U8, undo: bytes | memoryview, geometry: Geometry) -> None:
        """Puts back the old values of an undo blob of this back end."""
        log = np.frombuffer(undo, "<i8").reshape(-1, 2)
        units = unit_view(_checked(base, geometry), geometry.unit_bytes)
        units[log[:, 0]] = log[:, 1].astype(units.dtype)

    def apply_blocks(
        self,
        data: U8,
        body: bytes | memoryview,
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        first_block: int,
        num_blocks: int,
        threads: int,  # noqa: ARG002
    ) -> int:
        """See Backend; every block of the section is decoded and checked before the first write."""
        unit_bytes = geometry.unit_bytes
        units = unit_view(_checked(data, geometry), unit_bytes)
        _check_range(geometry, first_block, num_blocks, least=1)
        table = read_block_table(body, num_blocks, unit_bytes, where=f"blocks from {first_block}")
        rows = digests[first_block : first_block + num_blocks].copy()
        writes: list[tuple[I64, I64]] = []
        payload_at = 0
        for i, mode in enumerate(table.modes):
            if mode is Mode.UNCHANGED:
                continue
            at = block_units(geometry, first_block + i)
            old = units[at].astype(np.int64)
            payload = table.payloads[payload_at : payload_at + table.payload_bytes[i]]
            payload_at += len(payload)
            fresh = decode_block(mode, payload, old, unit_bytes, params)
            rows[i] += _digest_change(at, old, fresh, unit_bytes)
            _check_result(first_block + i, rows[i], table.checks[i])
            changed = old != fresh
            writes.append((at[changed], fresh[changed]))
        for at, values in writes:
            units[at] = values.astype(units.dtype)
        digests[first_block : first_block + num_blocks] = rows
        return sum(at.size for at, _ in writes)


def _digest_change(at: I64, old: I64, fresh: I64, unit_bytes: int) -> NDArray[np.uint64]:
    """What the changed units of a block add to its partial digest."""
    changed = old != fresh
    difference = (fresh[changed] - old[changed]).astype(np.uint64)
    return digest_units(at[changed], difference, unit_bytes)


def _table_entry(mode: Mode, payload: bytes, digest: NDArray[np.uint64]) -> bytes:
    if mode is Mode.UNCHANGED:
        return bytes((mode,))
    check = fold32(int(digest[0]), int(digest[1]))
    return bytes((mode,)) + encode_varint(len(payload)) + check.to_bytes(4, "little")


def _check_result(block: int, digest: NDArray[np.uint64], stated: int) -> None:
    found = fold32(int(digest[0]), int(digest[1]))
    if found != stated:
        raise ChecksumError(
            f"block {block}: the result has digest {found:08x}, the frame says {stated:08x}: "
            "damaged frame, or a base whose bytes are not those of its digest",
            _RESULT_CHECK,
        )


def _check_range(geometry: Geometry, first_block: int, num_blocks: int, least: int = 0) -> None:
    if first_block < 0 or num_blocks < least or first_block + num_blocks > geometry.num_blocks:
        raise FormatError(
            f"{num_blocks} blocks from {first_block}, the tensor has {geometry.num_blocks}",
            _BAD_BLOCK_INDEX,
        )


def _checked(data: U8, geometry: Geometry) -> U8:
    if data.shape != (geometry.num_bytes,):
        raise ValueError(f"array of shape {data.shape}, expected ({geometry.num_bytes},)")
    return data
