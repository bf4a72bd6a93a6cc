"""Back ends: each does the five operations of the codec and produces the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gymfast.delta import memory
from gymfast.delta.geometry import Geometry
from gymfast.delta.memory import Data
from gymfast.delta.records import BlocksRecord
from gymfast.errors import MissingDependencyError

NAMES = ("auto", "cpu", "reference", "cuda", "triton")


@dataclass(frozen=True)
class BlockParams:
    """What a back end needs besides the geometry; profile is 0 auto, 1 fast, 2 small."""

    profile: int
    class_shift: int
    class_base: int
    has_base: bool


@dataclass(frozen=True)
class EncodedBlocks:
    """Blocks of one section; body and undo are empty if nothing changed, undo also if not asked."""

    body: bytes
    num_changed: int
    undo: bytes = b""


class Backend(Protocol):
    """The operations of the codec; byte arrays are 1-D, contiguous and of geometry.num_bytes.

    `kinds` says in what memory they may lie ("cpu", "cuda", "pinned"), the usual one first.
    """

    @property
    def name(self) -> str:
        """What `select` calls it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of memory it works on."""

    def takes(self, kind: str) -> bool:
        """Whether it works on this kind of memory here."""
        return kind in self.kinds

    def check64(self, *parts: bytes | bytearray | memoryview) -> int:
        """fold64 of the digest of the concatenation of parts."""

    def digest_blocks(
        self,
        data: Data,
        geometry: Geometry,
        threads: int,
        first_block: int = 0,
        num_blocks: int | None = None,
    ) -> NDArray[np.uint64]:
        """Partial digests of all blocks or of a range, [num_blocks, 2].

        Reads nothing but these blocks of data, which always stands for the whole tensor.
        """

    def class_params(self, base: Data, unit_bytes: int) -> tuple[int, int]:
        """class_shift and class_base of a base tensor (docs/wire-format.md section 10)."""

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
        """Block table and payloads that turn base into new, within the given blocks.

        `digests` [geometry.num_blocks, 2] are of the base on entry; on return the rows of these
        blocks are of new. With `update` these blocks of base become those of new; `undo` asks
        for what rollback_blocks takes. If it raises, base and digests are as they were.
        """

    def rollback_blocks(self, base: Data, undo: bytes | memoryview, geometry: Geometry) -> None:
        """Puts back what base held before the encode_blocks(update=True) that returned undo."""

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
        """Units changed; data and the rows of digests hold the new state on return.

        Raises FormatError for R4, R10 and R20..R25 and ChecksumError for R26 before it writes a
        bad block.
        """

    # Many sections in one call: what a GPU needs to be busy. A back end that gains nothing by it
    # inherits what follows.

    def sections_per_call(self, data: Data, geometry: Geometry, params: BlockParams) -> int:  # noqa: ARG002
        """How many sections of this tensor a call should take at most."""
        return 1

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
        """As encode_blocks, one for each section of geometry.section_blocks() blocks.

        The first one may hold what undoes them all.
        """
        step, end = geometry.section_blocks(), first_block + num_blocks
        return [
            self.encode_blocks(
                *(base, new, geometry, params, digests, first, min(step, end - first)),
                update=update,
                undo=undo,
                threads=threads,
            )
            for first in range(first_block, end, step)
        ]

    def apply_sections(
        self,
        data: Data,
        sections: Sequence[BlocksRecord],
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        threads: int,
    ) -> int:
        """As apply_blocks, for sections in order."""
        return sum(
            self.apply_blocks(
                *(data, section.body, geometry, params, digests),
                *(section.first_block, section.num_blocks, threads),
            )
            for section in sections
        )

    def apply_and_read(
        self,
        data: Data,
        sections: Sequence[BlocksRecord],
        geometry: Geometry,
        params: BlockParams,
        digests: NDArray[np.uint64],
        threads: int,
    ) -> tuple[int, list[NDArray[np.uint64]]]:
        """As apply_sections; also the partial digests of the blocks of each section, read again.

        They are those of the bytes in data after these blocks were written.
        """
        num_changed = self.apply_sections(data, sections, geometry, params, digests, threads)
        return num_changed, [
            self.digest_blocks(data, geometry, threads, section.first_block, section.num_blocks)
            for section in sections
        ]


def select(name: str = "auto") -> Backend:
    """The back end of this name; "auto" is the fastest that runs where the tensors lie.

    Raises ValueError if the name is unknown, MissingDependencyError without gymfast._core, for
    "cuda" without gymfast._cuda or torch, and for "triton" without torch or triton.
    """
    if name not in NAMES:
        raise ValueError(f"back end {name!r}, expected one of {', '.join(NAMES)}")
    return _MAKERS[name]()


def require_kinds(backend: Backend, place: str, what: str) -> None:
    """Raises ValueError, with advice, if a back end does not work on what lies at a place.

    MissingDependencyError if "auto" has none for it.
    """
    kind = memory.kind_of(place)
    if backend.takes(kind):
        return
    advice = "use backend='auto' or 'cpu', or move it to a CUDA device"
    if kind == memory.PINNED:
        advice = "pinned memory needs backend='cuda', which needs gymfast._cuda"
    elif backend.kinds == (memory.CPU,):
        advice = "backend='auto' takes it where it is, or pass .cpu()"
    raise ValueError(
        f"{what} is in {place} memory, backend={backend.name!r} works on "
        f"{' or '.join(backend.kinds)} memory: {advice}"
    )


def _auto() -> Backend:
    from gymfast.delta.backends.auto import AutoBackend

    return AutoBackend(_cpu())


def _cpu() -> Backend:
    try:
        from gymfast.delta.backends.cpu import CpuBackend
    except ImportError as error:
        raise MissingDependencyError(
            f"the extension module gymfast._core does not import ({error}): install gymfast from a "
            "wheel or with a C++20 compiler; backend='reference' works without it, slowly"
        ) from error
    return CpuBackend()


def _reference() -> Backend:
    from gymfast.delta.backends.reference import ReferenceBackend

    return ReferenceBackend()


def _cuda() -> Backend:
    try:
        from gymfast.delta.backends.cuda import CudaBackend
    except ImportError as error:
        raise MissingDependencyError(
            f"backend='cuda' needs torch and the extension module gymfast._cuda ({error}): install "
            "gymfast[torch] on a machine that has nvcc, or use backend='triton' for tensors in "
            "CUDA memory, backend='cpu' for those in CPU memory"
        ) from error
    backend: Backend = CudaBackend()
    return backend


def _triton() -> Backend:
    try:
        from gymfast.delta.backends.triton import TritonBackend
    except ImportError as error:
        raise MissingDependencyError(
            f"backend='triton' needs torch and triton ({error}): install gymfast[triton], or use "
            "backend='cpu' with tensors in CPU memory"
        ) from error
    backend: Backend = TritonBackend()
    return backend


_MAKERS = {
    "auto": _auto,
    "cpu": _cpu,
    "reference": _reference,
    "cuda": _cuda,
    "triton": _triton,
}
