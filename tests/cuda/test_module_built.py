"""The module that the build made: it loads without a GPU and refuses memory of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
from cuda_backend import InterfaceOnly
from cuda_calls import ARRAYS, CALLS


@pytest.fixture
def built() -> ModuleType:
    if find_spec("gymfast._cuda") is None:
        pytest.skip("needs nvcc of the CUDA toolkit")
    from gymfast import _cuda

    return _cuda


def test_without_a_gpu_it_loads_and_counts_none(built: ModuleType) -> None:
    program = "from gymfast import _cuda; print(_cuda.device_count())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0\n"


@pytest.mark.gpu
def test_a_gpu_is_counted(built: ModuleType) -> None:
    assert built.device_count() >= 1


@pytest.mark.parametrize("wrap", [lambda array: array, InterfaceOnly], ids=["dlpack", "interface"])
@pytest.mark.parametrize("name", CALLS)
def test_memory_of_the_cpu_is_refused(built: ModuleType, name: str, wrap) -> None:
    call = CALLS[name](built)
    before = {key: array.copy() for key, array in call.arrays().items()}
    arrays = call.arrays()
    call.arguments |= {key: wrap(array) for key, array in arrays.items()}
    with pytest.raises(ValueError, match=rf"^{ARRAYS[name][0]} is CPU memory.*, expected CUDA mem"):
        call()
    for key, array in arrays.items():
        assert np.array_equal(array, before[key])


def test_sizes_need_no_gpu(built: ModuleType, cuda_module: ModuleType) -> None:
    shape = (200_000, 2, 1000, 16, 100)
    for count in (0, 1, 7, 50):
        for name in ("encode_body_capacity", "apply_scratch_bytes"):
            expected = getattr(cuda_module, name)(*shape, count)
            assert getattr(built, name)(*shape, count) == expected
        for name in ("encode_scratch_bytes", "undo_offsets"):
            expected = getattr(cuda_module, name)(*shape, 1, count)
            assert getattr(built, name)(*shape, 1, count) == expected
