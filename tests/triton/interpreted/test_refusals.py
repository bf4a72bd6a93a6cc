"""Arguments that no kernel may see, and what the results of one block do not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from delta_cases import case_of, encode

from gymfast.delta.backends import Backend, BlockParams, select
from gymfast.delta.geometry import Geometry
from gymfast.errors import FormatError

PARAMS = BlockParams(1, 0, 0, True)
WORDS = Geometry(8, 4, 8, 1, 8)


@pytest.fixture
def triton_backend() -> Backend:
    return select("triton")


def tensor(num_bytes: int, *, start: int = 0) -> torch.Tensor:
    return torch.zeros(start + num_bytes, dtype=torch.uint8)[start:]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (np.zeros(32, np.uint8), TypeError, "is ndarray, expected a torch tensor"),
        (torch.zeros(32, dtype=torch.uint8, device="meta"), ValueError, "on meta, expected cpu"),
        (torch.zeros(64, dtype=torch.uint8)[::2], ValueError, "stride 2, expected 1"),
        (tensor(32, start=2), ValueError, "a multiple of its units of 4 bytes"),
        (tensor(31), ValueError, r"shape \(31,\), expected torch.uint8 of \(32,\)"),
        (torch.zeros(32, dtype=torch.int8), ValueError, "is torch.int8"),
        (torch.zeros((8, 4), dtype=torch.uint8), ValueError, r"shape \(8, 4\)"),
    ],
)
def test_unfit_tensors_are_refused(triton_backend, data, error, message) -> None:
    digests = np.zeros((1, 2), np.uint64)
    options = {"update": False, "undo": False, "threads": 1}
    good = tensor(32)
    with pytest.raises(error, match=f"data .*{message}"):
        triton_backend.digest_blocks(data, WORDS, 1)
    with pytest.raises(error, match=f"data .*{message}"):
        triton_backend.apply_blocks(data, b"", WORDS, PARAMS, digests, 0, 1, 1)
    for pair, name in (((data, good), "base"), ((good, data), "new")):
        with pytest.raises(error, match=f"{name} .*{message}"):
            triton_backend.encode_blocks(*pair, WORDS, PARAMS, digests, 0, 1, **options)
    with pytest.raises(error, match=f"base .*{message}"):
        triton_backend.rollback_blocks(data, b"", WORDS)


@pytest.mark.parametrize("shift", [-28, -4, 0, 4, 28])
def test_base_and_new_that_overlap_are_refused(triton_backend, shift: int) -> None:
    memory = tensor(96)
    base, new = memory[32:64], memory[32 + shift : 64 + shift]
    digests = np.zeros((1, 2), np.uint64)
    options = {"update": False, "undo": False, "threads": 1}
    with pytest.raises(ValueError, match="base and new overlap"):
        triton_backend.encode_blocks(base, new, WORDS, PARAMS, digests, 0, 1, **options)


def test_blocks_that_the_tensor_does_not_have_are_refused(triton_backend) -> None:
    digests = np.zeros((1, 2), np.uint64)
    for first, count in ((0, 2), (1, 1), (-1, 1)):
        with pytest.raises(FormatError) as caught:
            triton_backend.encode_blocks(
                tensor(32),
                tensor(32),
                WORDS,
                PARAMS,
                digests,
                first,
                count,
                update=True,
                undo=True,
                threads=1,
            )
        assert caught.value.number == 50


def test_a_failure_of_any_download_leaves_base_and_digests_alone(backend, monkeypatch) -> None:
    case = case_of([1, 2, 3, 4], [1, 3, 3, 9], 2)
    digests = backend.digest_blocks(case.base, case.geometry, 1)
    before, params, real = digests.copy(), case.params(backend), torch.Tensor.cpu
    args = (case.geometry, params, digests, 0, 1)
    for last in range(100):
        base, calls = case.base.copy(), []

        def fails(data: torch.Tensor, calls=calls, last=last) -> torch.Tensor:
            calls.append(data)
            if len(calls) > last:
                raise MemoryError
            return real(data)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", fails)
            try:
                backend.encode_blocks(base, case.new, *args, update=True, undo=True, threads=1)
            except MemoryError:
                assert np.array_equal(base, case.base) and np.array_equal(digests, before)
            else:
                break
    assert last > 5
    assert np.array_equal(base, case.new) and not np.array_equal(digests, before)


def test_empty_tensors_have_no_blocks(backend) -> None:
    case = case_of([], [], 2)
    found = encode(backend, case)
    assert (found.body, found.num_changed, found.undo) == (b"", 0, b"")
    assert backend.digest_blocks(case.base, case.geometry, 1).shape == (0, 2)


def test_a_large_tensor_offset_does_not_change_the_row_keys(backend, reference) -> None:
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, 5 * 4096 + 20).astype(np.uint8)
    for geometry in (Geometry(5125, 4, 5125, 1, 1000), Geometry(5125, 4, 41, 7, 13)):
        expected = reference.digest_blocks(data, geometry, 1)
        assert np.array_equal(backend.digest_blocks(data, geometry, 1), expected)
