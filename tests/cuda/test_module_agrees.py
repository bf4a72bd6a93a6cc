"""gymfast._cuda gives what _core gives: on the shim everywhere, on a GPU where there is one."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
from cuda_backend import (
    CudaBackend,
    InterfaceOnly,
    aligned,
    interface_memory,
    numpy_memory,
    pinned_memory,
    shape_of,
    torch_memory,
)
from cuda_cases import PROFILES, ends_alike, large_case, many_blocks, outcome
from delta_cases import Case, apply, case_of, cases, encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymfast.delta.backends import Backend, select
from gymfast.delta.geometry import Geometry
from gymfast.errors import FormatError

quick = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
OTHER_LIBRARIES = {"interface": interface_memory, "torch": lambda: torch_memory("cpu")}


ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("gpu", "gpu, pinned base")]


@pytest.fixture(params=["shim", *ON_GPU])
def device(request: pytest.FixtureRequest) -> CudaBackend:
    """The shim on arrays of NumPy, and the real module on a GPU."""
    if request.param == "shim":
        return CudaBackend(request.getfixturevalue("cuda_module"), numpy_memory())
    if find_spec("gymfast._cuda") is None:
        pytest.skip("needs nvcc of the CUDA toolkit")
    import torch

    from gymfast import _cuda

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    snapshots = pinned_memory() if "pinned" in request.param else None
    return CudaBackend(_cuda, torch_memory("cuda"), snapshots)


@pytest.fixture
def cpu() -> Backend:
    return select("cpu")


@quick
@given(case=cases(), data=st.data())
def test_digests_are_equal(device, cpu, case: Case, data) -> None:
    first = data.draw(st.integers(0, case.geometry.num_blocks))
    count = data.draw(st.integers(0, case.geometry.num_blocks - first))
    found = device.digest_blocks(case.base, case.geometry, 1, first, count)
    assert np.array_equal(found, cpu.digest_blocks(case.base, case.geometry, 1, first, count))


@quick
@given(case=cases(), update=st.booleans())
def test_encode_writes_the_same_bytes_and_rolls_back(device, cpu, case: Case, update) -> None:
    expected = encode(cpu, case)
    base, digests = case.base.copy(), cpu.digest_blocks(case.base, case.geometry, 1)
    found = device.encode_blocks(
        *(base, case.new, case.geometry, case.params(cpu), digests, 0, case.geometry.num_blocks),
        update=update,
        undo=True,
        threads=1,
    )
    assert (found.body, found.num_changed) == (expected.body, expected.num_changed)
    assert np.array_equal(digests, cpu.digest_blocks(case.new, case.geometry, 1))
    assert np.array_equal(base, case.new if update else case.base)
    device.rollback_blocks(base, found.undo, case.geometry)
    assert np.array_equal(base, case.base)


@quick
@given(case=cases())
def test_applied_tensors_are_equal(device, cpu, case: Case) -> None:
    encoded = encode(cpu, case)
    if not encoded.body:
        return
    data, num_changed = apply(device, case, encoded.body)
    assert np.array_equal(data, case.new)
    assert num_changed == case.num_changed()


@settings(quick, max_examples=100)
@given(case=cases(max_units=300), data=st.data())
def test_damaged_bodies_end_alike(device, cpu, case: Case, data) -> None:
    body = bytearray(encode(cpu, case).body)
    if not body:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from((0, 0, 0, 1, 2)))
    damaged = bytes(body[: len(body) - cut])
    assert ends_alike(outcome(device, case, damaged), outcome(cpu, case, damaged))


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_large_blocks_are_equal(device, cpu, unit_bytes: int, profile: int) -> None:
    check_all_operations(device, cpu, large_case(unit_bytes, 0.05, profile))


@pytest.mark.parametrize("library", OTHER_LIBRARIES.values(), ids=OTHER_LIBRARIES)
def test_arrays_of_other_libraries_are_as_good(cuda_module, cpu, library) -> None:
    check_all_operations(CudaBackend(cuda_module, library()), cpu, many_blocks())


def check_all_operations(device: CudaBackend, cpu: Backend, case: Case) -> None:
    assert case.params(device) == case.params(cpu)
    old = case.base.copy()
    expected = encode(cpu, case)
    found = encode(device, case, update=True, undo=True)
    assert found.body == expected.body
    assert np.array_equal(case.base, case.new)
    device.rollback_blocks(case.base, found.undo, case.geometry)
    assert np.array_equal(case.base, old)
    assert np.array_equal(apply(device, case, expected.body)[0], case.new)


TILED = Geometry(600 * 70, 2, 70, 100, 32)  # 6 x 3 blocks, the last of a row 6 units wide


@pytest.mark.parametrize("per_section", [1, 4, 40])
@pytest.mark.parametrize("geometry", [many_blocks().geometry, TILED], ids=["flat", "tiled"])
def test_sections_of_one_call_are_those_of_many_calls(
    device, cpu, geometry: Geometry, per_section: int
) -> None:
    size = geometry.num_bytes
    base, new = many_blocks().base.copy(), many_blocks().new
    base, new = np.resize(base, size), np.resize(new, size)
    case = Case(base.copy(), new, geometry)
    digests, params = cpu.digest_blocks(base, geometry, 1), case.params(cpu)
    first, count = 2, geometry.num_blocks - 3
    run = (geometry, params)
    mine, theirs, expected = digests.copy(), digests.copy(), base.copy()
    body, sections, undo = device.encode_sections(
        *(base, new, *run, mine, first, count), update=True, blocks_per_section=per_section
    )
    at = 0
    for block, num_blocks, offset, length, num_changed in sections.astype(int):
        args = (expected, new, *run, theirs, block, num_blocks)
        one = cpu.encode_blocks(*args, update=True, undo=False, threads=1)
        assert offset == at
        assert body[offset : offset + length] == one.body
        assert num_changed == one.num_changed
        at += length
    assert np.array_equal(mine, theirs)
    assert np.array_equal(base, expected)
    device.rollback(base, undo, geometry, first, count)
    assert np.array_equal(base, case.base)
    rows = digests.copy()
    used = sections[sections[:, 3] > 0]
    assert device.apply_sections(base, body, *run, rows, first, count, used) == used[:, 4].sum()
    assert np.array_equal(base, expected)
    assert np.array_equal(rows, theirs)


@pytest.mark.parametrize("unit_bytes", [1, 2, 4])
@pytest.mark.parametrize("num_units", [0, 1, 2, 127, 1023, 1024, 1025, 5000, 70_001])
def test_class_parameters_are_equal(device, cpu, unit_bytes: int, num_units: int) -> None:
    rng = np.random.default_rng(num_units)
    values = (rng.standard_normal(num_units) * rng.choice([1e-6, 0.02, 3], num_units)).astype("<f4")
    units = (values.view("<u4") >> (32 - 8 * unit_bytes)).astype(f"<u{unit_bytes}")
    base = units.view(np.uint8)
    assert device.class_params(base, unit_bytes) == cpu.class_params(base, unit_bytes)


def test_samples_are_those_of_the_specification(device) -> None:
    num_units = 1_000_003
    units = np.random.default_rng(0).integers(0, 2**16, num_units).astype("<u2")
    out = device.garbage(1024)
    data = device.memory.put(units)
    assert device.module.sample_classes(data, num_units, 2, out, 0) == 1024
    expected = [int(units[i * num_units // 1024]) >> 7 & 255 for i in range(1024)]
    assert device.memory.get(out).tolist() == expected


def test_an_undo_list_with_damage_writes_only_to_its_blocks(device, cpu) -> None:
    case = many_blocks()
    geometry, count = case.geometry, 7
    base, digests = case.base.copy(), cpu.digest_blocks(case.base, case.geometry, 1)
    run = (geometry, case.params(cpu), digests, 0, count)
    _, sections, undo = device.encode_sections(
        base, case.new, *run, update=True, blocks_per_section=count
    )
    changed = int(sections[0, 4])
    log = bytearray(undo)
    log[4 * count : 4 * count + 4 * changed] = b"\xff" * 4 * changed
    found = base.copy()
    device.rollback(found, bytes(log), geometry, 0, count)
    assert np.array_equal(found, base)
    log[: 4 * count] = b"\xff" * 4 * count
    device.rollback(found, bytes(log), geometry, 0, count)
    assert np.array_equal(found, base)


def test_empty_tensors_have_no_blocks(device, cpu) -> None:
    case = case_of([], [], 2)
    assert device.digest_blocks(case.base, case.geometry, 1).shape == (0, 2)
    run = (case.geometry, case.params(cpu), np.zeros((0, 2), np.uint64), 0, 0)
    with pytest.raises(FormatError) as caught:
        device.apply_blocks(case.base, b"", *run, 1)
    assert caught.value.number == 50


@pytest.mark.parametrize("dtype", ["int16", "float16", "uint64", "complex64", "bool"])
def test_any_dtype_and_shape_is_bytes(cuda_module: ModuleType, cpu, dtype: str) -> None:
    data = aligned(np.random.default_rng(0).integers(0, 2, 4800).astype(np.uint8))
    geometry = Geometry(4800, 1, 4800, 1, 4800)
    expected = cpu.digest_blocks(data, geometry, 1)
    shaped = data.view(dtype).reshape(2, 3, 1, -1)
    for array in (shaped, InterfaceOnly(shaped)):
        rows = np.zeros((1, 2), np.uint64)
        cuda_module.digest_blocks(array, *shape_of(geometry), 0, 1, rows, 0)
        assert np.array_equal(rows, expected)


def test_bfloat16_tensors_of_torch_are_bytes(cuda_module: ModuleType, cpu) -> None:
    import torch

    tensor = torch.arange(1000, dtype=torch.float32).to(torch.bfloat16).reshape(10, 100)
    geometry = Geometry(1000, 2, 1000, 1, 1000)
    rows = torch.zeros((1, 2), dtype=torch.int64)
    cuda_module.digest_blocks(tensor, *shape_of(geometry), 0, 1, rows, 0)
    data = tensor.view(torch.uint8).numpy().reshape(-1)
    assert np.array_equal(rows.numpy().view(np.uint64), cpu.digest_blocks(data, geometry, 1))


def test_a_parameter_of_torch_is_its_memory(cuda_module: ModuleType) -> None:
    import torch

    weight = torch.nn.Parameter(torch.zeros(1000))
    result = np.zeros(2, np.uint64)
    raw = torch.arange(1000, dtype=torch.float32)
    geometry = Geometry(1000, 4, 1000, 1, 1000)
    rows = np.zeros((1, 2), np.uint64)
    case = Case(np.zeros(4000, np.uint8), raw.numpy().view(np.uint8), geometry, 0, has_base=False)
    body = np.frombuffer(encode(select("cpu"), case).body, np.uint8)
    sections = np.array([[0, 1, 0, body.size, 0]], np.uint64)
    scratch = aligned(np.zeros(cuda_module.apply_scratch_bytes(*shape_of(geometry), 1), np.uint8))
    run = (*shape_of(geometry), 0, 0, False, rows, 0, 1)
    cuda_module.apply_blocks(weight, body, *run, sections, result, scratch, 0)
    assert result[1] == 999
    assert torch.equal(weight.detach(), raw)


class FailingInterface:
    """An array whose __cuda_array_interface__ fails, as that of a CUDA parameter of torch does."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        raise RuntimeError

    def __dlpack__(self, **arguments: object) -> object:
        return self.data.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()


def test_dlpack_is_asked_where_the_interface_fails(cuda_module: ModuleType, cpu) -> None:
    data = np.arange(1000, dtype=np.uint8)
    geometry = Geometry(1000, 1, 1000, 1, 1000)
    rows = np.zeros((1, 2), np.uint64)
    cuda_module.digest_blocks(FailingInterface(data), *shape_of(geometry), 0, 1, rows, 0)
    assert np.array_equal(rows, cpu.digest_blocks(data, geometry, 1))
