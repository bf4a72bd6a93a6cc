"""Anchors restored over other states: what a refusal leaves as it was."""

from __future__ import annotations

import pytest
from delta_weights import small_pair

import gymfast.delta as delta
from gymfast.delta import State
from gymfast.errors import ChecksumError
from gymfast.testing.compare import assert_bits_equal


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("was_consistent", [True, False])
@pytest.mark.parametrize("is_attached", [True, False])
def test_a_refused_restore_leaves_names_bytes_and_consistency(
    backend, was_consistent, is_attached, monkeypatch
) -> None:
    old, new = small_pair()
    anchor = delta.encode(None, {"fresh": new["embed"], "bias": new["bias"]}, backend=backend)
    held = {name: tensor.copy() for name, tensor in old.items()}
    make = State.attach if is_attached else State.copy_of
    state = make(held, backend=backend)
    state.is_consistent = was_consistent

    def damaged(*args: object) -> int:
        raise ChecksumError("block 0: flipped in memory", 58)

    monkeypatch.setattr(type(state.backend), "apply_blocks", damaged)
    for base, error in ((state, "'fresh'.*flipped"), (held, "'fresh'.*flipped")):
        options = {"allow_new_names": True, "backend": backend}
        with pytest.raises(ChecksumError, match=error) as caught:
            delta.restore(base, anchor, **options)
        assert "inconsistent" not in str(caught.value)
        assert state.is_consistent is was_consistent
        assert_bits_equal(held, old)
        assert_bits_equal(state.tensors, old)
    monkeypatch.undo()
    report = delta.restore(state, anchor, allow_new_names=True)
    assert set(report.removed) == set(old) - {"bias"}
    assert state.is_consistent
    assert state.slots.keys() == {"fresh", "bias"}
