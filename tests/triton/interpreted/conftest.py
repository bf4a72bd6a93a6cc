"""The Triton back end in the interpreter, with the NumPy arrays that the shared tests hand over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gymfast.delta.backends import Backend, BlockParams, EncodedBlocks, select
from gymfast.delta.geometry import Geometry


def shared(array: np.ndarray) -> torch.Tensor:
    """A tensor on the memory of an array; of a copy if the array is read-only."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class OnTorch:
    """A back end of tensors behind the interface of arrays."""

    name = "triton"

    def __init__(self) -> None:
        self._backend = select("triton")
        self.check64 = self._backend.check64

    def digest_blocks(self, data, *args) -> np.ndarray:
        return self._backend.digest_blocks(shared(data), *args)

    def class_params(self, base, unit_bytes: int) -> tuple[int, int]:
        return self._backend.class_params(shared(base), unit_bytes)

    def encode_blocks(self, base, new, *args, **options) -> EncodedBlocks:
        return self._backend.encode_blocks(shared(base), shared(new), *args, **options)

    def rollback_blocks(self, base, undo: bytes, geometry: Geometry) -> None:
        self._backend.rollback_blocks(shared(base), undo, geometry)

    def apply_blocks(self, data, body: bytes, geometry, params: BlockParams, *args) -> int:
        return self._backend.apply_blocks(shared(data), body, geometry, params, *args)


@pytest.fixture
def backend() -> Backend:
    return OnTorch()


@pytest.fixture
def reference() -> Backend:
    return select("reference")


@pytest.fixture
def cpu() -> Backend:
    return select("cpu")
