"""What only a GPU can show of gymfast._cuda: dtypes of torch, streams, devices."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
from cuda_backend import shape_of
from cuda_calls import digest_call

from gymfast.delta.backends import select
from gymfast.delta.geometry import Geometry

pytestmark = pytest.mark.gpu


@pytest.fixture
def built() -> ModuleType:
    if find_spec("gymfast._cuda") is None:
        pytest.skip("needs nvcc of the CUDA toolkit")
    from gymfast import _cuda

    return _cuda


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int64"])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_tensors_of_any_dtype_are_bytes(built, dtype: str, is_parameter: bool) -> None:
    import torch

    raw = torch.randint(0, 256, (8000,), dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype)).to("cuda")
    if is_parameter and tensor.is_floating_point():
        tensor = torch.nn.Parameter(tensor)
    geometry = Geometry(8000, 1, 8000, 1, 3000)
    rows = torch.zeros((3, 2), dtype=torch.int64, device="cuda")
    built.digest_blocks(tensor, *shape_of(geometry), 0, 3, rows, 0)
    expected = select("cpu").digest_blocks(raw.numpy(), geometry, 1)
    assert np.array_equal(rows.cpu().numpy().view(np.uint64), expected)


def test_work_is_ordered_by_its_stream(built) -> None:
    import torch

    size = 2**26
    geometry = Geometry(size, 1, size, 1, 2**20)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        data = torch.zeros(size, dtype=torch.uint8, device="cuda")
        for value in range(20):
            data.fill_(value)
        rows = torch.zeros((64, 2), dtype=torch.int64, device="cuda")
        built.digest_blocks(data, *shape_of(geometry), 0, 64, rows, stream.cuda_stream)
        found = rows.cpu()
    expected = select("cpu").digest_blocks(np.full(size, 19, np.uint8), geometry, 1)
    assert np.array_equal(found.numpy().view(np.uint64), expected)


def test_a_tensor_of_the_cpu_between_tensors_of_the_gpu_is_refused(built) -> None:
    import torch

    call = digest_call(built)
    call.arguments["data"] = torch.from_numpy(call.arguments["data"]).cuda()
    with pytest.raises(ValueError, match=r"^digests is CPU memory that no GPU reaches, expected"):
        call()
