"""Contents of zstd frames in fewer bytes: their changes as a gymfast frame, without the weights.

A unit of 16 bits that changes is coded by the rank of its symbol among the symbols of the frame,
the most frequent first: that takes what an entropy code would, but for half a bit. Ranks go to
both sides of one value, which all other units have: so the sign in the frame carries a bit as well.
The format is described in docs/hf-delta.md, 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.apply import apply, inspect
from gymfast.delta.encode import encode
from gymfast.delta.hf_delta.change_symbols import (
    NUM_SYMBOLS,
    U16,
    Chunk,
    Content,
    Symbols,
    changed_units,
    join_overwrite,
    join_xor,
    overwrite_bytes,
    whole_words,
)
from gymfast.delta.state import State
from gymfast.delta.tensors import Tensor
from gymfast.errors import FormatError

UNCHANGED = 2**14
_MAX_RANKS = 2 * (UNCHANGED - 1)
_LISTED = 0  # in the place of a symbol: of these units the symbols are listed, in order
_UNITS, _SYMBOLS = "units", "symbols"
_DTYPES = {"xor": ("U16", "<u2"), "overwrite": ("U32", "<u4")}  # of symbols


def pack(contents: Sequence[Content], threads: int) -> bytes:
    """The frame of contents of one encoding.

    Takes 8 bytes per change, and 4 per unit.
    """
    encoding = contents[0].encoding
    starts = _starts([content.num_units for content in contents])
    chunks = [
        Chunk(start + chunk.start, chunk.at, chunk.symbols)
        for start, content in zip(starts, contents, strict=False)
        for chunk in content.split()
    ]
    counts = np.zeros(NUM_SYMBOLS[encoding], np.int64)
    for chunk in chunks:
        counts += np.bincount(chunk.symbols, minlength=counts.size)
    table = _ranked(counts)
    values = _values(np.arange(table.size))
    value_of = np.empty(counts.size, np.uint16)
    value_of[:] = values[table == _LISTED] if _LISTED in table else UNCHANGED
    value_of[table] = values
    is_listed = np.ones(counts.size, np.bool_)
    is_listed[table] = False
    units, old = (np.full(starts[-1], UNCHANGED, np.uint16) for _ in range(2))
    listed = []
    for chunk in chunks:
        units[chunk.start :][chunk.at] = value_of[chunk.symbols]
        listed.append(chunk.symbols[is_listed[chunk.symbols]])
    symbols = np.concatenate([table, *listed]).astype(_DTYPES[encoding][1])
    new = {_UNITS: units, _SYMBOLS: symbols}
    return encode({_UNITS: old}, new, profile="fast", threads=threads)


def unpack(
    frame: bytes, encoding: str, sizes: Sequence[tuple[int, int]], threads: int
) -> list[bytes]:
    """Zstd frames of the contents that were packed, as gymfast writes them; sizes: bytes, units.

    Takes 2 bytes per unit, 4 more per unit of a content, and the frames.
    Raises FormatError (also as ChecksumError) for a frame that is damaged or none of this sort.
    """
    starts = _starts([num_units for _, num_units in sizes])
    units, symbols = _decode(frame, encoding, starts[-1], threads)
    reader = _Reader(units, symbols)
    frames = [
        _zstd(reader.read(start, num_units), encoding, num_bytes, num_units, threads)
        for start, (num_bytes, num_units) in zip(starts, sizes, strict=False)
    ]
    reader.finish()
    return frames


def _zstd(
    chunks: Iterator[Chunk], encoding: str, num_bytes: int, num_units: int, threads: int
) -> bytes:
    from gymfast import _core

    if encoding == "xor":
        content = join_xor(chunks, num_bytes)
        return _core.zstd_xor_frame(np.zeros_like(content), content, threads)
    old, new, num_changed = join_overwrite(chunks, num_units)
    if overwrite_bytes(num_changed) != num_bytes:
        raise _not_ours(f"{num_changed} changed bytes", f"content of {num_bytes} bytes")
    return _core.zstd_overwrite_frame(old, new, threads)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where the units of each content begin, in whole words; and where they end."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + whole_words(size, 4))
    return starts


def _ranked(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Symbols by rank; _LISTED stands for those that occur once, or are too rare for a rank."""
    often = np.flatnonzero(counts > 1)
    table = often[np.argsort(-counts[often], kind="stable")][: _MAX_RANKS - 1]
    num_listed = int(counts.sum() - counts[table].sum())
    if not num_listed:
        return table
    return np.insert(table, np.searchsorted(-counts[table], -num_listed, side="right"), _LISTED)


def _values(ranks: NDArray[np.int64]) -> U16:
    """1 above UNCHANGED, 1 below, 2 above, 2 below, ..."""
    steps = ranks // 2 + 1
    return np.where(ranks % 2 == 0, UNCHANGED + steps, UNCHANGED - steps).astype(np.uint16)


def _ranks(values: U16) -> NDArray[np.int64]:
    steps = values.astype(np.int64) - UNCHANGED
    return 2 * (np.abs(steps) - 1) + (steps < 0)


def _decode(frame: bytes, encoding: str, num_units: int, threads: int) -> tuple[U16, Symbols]:
    """Units; table and listed symbols."""
    dtype, numpy_dtype = _DTYPES[encoding]
    specs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in inspect(frame).tensors}
    found = specs.get(_UNITS), specs.get(_SYMBOLS, ("", ()))[0]
    if found != (("U16", (num_units,)), dtype) or len(specs) != 2:
        raise _not_ours(f"tensors {specs}", f"{num_units} U16 units, {dtype} symbols")
    units = np.full(num_units, UNCHANGED, np.uint16)
    live = Tensor("U16", (num_units,), units.view(np.uint8))
    state = State.attach({_UNITS: live}, threads=threads)
    apply(state, frame)
    return units, state.tensors[_SYMBOLS].data.view(numpy_dtype)


class _Reader:
    """Turns units into changes again; each unit is read once, in order."""

    def __init__(self, units: U16, symbols: Symbols) -> None:
        farthest = np.array([units.min(), units.max()] if units.size else [], np.uint16)
        num_ranks = 1 + int(_ranks(farthest[farthest != UNCHANGED]).max(initial=-1))
        self._units = units
        self._table, self._listed = symbols[:num_ranks], symbols[num_ranks:]
        if self._table.size != num_ranks:
            raise _not_ours(f"{self._table.size} symbols", f"{num_ranks} or more")

    def read(self, start: int, num_units: int) -> Iterator[Chunk]:
        """The changes of one content."""
        units = self._units[start : start + whole_words(num_units, 4)]
        for first, at in changed_units(units, UNCHANGED):
            found = self._table[_ranks(units[first:][at])]
            is_listed = found == _LISTED
            count = int(np.count_nonzero(is_listed))
            if self._listed.size < count or (at.size and first + at[-1] >= num_units):
                raise _not_ours(f"{self._listed.size} listed symbols", f"{count} or more")
            found[is_listed], self._listed = self._listed[:count], self._listed[count:]
            yield Chunk(first, at.astype(np.uint32), found)

    def finish(self) -> None:
        """Raises FormatError if there are more symbols than units."""
        if self._listed.size:
            raise _not_ours(f"{self._listed.size} symbols for no unit", "none")


def _not_ours(found: str, expected: str) -> FormatError:
    return FormatError(
        f"a frame with {found}, expected {expected}: no packed changes; remove it and put the "
        "version again"
    )
