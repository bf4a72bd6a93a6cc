"""assert_bits_equal: silent on equal bits, else names the tensor, the element and both bits."""

from __future__ import annotations

import numpy as np
import pytest

from gymfast.testing.compare import assert_bits_equal


def test_equal_bits_pass_whatever_they_mean_as_numbers():
    bits = np.array([0x7FC1, 0x8000, 0x0000, 0xFFFF], np.uint16)
    assert_bits_equal({"a": bits, "empty": bits[:0]}, {"a": bits.copy(), "empty": bits[:0]})
    nan = np.array([np.nan, -0.0])
    assert_bits_equal(nan, nan.copy())


def test_the_first_difference_is_named():
    a = np.arange(24, dtype=np.uint16).reshape(4, 6)
    b = a.copy()
    b[2, 1] = 0x3F80
    b[3, 5] = 1
    with pytest.raises(AssertionError) as error:
        assert_bits_equal({"w": a, "v": a}, {"w": b, "v": a})
    assert str(error.value) == (
        "2 of 48 elements differ; first: tensor 'w', element 13: found 0x000d, expected 0x3f80"
    )


def test_zeros_of_both_signs_differ():
    with pytest.raises(AssertionError, match="element 0: found 0x00000000, expected 0x80000000"):
        assert_bits_equal(np.zeros(2, np.float32), -np.zeros(2, np.float32))


def test_names_dtypes_and_shapes_count():
    a = np.zeros((2, 3), np.uint16)
    with pytest.raises(AssertionError, match=r"missing \['b'\], surplus \['a'\]"):
        assert_bits_equal({"a": a}, {"b": a})
    with pytest.raises(AssertionError, match=r"'a': found U16 \(2, 3\), expected U16 \(3, 2\)"):
        assert_bits_equal({"a": a}, {"a": a.reshape(3, 2)})
    with pytest.raises(AssertionError, match="found U16"):
        assert_bits_equal({"a": a}, {"a": a.view(np.int16)})


def test_strided_and_zero_dimensional_arrays_are_compared():
    a = np.arange(12, dtype=np.int64)
    assert_bits_equal(a[::3], a[::3].copy())
    with pytest.raises(AssertionError, match="1 of 1 elements differ"):
        assert_bits_equal(np.array(1), np.array(2))


def test_torch_tensors_are_compared_with_their_own_kind():
    import torch

    a = torch.arange(6, dtype=torch.bfloat16)
    b = a.clone()
    assert_bits_equal({"a": a}, {"a": b})
    b[4] = 5
    with pytest.raises(AssertionError, match="element 4: found 0x4080, expected 0x40a0"):
        assert_bits_equal({"a": a}, {"a": b})
