"""What the codec takes: arrays of NumPy and torch, of every dtype, shape and layout."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from gymfast.delta import Tensor, as_tensor
from gymfast.delta.geometry import num_bytes_of
from gymfast.delta.tensors import check_name, identity, like, overlapping, why_not_live, zeros

TORCH_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


@pytest.mark.parametrize("tag", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,), (2, 3, 4)])
def test_torch_tensors_are_taken_without_a_copy_and_made_again(tag: str, shape: tuple) -> None:
    value = torch.zeros(shape, dtype=torch.uint8).to(TORCH_DTYPES[tag])
    tensor = as_tensor(value)
    assert (tensor.dtype, tensor.shape) == (tag, shape)
    assert tensor.num_bytes == num_bytes_of(tag, shape)
    again = like(tensor, value)
    assert (again.dtype, tuple(again.shape)) == (value.dtype, shape)
    if tensor.num_bytes:
        assert tensor.address == value.data_ptr() == again.data_ptr()
        assert why_not_live(tensor) == ""


@pytest.mark.parametrize("dtype", ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "f8", "c8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (5,), (2, 3)])
def test_numpy_arrays_are_taken_without_a_copy_and_made_again(dtype: str, shape: tuple) -> None:
    value = np.zeros(shape, dtype)
    tensor = as_tensor(value)
    assert tensor.shape == shape
    again = like(tensor, value)
    assert (again.dtype, again.shape) == (value.dtype, shape)
    assert value.size == 0 or np.shares_memory(again, value)


def test_zero_dimensional_arrays_write_through() -> None:
    value = np.array(1.0, np.float32)
    as_tensor(value).data[:] = np.frombuffer(np.float32(2.5).tobytes(), np.uint8)
    assert value == 2.5


def test_parameters_and_subclasses_of_torch_tensors_are_taken() -> None:
    class Odd(torch.Tensor):
        pass

    layer = torch.nn.Linear(3, 2)
    assert as_tensor(layer.weight).address == layer.weight.data_ptr()
    odd = torch.ones(3).as_subclass(Odd)
    assert as_tensor(odd).shape == (3,)


def test_packed_float4_counts_elements_as_safetensors_does() -> None:
    value = torch.zeros((2, 4), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    tensor = as_tensor(value)
    assert (tensor.dtype, tensor.shape, tensor.num_bytes) == ("F4", (2, 8), 8)
    assert like(tensor, value).shape == (2, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.T,
        lambda t: t[::2],
        lambda t: t[:, 1:3],
        lambda t: t[0].expand(5, 6),
        lambda t: t[0, :1].expand(4),
        lambda t: t.reshape(1, 2, 2, 6).contiguous(memory_format=torch.channels_last),
        lambda t: t.to(torch.complex64).conj(),
    ],
    ids=["transposed", "strided", "columns", "expanded", "zero-stride", "channels-last", "conj"],
)
def test_layouts_that_are_not_contiguous_give_row_major_copies(make) -> None:
    value = make(torch.arange(24, dtype=torch.float32).reshape(4, 6))
    tensor = as_tensor(value)
    plain = value.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
    assert tensor.is_copy
    assert why_not_live(tensor)
    assert np.array_equal(tensor.data, plain)


def test_big_endian_arrays_become_little_endian_copies() -> None:
    tensor = as_tensor(np.array([1, 2], ">u2"))
    assert tensor.is_copy
    assert tensor.data.tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.0, "builtins.float"),
        ([1, 2], "builtins.list"),
        (None, "NoneType"),
        (np.float32(1), "numpy.float32"),
        (np.array(["a"]), "<U1"),
        (np.array([object()]), "object"),
        (np.zeros(2, "c16"), "complex128"),
        (np.zeros(2, "M8[s]"), "datetime64"),
        (np.zeros(2, [("a", "u1")]), "dtype"),
        (np.ma.masked_array([1, 2], [0, 1]), "masked"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
    ],
)
def test_what_is_no_array_is_refused_by_name(value: object, text: str) -> None:
    with pytest.raises(TypeError, match=r"'layer\.bias'") as error:
        as_tensor(value, "layer.bias")
    assert text in str(error.value)


def test_same_memory_dtype_and_shape_is_one_identity() -> None:
    a = np.zeros((4, 6), np.float32)
    assert identity(a) == identity(a[:]) == identity(torch.from_numpy(a)) == identity(as_tensor(a))
    assert identity(a.T) == identity(torch.from_numpy(a).T.numpy())
    different = [a.copy(), a.T, a[:2], a.view(np.int32), a.reshape(6, 4), a[:, ::2]]
    assert len({identity(x) for x in [a, *different]}) == 1 + len(different)
    assert identity(np.zeros((0, 3))) is None


def test_overlaps_are_found_and_neighbours_are_none() -> None:
    whole = np.zeros(100, np.uint8)
    parts = {"a": as_tensor(whole[:50]), "b": as_tensor(whole[50:])}
    assert overlapping(parts.items()) is None
    assert overlapping([*parts.items(), ("c", as_tensor(whole[40:60]))]) == ("a", "c")


def test_read_only_memory_is_known() -> None:
    value = np.zeros(3)
    value.flags.writeable = False
    assert "read-only" in why_not_live(as_tensor(value))


@pytest.mark.parametrize("name", ["", "a\n", "a\x7f", "x" * 1025, "\ud800"])
def test_names_that_no_frame_can_carry_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="tensor name"):
        check_name(name)


def test_a_name_that_is_no_string_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected a string"):
        check_name(3)


def test_a_tensor_checks_its_bytes() -> None:
    with pytest.raises(ValueError, match="has 8 bytes, data 7"):
        Tensor("F32", (2,), np.zeros(7, np.uint8))
    with pytest.raises(ValueError, match="expected contiguous"):
        Tensor("U8", (3,), np.zeros(6, np.uint8)[::2])


def test_dtypes_without_a_numpy_twin_stay_tensors() -> None:
    tensor = zeros("F6_E2M3", (4,))
    assert like(tensor, np.zeros(1)) is tensor
    assert like(tensor, torch.zeros(1)) is tensor


def test_the_codec_never_imports_torch() -> None:
    code = (
        "import sys, numpy as np, gymfast.delta as d\n"
        "f = d.encode(None, {'a': np.ones(3)}, backend='reference')\n"
        "d.apply({}, f, backend='reference')\n"
        "assert not {'torch', 'safetensors', 'ml_dtypes'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
