"""What an apply wrote is read again: each block once, whatever the frame did to it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from gymfast import delta
from gymfast.delta import State
from gymfast.delta.apply_plan import unplanned
from gymfast.delta.backends import Backend, select
from gymfast.delta.parse import parse
from gymfast.delta.read_back import ReadBack
from gymfast.errors import ChecksumError

BLOCK = 2048  # units


class Spy:
    """A back end that counts the blocks it reads, and can damage what it has just written."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.read: Counter[tuple[int, int]] = Counter()  # address and block
        self.damage_at: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    apply_and_read = Backend.apply_and_read

    def apply_sections(self, data: Any, *args: Any) -> int:
        num_changed = self._inner.apply_sections(data, *args)
        if self.damage_at is not None:
            data[self.damage_at] ^= 4
        return num_changed

    def digest_blocks(
        self, data: Any, geometry: Any, threads: int, first: int = 0, count: int | None = None
    ) -> Any:
        address, num = data.ctypes.data, geometry.num_blocks if count is None else count
        self.read.update((address, block) for block in range(first, first + num))
        return self._inner.digest_blocks(data, geometry, threads, first, num)


def made() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)
    old = {
        "dense": rng.integers(0, 2**16, 9 * BLOCK + 5, np.uint16),
        "sparse": rng.integers(0, 2**32, 7 * BLOCK, np.uint32),
        "same": rng.integers(0, 2**8, 3 * BLOCK, np.uint8),
        "none": np.zeros((0, 3), np.uint16),
    }
    new = {name: value.copy() for name, value in old.items()}
    new["dense"][:: BLOCK // 2] ^= 1
    new["sparse"][3 * BLOCK : 3 * BLOCK + 9] ^= 1
    return old, new


def attached(weights: dict[str, Any], backend: str, threads: int = 1) -> State:
    return State.attach(weights, backend=backend, threads=threads, block_units=BLOCK)


def frame_of(old: dict[str, Any], new: dict[str, Any], profile: str = "auto") -> bytes:
    """A frame whose blocks are small: a tensor has many."""
    state = State.reading(old, block_units=BLOCK, threads=1)
    return delta.encode(state, new, profile=profile, threads=1)


def install(state: State, frame: bytes) -> None:
    """Applies a frame and reads all bytes again, as a live receiver does."""
    done = ReadBack()
    delta.apply(state, frame, done=done)
    state.verify(done)


@pytest.mark.parametrize("backend", ["cpu", "reference", "auto"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("profile", ["fast", "small"])
def test_apply_and_the_rest_accept_what_is_right(backend: str, threads: int, profile: str) -> None:
    old, new = made()
    frame = frame_of(old, new, profile)
    state = attached(old, backend, threads)
    install(state, frame)
    assert state.root == attached(new, backend).root
    assert all(np.array_equal(old[name], new[name]) for name in new)
    assert state.is_consistent


def test_every_block_is_read_exactly_once_in_a_version() -> None:
    old, new = made()
    frame = frame_of(old, new)
    state = attached(old, "cpu")
    spy = state.backend = Spy(select("cpu"))
    done = ReadBack()
    delta.apply(state, frame, done=done)
    assert spy.read  # something is read while it is written
    state.verify(done)
    slots = state.slots.values()
    blocks = {(s.tensor.data.ctypes.data, b) for s in slots for b in range(s.geometry.num_blocks)}
    assert spy.read == Counter(blocks)


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_a_byte_that_is_wrong_after_the_write_is_found_before_the_version_counts(
    name: str,
) -> None:
    old, new = made()
    only = {**old, name: new[name]}
    frame = frame_of(old, only)
    state = attached(old, "cpu")
    spy = state.backend = Spy(select("cpu"))
    spy.damage_at = 3 * BLOCK * new[name].itemsize + 1
    with pytest.raises(ChecksumError, match=rf"'{name}': block 3 .*inconsistent") as caught:
        delta.apply(state, frame, done=ReadBack())
    assert caught.value.number == 61
    assert not state.is_consistent


@pytest.mark.parametrize(
    ("name", "block"), [("dense", 2), ("sparse", 3), ("sparse", 5), ("same", 1)]
)
def test_memory_that_changed_behind_the_state_is_found_in_any_block(name: str, block: int) -> None:
    """In a block that the frame changes, one that it does not, and a tensor that it leaves."""
    old, new = made()
    frame = frame_of(old, new)
    state = attached(old, "cpu")
    old[name].reshape(-1)[block * BLOCK + 100] ^= 1  # not a unit that the frame changes
    with pytest.raises(ChecksumError, match=rf"'{name}': block {block} ") as caught:
        install(state, frame)
    assert caught.value.number == 61
    assert not state.is_consistent


def test_the_native_codec_tells_what_lies_in_memory_and_not_what_should() -> None:
    old, new = made()
    parsed = parse(frame_of(old, new))
    state = attached(old, "cpu")
    slot, rows = state.slots["dense"], state.slots["dense"].rows.copy()
    old["dense"][100] ^= 1
    sections = [record for record in parsed.blocks if record.tensor == 0]
    params = unplanned(parsed)[0].params
    _, found = state.backend.apply_and_read(
        slot.tensor.data, sections, slot.geometry, params, rows, 1
    )
    lies = state.backend.digest_blocks(slot.tensor.data, slot.geometry, 1)
    for section, digests in zip(sections, found, strict=True):
        span = slice(section.first_block, section.first_block + section.num_blocks)
        assert np.array_equal(digests, lies[span])
    assert sections[0].first_block == 0
    assert not np.array_equal(lies[0], rows[0])
