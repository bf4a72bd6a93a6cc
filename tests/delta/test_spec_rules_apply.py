"""Rules R27..R30 of docs/wire-format.md: what a receiver checks against its own tensors."""

from __future__ import annotations

import numpy as np
import pytest
from delta_frames import (
    EMPTY_ROOT,
    added,
    blocks,
    check_of,
    digest_of,
    frame,
    header,
    row,
    tensor,
)

from gymfast.delta import apply
from gymfast.delta.frame import Kind, root_of
from gymfast.errors import ChecksumError, CoverageError, FormatError

BASE = bytes((0, 1, 2, 3, 4, 5, 6, 7))
NEW = bytes((0, 1, 2, 4, 4, 5, 6, 7))
STEP = bytes((1, 0, 0, 0, 8))
KEPT = b"kept as it is"


def live(**changes) -> dict[str, np.ndarray]:
    """The receiver's tensors; None leaves one out."""
    tensors = {"t": np.frombuffer(BASE, np.uint8).copy(), "kept": np.frombuffer(KEPT, np.uint8)}
    tensors.update(changes)
    return {name: value.copy() for name, value in tensors.items() if value is not None}


def state_root(t: bytes) -> bytes:
    return root_of([("t", "U8", (8,), digest_of(t)), ("kept", "U8", (13,), digest_of(KEPT))])


def delta(**fields) -> bytes:
    """A frame that changes `t` and keeps `kept`; the fields replace what END says."""
    end = {
        "base_digest": digest_of(BASE),
        "new_digest": digest_of(NEW),
        "base_root": state_root(BASE),
        "new_root": state_root(NEW),
        **fields,
    }
    sections = [
        header(2),
        tensor("t", kind=Kind.DELTA),
        blocks([(1, STEP, check_of(NEW))]),
        tensor("kept", kind=Kind.DELTA, shape=(13,)),
    ]
    rows = [row(1, end.pop("base_digest"), end.pop("new_digest")), row(0, digest_of(KEPT))]
    return frame(sections, rows, **end)


def assert_refused(backend, tensors, data: bytes, *numbers: int) -> None:
    """The frame is refused with this number, and nothing was written."""
    before = {name: value.copy() for name, value in tensors.items()}
    with pytest.raises(FormatError) as caught:
        apply(tensors, data, backend=backend.name)
    assert caught.value.number in numbers, str(caught.value)
    assert tensors.keys() == before.keys()
    for name, value in before.items():
        assert np.array_equal(tensors[name], value)


def test_the_frame_that_the_tests_break_applies(backend) -> None:
    tensors = live()
    address = tensors["t"].ctypes.data
    assert apply(tensors, delta(), backend=backend.name).num_changed == 1
    assert tensors["t"].tobytes() == NEW
    assert tensors["t"].ctypes.data == address
    assert apply(tensors, delta(), backend=backend.name).skipped == ("t",)
    assert tensors["t"].tobytes() == NEW


@pytest.mark.parametrize(
    "value",
    [
        np.arange(1, 9, dtype=np.uint8),
        np.zeros(8, np.uint8),
        np.arange(8, dtype=np.int8),
        np.arange(8, dtype=np.uint8).reshape(2, 4),
        np.arange(9, dtype=np.uint8),
        np.frombuffer(BASE, np.uint16),
    ],
)
def test_R27_the_base_has_the_stated_digest_dtype_and_shape(backend, value: np.ndarray) -> None:
    assert_refused(backend, live(t=value), delta(), 60)


def test_R27_unchanged_tensors_count_too(backend) -> None:
    assert_refused(backend, live(kept=np.zeros(13, np.uint8)), delta(), 60)


def test_R28_the_result_has_the_stated_digest(backend) -> None:
    wrong = digest_of(BASE[::-1])
    new_root = root_of([("t", "U8", (8,), wrong), ("kept", "U8", (13,), digest_of(KEPT))])
    with pytest.raises(ChecksumError) as caught:
        apply(live(), delta(new_digest=wrong, new_root=new_root), backend=backend.name)
    assert caught.value.number == 61


def test_R29_tensors_are_the_same_on_both_sides(backend) -> None:
    for tensors in (live(t=None), live(kept=None), live(surplus=np.zeros(1, np.uint8)), {}):
        assert_refused(backend, tensors, delta(), 62)
    with pytest.raises(CoverageError, match="surplus"):
        apply(live(surplus=np.zeros(1, np.uint8)), delta(), backend=backend.name)


def test_R29_an_anchor_does_not_overwrite_a_tensor(backend) -> None:
    assert_refused(backend, {"t": np.ones(8, np.uint8)}, added(NEW, 5, NEW), 60, 62)


def test_R30_roots_are_those_of_the_digests(backend) -> None:
    assert_refused(backend, live(), delta(new_root=state_root(BASE)), 63)
    assert_refused(backend, live(), delta(base_root=EMPTY_ROOT), 60, 63)
    assert_refused(backend, live(), delta(base_root=state_root(NEW)), 60, 63)
