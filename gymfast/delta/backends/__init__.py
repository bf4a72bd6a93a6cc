"""Back ends: each does the five operations of the codec and produces the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gymfast.delta.geometry import Geometry
from gymfast.errors import MissingDependencyError

U8 = NDArray[np.uint8]
NAMES = ("auto", "cpu", "reference", "triton")


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
    """The operations of the codec; byte arrays are 1-D, contiguous and of geometry.num_bytes."""

    @property
    def name(self) -> str:
        """What `select` calls it."""

    def check64(self, *parts: bytes | bytearray | memoryview) -> int:
        """fold64 of the digest of the concatenation of parts."""

    def digest_blocks(
        self,
        data: U8,
        geometry: Geometry,
        threads: int,
        first_block: int = 0,
        num_blocks: int | None = None,
    ) -> NDArray[np.uint64]:
        """Partial digests of all blocks or of a range, [num_blocks, 2].

        Reads nothing but these blocks of data, which always stands for the whole tensor.
        """

    def class_params(self, base: U8, unit_bytes: int) -> tuple[int, int]:
        """class_shift and class_base of a base tensor (docs/wire-format.md section 10)."""

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
        """Block table and payloads that turn base into new, within the given blocks.

        `digests` [geometry.num_blocks, 2] are of the base on entry; on return the rows of these
        blocks are of new. With `update` these blocks of base become those of new; `undo` asks
        for what rollback_blocks takes. If it raises, base and digests are as they were.
        """

    def rollback_blocks(self, base: U8, undo: bytes | memoryview, geometry: Geometry) -> None:
        """Puts back what base held before the encode_blocks(update=True) that returned undo."""

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
        """Units changed; data and the rows of digests hold the new state on return.

        Raises FormatError for R4, R10 and R20..R25 and ChecksumError for R26 before it writes a
        bad block.
        """


def select(name: str = "auto") -> Backend:
    """The back end of this name; "auto" is the fastest that runs here.

    Raises ValueError if the name is unknown, MissingDependencyError without gymfast._core, and for
    "triton" without torch or triton.
    """
    if name not in NAMES:
        raise ValueError(f"back end {name!r}, expected one of {', '.join(NAMES)}")
    if name == "reference":
        from gymfast.delta.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "triton":
        return _triton()
    try:
        from gymfast.delta.backends.cpu import CpuBackend
    except ImportError as error:
        raise MissingDependencyError(
            f"the extension module gymfast._core does not import ({error}): install gymfast from a "
            "wheel or with a C++20 compiler; backend='reference' works without it, slowly"
        ) from error
    return CpuBackend()


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
