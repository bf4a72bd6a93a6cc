"""The resident encoder: same frames as `encode`, and the exact way back from any point."""

from __future__ import annotations

import numpy as np
import pytest
from delta_weights import copies, each_backend, pairs, small_pair, versions, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymfast.delta as delta
from gymfast.delta import Encoder, State
from gymfast.errors import ChainError, GymfastError
from gymfast.testing.compare import assert_bits_equal

SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck))


def snapshot(weights, **options) -> State:
    return State.copy_of(weights, backend="cpu", **options)


def picture(state: State) -> tuple:
    """All that a state is: bytes, digests, geometries, order and ties."""
    slots = list(state.slots.values())
    return (
        state.root,
        tuple(state.slots),
        tuple(slots.index(slot) for slot in slots),
        tuple((s.spec, s.geometry, s.tensor.data.tobytes(), s.rows.tobytes()) for s in slots),
        state.is_consistent,
    )


@settings(SLOW, max_examples=150)
@given(pair=pairs(), block_units=st.sampled_from((1, 16, 2**19)))
def test_frames_are_those_of_encode_and_the_state_becomes_the_new_one(pair, block_units) -> None:
    old, new = pair
    expected = delta.encode(snapshot(old, block_units=block_units), new, backend="cpu")
    state = snapshot(old, block_units=block_units)
    encoder = Encoder(state)
    assert b"".join(encoder.encode(new)) == expected
    encoder.commit()
    state.verify()
    assert_bits_equal(state.tensors, new)
    assert list(state.tensors) == list(new)
    assert encoder.stats.frame_bytes == len(expected)
    assert encoder.stats.raw_bytes == state.size_bytes


@settings(SLOW, max_examples=200)
@given(data=st.data(), block_units=st.sampled_from((1, 16, 2**19)))
def test_rollback_is_exact_after_any_number_of_sections(data, block_units) -> None:
    old, new = data.draw(pairs())
    tied = data.draw(versions(old))
    state = snapshot(tied, block_units=block_units)
    before, slots = picture(state), dict(state.slots)
    encoder = Encoder(state)
    sections = encoder.encode(new)
    total = sum(1 for _ in Encoder(snapshot(tied, block_units=block_units)).encode(new))
    for _ in range(data.draw(st.integers(0, total))):
        next(sections)
    ending = data.draw(st.sampled_from(("leave", "close", "throw")))
    if ending == "close":
        sections.close()
    elif ending == "throw":
        with pytest.raises((KeyboardInterrupt, StopIteration)):
            sections.throw(KeyboardInterrupt)
    encoder.rollback()
    assert picture(state) == before
    assert state.slots == slots
    state.verify()
    encoder.rollback()
    frame = b"".join(encoder.encode(new))
    encoder.commit()
    held = copies(tied)
    delta.apply(held, frame, backend="cpu")
    assert_bits_equal(held, state.tensors)


@settings(SLOW, max_examples=30)
@given(data=st.data())
def test_a_chain_of_commits_and_rollbacks_follows_the_committed_versions(data) -> None:
    old = data.draw(weights())
    state, held = snapshot(old), State.copy_of(old, backend="cpu")
    encoder = Encoder(state)
    for _ in range(6):
        new = data.draw(versions(old))
        frame = b"".join(encoder.encode(new))
        if data.draw(st.booleans()):
            encoder.commit()
            delta.apply(held, frame)
            old = new
        else:
            encoder.rollback()
        state.verify()
        assert_bits_equal(state.tensors, old)
        assert_bits_equal(held.tensors, old)


@each_backend
@pytest.mark.parametrize("failing", range(1, 6))
def test_an_error_in_the_back_end_is_rolled_back(backend, failing, monkeypatch) -> None:
    old, new = small_pair()
    state = State.copy_of(old, backend=backend, block_units=2)
    monkeypatch.setattr("gymfast.delta.geometry.Geometry.section_blocks", lambda _: 1)
    before = picture(state)
    real, calls = state.backend.encode_blocks, []

    def fails(*args, **options):
        calls.append(args)
        if len(calls) == failing:
            raise MemoryError
        return real(*args, **options)

    encoder = Encoder(state)
    with monkeypatch.context() as patch:
        patch.setattr(type(state.backend), "encode_blocks", lambda _, *a, **o: fails(*a, **o))
        with pytest.raises(MemoryError):
            list(encoder.encode(new))
    encoder.rollback()
    assert picture(state) == before


@each_backend
def test_an_interrupt_that_loses_the_way_back_is_told(backend, monkeypatch) -> None:
    old, new = small_pair()
    state = State.copy_of(old, backend=backend)
    real = state.backend.encode_blocks

    def interrupted(*args, **options):
        real(*args, **options)
        raise KeyboardInterrupt

    encoder = Encoder(state)
    with monkeypatch.context() as patch:
        patch.setattr(type(state.backend), "encode_blocks", lambda _, *a, **o: interrupted(*a, **o))
        with pytest.raises(KeyboardInterrupt):
            list(encoder.encode(new))
    with pytest.raises(GymfastError, match=r"'embed': an interrupt.* publish an anchor"):
        encoder.rollback()
    assert not state.is_consistent
    with pytest.raises(ChainError, match="inconsistent"):
        delta.encode(state, new)


@each_backend
def test_an_interrupt_before_the_update_is_rolled_back(backend, monkeypatch) -> None:
    old, new = small_pair()
    state = State.copy_of(old, backend=backend)
    before = picture(state)
    encoder = Encoder(state)

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(state.backend), "encode_blocks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(encoder.encode(new))
    encoder.rollback()
    assert picture(state) == before


def test_versions_are_encoded_one_at_a_time() -> None:
    old, new = small_pair()
    encoder = Encoder(snapshot(old))
    sections = encoder.encode(new)
    with pytest.raises(ValueError, match=r"commit\(\) or rollback\(\)"):
        encoder.encode(new)
    next(sections)
    with pytest.raises(ValueError, match="not complete"):
        encoder.commit()
    encoder.rollback()
    with pytest.raises(ValueError, match="rolled back"):
        list(sections)
    assert_bits_equal(encoder.state.tensors, old)


def test_weights_in_the_memory_of_the_state_are_refused() -> None:
    old, _ = small_pair()
    state = State.attach(copies(old), backend="cpu")
    live = state.tensors
    part = live["embed"].data[64:128].view(np.float32)
    for new in (live, {"part": part}, {"strided": part[::2]}):
        with pytest.raises(ValueError, match=r"shares memory with 'embed'.*copy_of"):
            Encoder(state).encode(new)


def test_a_state_that_only_reads_cannot_be_updated() -> None:
    old, new = small_pair()
    with pytest.raises(ValueError, match="read-only"):
        Encoder(State.reading(old, backend="cpu")).encode(new)


def test_the_first_version_can_be_an_anchor() -> None:
    old, new = small_pair()
    state = State.empty(backend="cpu")
    encoder = Encoder(state)
    held: dict[str, object] = {}
    delta.apply(held, b"".join(encoder.encode(old)), backend="cpu")
    encoder.commit()
    delta.apply(held, b"".join(encoder.encode(new)), backend="cpu")
    encoder.commit()
    assert_bits_equal(held, new)
    assert state.size_bytes == sum(t.num_bytes for t in new.values())


@pytest.mark.parametrize("threads", [1, 2])
def test_sections_leave_before_the_whole_model_is_encoded(threads, monkeypatch) -> None:
    monkeypatch.setattr("gymfast.delta.geometry.Geometry.section_blocks", lambda _: 1)
    old, new = small_pair(density=1.0)
    state = snapshot(old, block_units=64)
    encoder = Encoder(state, threads=threads)
    sections = encoder.encode(new)
    for _ in range(3):  # header, tensor, first blocks
        next(sections)
    data = state.tensors["embed"].data
    ahead = 128 * (1 if threads == 1 else 2 * threads)
    assert np.array_equal(data[:128], new["embed"].data[:128])
    assert np.array_equal(data[ahead:], old["embed"].data[ahead:])
    assert encoder.stats.num_units == 0
    encoder.rollback()
    assert_bits_equal(state.tensors, old)


def test_the_undo_log_is_bounded_by_what_changed() -> None:
    rng = np.random.default_rng(0)
    old = {"w": rng.integers(0, 2**16, 2**20, np.uint16)}
    for density, limit in ((0.01, 4), (1.0, 2.1)):
        new = {"w": old["w"] ^ (rng.random(2**20) < density).astype(np.uint16)}
        encoder = Encoder(snapshot(old))
        list(encoder.encode(new))
        num_changed = encoder.stats.num_changed
        assert encoder._undo is not None
        assert sum(len(blob) for _, _, blob in encoder._undo.blocks) <= limit * num_changed + 1000
        encoder.commit()
