"""Frames from weights and into weights: exact, checked before the first write, idempotent."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from delta_weights import (
    copies,
    each_backend,
    pairs,
    small_pair,
    strided,
    versions,
    weights,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymfast.delta as delta
from gymfast.delta import State, Tensor
from gymfast.delta.frame import root_of
from gymfast.delta.geometry import DTYPE_BITS
from gymfast.errors import ChainError, ChecksumError, CoverageError, FormatError
from gymfast.testing.compare import assert_bits_equal

SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck))
PROFILES = st.sampled_from(("auto", "fast", "small"))


def refusal(base, frame: bytes) -> FormatError | None:
    """How a receiver refuses a frame, or None."""
    try:
        delta.apply(base, frame, backend="cpu")
    except FormatError as error:
        return error
    return None


@settings(SLOW, max_examples=500)
@given(pair=pairs(), profile=PROFILES)
def test_I01_encode_then_apply_is_exact_for_every_dtype_and_shape(pair, profile) -> None:
    old, new = pair
    frame = delta.encode(old, new, backend="cpu", profile=profile)
    held = copies(old)
    report = delta.apply(held, frame, backend="cpu")
    assert_bits_equal(held, new)
    assert report.new_root == State.reading(new).root
    assert delta.apply(held, frame, backend="cpu").num_changed == 0
    assert_bits_equal(held, new)


@settings(SLOW, max_examples=60)
@given(pair=pairs(), profile=PROFILES, tiled=st.booleans())
def test_I01_both_back_ends_give_and_take_the_same_frames(pair, profile, tiled) -> None:
    old, new = pair
    options = {"profile": profile, "tiled": tiled}
    frame = delta.encode(old, new, backend="reference", **options)
    assert delta.encode(old, new, backend="cpu", **options) == frame
    for backend in ("reference", "cpu"):
        held = copies(old)
        delta.apply(held, frame, backend=backend)
        assert_bits_equal(held, new)


@settings(SLOW, max_examples=60)
@given(pair=pairs(), seed=st.integers(0, 99))
def test_I01_strided_sources_give_the_frame_of_contiguous_ones(pair, seed) -> None:
    rng = np.random.default_rng(seed)
    odd = [{name: strided(t, rng) for name, t in copies(w).items()} for w in pair]
    plain = [copies(w) for w in odd]
    assert delta.encode(*odd, backend="cpu") == delta.encode(*plain, backend="cpu")


@settings(SLOW, max_examples=60)
@given(new=weights())
def test_I01_an_anchor_gives_the_weights_to_an_empty_receiver(new) -> None:
    anchor = delta.encode(None, new, backend="cpu")
    held: dict[str, object] = {}
    report = delta.apply(held, anchor, backend="cpu")
    assert_bits_equal(held, new)
    assert (report.base_root, report.added) == (root_of([]), tuple(new))
    assert delta.verify(anchor, backend="cpu").new_root == report.new_root


def test_I02_the_same_bits_give_the_same_payload_whatever_they_are_called() -> None:
    old, new = small_pair()
    num_bytes = old["embed"].num_bytes
    for bits in (8, 16, 32, 64):
        seen = set()
        for tag in (tag for tag, width in DTYPE_BITS.items() if width == bits):
            a, b = (
                {"w": Tensor(tag, (num_bytes * 8 // bits,), w["embed"].data)} for w in (old, new)
            )
            info = delta.inspect(delta.encode(a, b, backend="cpu")).tensors[0]
            seen.add((info.payload_bytes, tuple(info.modes.items()), info.new_digest))
        assert len(seen) == 1


def test_I02_no_float_is_made_on_the_data_path() -> None:
    floats = re.compile(r"np\.float|np\.double|astype\((np\.)?float|\"<?f[248]\"")
    for path in Path(delta.__file__).parent.rglob("*.py"):
        assert not floats.search(path.read_text()), path


@settings(SLOW, max_examples=12)
@given(pair=pairs())
def test_I05_roots_do_not_depend_on_blocks_threads_or_order(pair) -> None:
    old, new = pair
    roots = set()
    for block_units, threads, turned in itertools.product((1, 7, 64, 2**19), (1, 3), (0, 1, 2)):
        names = list(new)[turned:] + list(new)[:turned]
        state = State.copy_of(old, block_units=block_units, threads=threads, backend="cpu")
        frame = delta.encode(state, {n: new[n] for n in names}, threads=threads, backend="cpu")
        held = copies(old)
        roots.add(delta.apply(held, frame, backend="cpu").new_root)
        assert_bits_equal(held, new)
    assert len(roots) == 1


def test_I05_one_frame_serves_receivers_with_other_blocks() -> None:
    old, new = small_pair()
    frame = delta.encode(old, new, backend="cpu", tiled=True)
    for block_units in (1, 5, 2**19):
        state = State.copy_of(old, block_units=block_units, backend="cpu")
        delta.apply(state, frame)
        assert_bits_equal(state.tensors, new)
        state.verify()


@settings(SLOW, max_examples=100)
@given(pair=pairs())
def test_I07_unchanged_removed_added_replaced_and_aliased_are_distinct_and_covered(pair) -> None:
    old, new = pair
    info = delta.inspect(delta.encode(old, new, backend="cpu"))
    said = {tensor.name: tensor for tensor in info.tensors}
    assert said.keys() == old.keys() | new.keys()
    ids = {}
    for name, tensor in said.items():
        if name not in new:
            expected = "removed"
        elif tensor.target:
            expected = "alias"
            assert new[tensor.target] is new[name]
        elif name not in old:
            expected = "added"
        elif (old[name].dtype, old[name].shape) != (new[name].dtype, new[name].shape):
            expected = "replaced"
        else:
            same = np.array_equal(old[name].data, new[name].data)
            expected = "unchanged" if same else "changed"
        assert tensor.status == expected
        if name in new and tensor.num_bytes:
            assert (expected == "alias") == (id(new[name]) in ids)
            ids[id(new[name])] = name


@each_backend
def test_I07_names_that_do_not_fit_are_refused_before_any_write(backend: str) -> None:
    old, new = small_pair()
    frame = delta.encode(old, new, backend=backend)
    for held in ({**old, "extra": old["bias"]}, {n: old[n] for n in ("embed", "bias")}, {}):
        held = copies(held)
        before = copies(held)
        with pytest.raises(CoverageError, match=r"nothing was written"):
            delta.apply(held, frame, backend=backend)
        assert_bits_equal(held, before)


@each_backend
@pytest.mark.parametrize("spec", [("F16", (40, 32)), ("BF16", (32, 40)), ("BF16", (1280,))])
def test_I08_another_dtype_or_shape_is_never_patched(backend: str, spec: tuple) -> None:
    old, new = small_pair()
    frame = delta.encode(old, new, backend=backend)
    held = copies(old) | {"embed": Tensor(*spec, old["embed"].data.copy())}
    before = copies(held)
    with pytest.raises(FormatError, match=r"'embed' is .* here, the frame was made for") as error:
        delta.apply(held, frame, backend=backend)
    assert error.value.number == 60
    assert_bits_equal(held, before)
    changed_spec = new | {"embed": Tensor(*spec, new["embed"].data)}
    info = delta.inspect(delta.encode(old, changed_spec, backend=backend))
    assert info.tensors[0].status == "replaced"


@settings(SLOW, max_examples=100)
@given(data=st.data())
def test_I31_one_flipped_bit_in_the_base_is_refused_before_any_write(data) -> None:
    old, new = data.draw(pairs())
    frame = delta.encode(old, new, backend="cpu")
    held = copies(old)
    touched = [name for name in held if held[name].num_bytes]
    if not touched:
        return
    victim = held[data.draw(st.sampled_from(touched))]
    at = data.draw(st.integers(0, victim.num_bytes * 8 - 1))
    victim.data[at // 8] ^= 1 << at % 8
    before = copies(held)
    if State.reading(held, backend="cpu").root == State.reading(new, backend="cpu").root:
        return  # the flip made the new version of it
    for base in (held, State.attach(held, backend="cpu")):
        error = refusal(base, frame)
        if error is None:  # only where the flipped tensor takes all its bytes from another one
            assert_bits_equal(held, new)
        else:
            assert error.number in (60, 62, 63), error
            assert "nothing was written" in str(error)
            assert_bits_equal(held, before)


@each_backend
def test_I33_an_empty_delta_is_a_version_and_a_change_is_never_empty(backend: str) -> None:
    old, _ = small_pair()
    frame = delta.encode(old, old, backend=backend)
    info = delta.inspect(frame)
    assert {tensor.status for tensor in info.tensors} == {"unchanged"}
    assert info.base_root == info.new_root
    assert delta.apply(copies(old), frame, backend=backend).num_changed == 0
    for name, tensor in old.items():
        for bit in (0, 7, tensor.num_bytes * 8 - 1):
            new = copies(old)
            new[name].data[bit // 8] ^= 1 << bit % 8
            info = delta.inspect(delta.encode(old, new, backend=backend))
            assert info.base_root != info.new_root
            assert [t.name for t in info.tensors if t.status == "changed"] == [name]


@settings(SLOW, max_examples=40)
@given(data=st.data())
def test_a_chain_of_versions_is_exact_for_dicts_and_states(data) -> None:
    first = data.draw(weights())
    held, state = copies(first), State.copy_of(first, backend="cpu")
    old = first
    for _ in range(4):
        new = data.draw(versions(old))
        frame = delta.encode(old, new, backend="cpu")
        delta.apply(state, frame)
        state.verify()
        assert_bits_equal(state.tensors, new)
        if error := refusal(held, frame):  # tied by an earlier frame, and no longer the same
            assert "share their memory" in str(error)
            held = copies(new)
        assert_bits_equal(held, new)
        old = new


def test_pointers_of_changed_and_unchanged_tensors_are_kept() -> None:
    old, new = small_pair()
    held = copies(old)
    addresses = {name: tensor.address for name, tensor in held.items()}
    for first, second in ((old, new), (new, old), (old, new)):
        delta.apply(held, delta.encode(first, second, backend="cpu"), backend="cpu")
        assert {name: tensor.address for name, tensor in held.items()} == addresses


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
def test_added_and_replaced_tensors_are_of_the_kind_that_the_mapping_holds(make) -> None:
    old = {"a": make(4), "b": make(4)}
    new = {"a": make((2, 3)), "c": make(5), "d": make(())}
    held = {"a": make(4), "b": make(4)}
    report = delta.apply(held, delta.encode(old, new, backend="cpu"), backend="cpu")
    assert list(held) == ["a", "c", "d"]
    assert all(type(value) is type(new[name]) for name, value in held.items())
    assert_bits_equal(held, new)
    assert (report.replaced, report.added, report.removed) == (("a",), ("c", "d"), ("b",))


def test_an_attached_state_adds_and_removes_in_the_mapping_too() -> None:
    live = {"a": np.ones(4), "b": np.ones(3)}
    state = State.attach(live, backend="cpu")
    new = {"a": np.full(4, 2.0), "c": np.ones(2)}
    delta.apply(state, delta.encode(state, new, backend="cpu"))
    assert_bits_equal(live, new)
    live["c"][:] = 7
    with pytest.raises(ChecksumError, match="'c'"):
        state.verify()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda a: a.T, "not contiguous"),
        (lambda a: np.broadcast_to(a[0], (40, 32)), "not contiguous"),
        (lambda a: a.astype(">u2"), "not little-endian"),
    ],
)
def test_live_tensors_that_cannot_be_written_are_refused_before_any_write(make, why) -> None:
    rng = np.random.default_rng(0)
    live = {"w": make(rng.integers(0, 9, (40, 32), np.uint16)), "b": np.ones(3)}
    new = {"w": np.array(live["w"], "<u2") + 1, "b": np.zeros(3)}
    frame = delta.encode(live, new, backend="cpu")
    with pytest.raises(ValueError, match=f"'w' is .*{why}"):
        delta.apply(live, frame, backend="cpu")
    assert np.array_equal(live["b"], np.ones(3))
    with pytest.raises(ValueError, match=f"'w' is .*{why}"):
        State.attach(live, backend="cpu")


def test_read_only_live_memory_is_refused_and_unchanged_read_only_memory_is_not() -> None:
    live = {"w": np.ones(5), "b": np.ones(3)}
    live["w"].flags.writeable = False
    delta.apply(live, delta.encode(live, {"w": np.ones(5), "b": np.zeros(3)}), backend="cpu")
    with pytest.raises(ValueError, match="'w' is read-only"):
        delta.apply(live, delta.encode(live, {"w": np.zeros(5), "b": np.ones(3)}), backend="cpu")
    assert np.array_equal(live["b"], np.zeros(3))


def test_tensors_that_share_part_of_their_memory_are_refused() -> None:
    whole = np.zeros(10)
    live = {"whole": whole, "half": whole[5:]}
    frame = delta.encode(live, {"whole": np.ones(10), "half": np.ones(5)}, backend="cpu")
    with pytest.raises(ValueError, match="share part of their memory"):
        delta.apply(live, frame, backend="cpu")
    assert not whole.any()


@each_backend
def test_a_tie_in_live_memory_is_written_once(backend: str) -> None:
    shared = np.arange(9.0)
    live = {"a": shared, "b": shared}
    separate = {"a": shared + 1, "b": shared + 1}
    tied = dict.fromkeys(("a", "b"), shared + 1)
    for new in (separate, tied):
        live["a"][:] = np.arange(9.0)
        report = delta.apply(live, delta.encode(live, new, backend=backend), backend=backend)
        assert_bits_equal(live, new)
        assert live["a"] is live["b"]
        assert report.num_changed <= 18


@each_backend
def test_a_tie_in_live_memory_that_ends_is_refused(backend: str) -> None:
    shared = np.arange(9.0)
    live = {"a": shared, "b": shared}
    frame = delta.encode(live, {"a": shared + 1, "b": shared.copy()}, backend=backend)
    with pytest.raises(CoverageError, match="share their memory here"):
        delta.apply(live, frame, backend=backend)
    assert np.array_equal(shared, np.arange(9.0))
    state = State.copy_of(live, backend=backend)  # memory of our own may be parted
    delta.apply(state, frame)
    assert_bits_equal(state.tensors, {"a": shared + 1, "b": shared})


def test_a_tensor_tied_to_a_replaced_one_follows_it() -> None:
    shared = np.arange(4.0)
    live = {"a": shared, "b": shared}
    wide = np.arange(6, dtype=np.float32)
    frame = delta.encode(live, {"a": wide, "b": wide}, backend="cpu")
    delta.apply(live, frame, backend="cpu")
    assert_bits_equal(live, {"a": wide, "b": wide})


def test_restore_heals_any_bytes_and_keeps_pointers() -> None:
    old, new = small_pair()
    held = copies(old)
    addresses = {name: tensor.address for name, tensor in held.items()}
    state = State.attach(held, backend="cpu")
    state.is_consistent = False
    anchor = delta.encode(None, new, backend="cpu")
    with pytest.raises(ChainError, match="inconsistent"):
        delta.apply(state, anchor)
    delta.restore(state, anchor)
    assert state.is_consistent
    assert_bits_equal(held, new)
    assert {name: tensor.address for name, tensor in held.items()} == addresses
    state.verify()


def test_restore_refuses_deltas_and_other_names() -> None:
    old, new = small_pair()
    held = copies(old)
    with pytest.raises(ChainError, match="expected an anchor"):
        delta.restore(held, delta.encode(old, new, backend="cpu"), backend="cpu")
    anchor = delta.encode(None, {"other": new["embed"]}, backend="cpu")
    with pytest.raises(CoverageError, match="first 'other'"):
        delta.restore(held, anchor, backend="cpu")
    assert_bits_equal(held, old)
    report = delta.restore(held, anchor, allow_new_names=True, backend="cpu")
    assert_bits_equal(held, {"other": new["embed"]})
    assert set(report.removed) == set(old)


def test_an_anchor_over_other_bytes_needs_restore() -> None:
    old, new = small_pair()
    with pytest.raises(CoverageError, match=r"gymfast\.delta\.restore"):
        delta.apply(copies(old), delta.encode(None, new, backend="cpu"), backend="cpu")


@each_backend
def test_a_failure_after_the_first_write_is_told_and_marks_the_state(backend, monkeypatch) -> None:
    old, new = small_pair()
    frame = delta.encode(old, new, backend=backend)
    state = State.copy_of(old, backend=backend)
    real, calls = state.backend.apply_blocks, []

    def fails_later(*args):
        calls.append(args)
        if len(calls) == 2:
            raise ChecksumError("block 0: flipped in memory", 58)
        return real(*args)

    monkeypatch.setattr(type(state.backend), "apply_blocks", lambda _, *args: fails_later(*args))
    with pytest.raises(ChecksumError, match=r"'bias'.*now inconsistent.*restore"):
        delta.apply(state, frame)
    assert not state.is_consistent
    monkeypatch.undo()
    for use in (lambda: delta.apply(state, frame), lambda: delta.encode(state, new)):
        with pytest.raises(ChainError, match="inconsistent"):
            use()
    delta.restore(state, delta.encode(None, new, backend=backend))
    assert_bits_equal(state.tensors, new)


def test_what_cannot_be_built_is_found_before_the_first_write(monkeypatch) -> None:
    old, new = small_pair()
    new["added"] = new["embed"].copy()
    frame = delta.encode(old, new, backend="reference")
    state = State.copy_of(old, backend="reference")
    monkeypatch.setattr(
        type(state.backend), "apply_blocks", lambda *_: pytest.fail("not even tried")
    )
    damaged = ChecksumError("damaged", 58)

    def raises(*_):
        raise damaged

    monkeypatch.setattr(type(state.backend), "apply_blocks", raises)
    with pytest.raises(ChecksumError, match="'added': damaged"):
        delta.apply(state, frame)
    assert state.is_consistent
    assert_bits_equal(state.tensors, old)


def test_verify_names_tensor_and_block_that_were_changed_behind_the_back() -> None:
    _, new = small_pair()
    state = State.copy_of(new, block_units=64, backend="cpu")
    state.verify()
    state.tensors["embed"].data[2 * 64 * 3 + 5] ^= 1
    with pytest.raises(ChecksumError, match="'embed': block 3 "):
        state.verify()
    assert not state.is_consistent


def test_frames_that_are_no_bytes_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected bytes"):
        delta.inspect("frame")  # type: ignore[arg-type]


def test_bad_options_are_value_errors() -> None:
    old, new = small_pair()
    for options in ({"profile": "best"}, {"backend": "gpu"}, {"threads": 0}):
        with pytest.raises(ValueError, match="expected"):
            delta.encode(old, new, **options)


def test_a_tie_of_three_whose_first_name_goes_may_part() -> None:
    shared = np.arange(4.0)
    state = State.copy_of(dict.fromkeys("abc", shared), backend="cpu")
    new = {"b": shared + 1, "c": shared + 2}
    delta.apply(state, delta.encode(dict.fromkeys("abc", shared), new, backend="cpu"))
    assert_bits_equal(state.tensors, new)


@settings(SLOW, max_examples=100)
@given(data=st.data())
def test_restore_gives_the_state_of_an_anchor_over_any_other(data) -> None:
    old = data.draw(versions(data.draw(weights())))
    new = data.draw(versions(old))
    anchor = delta.encode(None, new, backend="cpu")
    held, state, attached = copies(old), State.copy_of(old, backend="cpu"), copies(old)
    for base in (held, state, State.attach(attached, backend="cpu")):
        report = delta.restore(base, anchor, allow_new_names=True, backend="cpu")
        assert set(report.removed) == old.keys() - new.keys()
        assert set(report.added) == new.keys() - old.keys()
    for result in (held, state.tensors, attached):
        assert_bits_equal(result, new)
    state.verify()


def test_memory_changed_behind_a_state_is_found_when_blocks_are_cut_anew() -> None:
    old, new = small_pair()
    state = State.copy_of(old, block_units=64, backend="cpu")
    state.tensors["embed"].data[0] ^= 1
    with pytest.raises(ChecksumError, match=r"'embed'.*changed from outside; nothing was written"):
        delta.apply(state, delta.encode(old, new, backend="cpu"))


def test_more_dims_than_the_format_has_are_refused() -> None:
    with pytest.raises(ValueError, match="33 dims, expected at most 32"):
        delta.encode(None, {"w": np.zeros((1,) * 33)}, backend="cpu")
