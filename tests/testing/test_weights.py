"""The RL-like generator against the measurements of codec.md table 2.2."""

from __future__ import annotations

import numpy as np
import pytest

from gymfast.testing.weights import plan_decoder, rl_like_update, rl_like_weights

SIZE = 16 << 20
# P(change) per octave 2^e of the old value: Adam steps at two learning rates (codec.md, table 2.2).
TABLE = {
    0.00955: {-13: 0.431, -12: 0.217, -11: 0.108, -10: 0.055, -9: 0.028, -8: 0.011, -7: 0.005},
    0.0337: {
        -13: 0.795, -12: 0.672, -11: 0.466, -10: 0.251, -9: 0.126, -8: 0.064, -7: 0.033,
        -6: 0.017, -5: 0.0085, -4: 0.0042,
    },
}  # fmt: skip
ONE_ULP_SHARE = {0.00955: 0.90, 0.0337: 0.87}  # codec.md, section 0


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return rl_like_weights(SIZE, seed=1)


def flat(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in tensors.values()])


def density(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> float:
    return float((flat(old) != flat(new)).mean())


def ordered(bits: np.ndarray) -> np.ndarray:
    wide = bits.astype(np.int32)
    return np.where(wide & 0x8000, 0x7FFF - (wide & 0x7FFF), wide | 0x8000)


@pytest.mark.parametrize("target", [0.001, 0.01, 0.03, 0.1, 0.4])
@pytest.mark.parametrize("masters", ["dithered", "grid"])
def test_the_density_asked_for_is_reached(weights, target, masters):
    new = rl_like_update(weights, target, seed=2, masters=masters)
    assert density(weights, new) == pytest.approx(target, rel=0.1)


def test_density_one_changes_every_element_and_zero_none(weights):
    assert density(weights, rl_like_update(weights, 1.0)) == 1.0
    assert density(weights, rl_like_update(weights, 0.0)) == 0.0
    with pytest.raises(ValueError, match="density"):
        rl_like_update(weights, 1.5)


@pytest.mark.parametrize("target", TABLE)
def test_change_probability_follows_the_exponent_as_measured(weights, target):
    old = flat(weights)
    changed = old != flat(rl_like_update(weights, target, seed=3))
    octave = ((old >> 7) & 0xFF).astype(int) - 127
    for exponent, measured in TABLE[target].items():
        share = changed[octave == exponent].mean()
        assert share == pytest.approx(measured, rel=0.4 if measured < 0.02 else 0.2), exponent


@pytest.mark.parametrize("target", ONE_ULP_SHARE)
def test_steps_of_one_unit_dominate_as_measured(weights, target):
    old, new = flat(weights), flat(rl_like_update(weights, target, seed=4))
    step = (ordered(new) - ordered(old))[old != new]
    assert (np.abs(step) == 1).mean() == pytest.approx(ONE_ULP_SHARE[target], abs=0.03)


def test_masters_on_grid_points_change_by_a_hard_threshold(weights):
    old = flat(weights)
    changed = old != flat(rl_like_update(weights, 0.01, seed=5, masters="grid"))
    octave = ((old >> 7) & 0xFF).astype(int) - 127
    near, far = changed[octave < -15].mean(), changed[octave > -9].mean()
    assert near > 0.7
    assert far < 1e-5


def test_same_seed_same_bits_for_every_thread_count():
    one, two = (rl_like_weights(3 << 20, 7, threads=threads) for threads in (1, 2))
    np.testing.assert_array_equal(flat(one), flat(two))
    new = [rl_like_update(one, 0.02, 8, threads=threads) for threads in (1, 2)]
    np.testing.assert_array_equal(flat(new[0]), flat(new[1]))
    assert not np.array_equal(flat(one), flat(rl_like_weights(3 << 20, 9)))
    assert not np.array_equal(flat(new[0]), flat(rl_like_update(one, 0.02, 9)))


def test_special_values_and_signed_zeros_survive():
    bits = np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0000, 0x8000, 0x0001, 0x8001], np.uint16)
    for masters in ("dithered", "grid"):
        new = rl_like_update({"x": np.tile(bits, 999)}, 0.5, 1, masters=masters)["x"]
        np.testing.assert_array_equal(new.reshape(-1, 8)[:, :4], np.tile(bits[:4], (999, 1)))
        assert ((new.reshape(-1, 8)[:, 4:] & 0x7F80) != 0x7F80).all()


@pytest.mark.parametrize("size", [256, 64 << 10, 1 << 20, 100 << 20, 1 << 30, 16 << 30])
def test_the_plan_is_a_decoder_just_below_the_size(size):
    plans = plan_decoder(size)
    total = sum(2 * int(np.prod(plan.shape)) for plan in plans)
    row = 2 * plans[0].shape[-1]
    assert size - 2 * row < total <= size
    if size >= 1 << 20:
        kinds = {plan.name.split(".")[-2] for plan in plans}
        assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"} <= kinds
        assert len({plan.name for plan in plans}) == len(plans)


def test_arrays_come_from_the_given_allocator():
    taken = []

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        taken.append(np.zeros(shape, np.uint16))
        return taken[-1]

    weights = rl_like_weights(1 << 20, allocate=allocate)
    assert all(a is b for a, b in zip(weights.values(), taken, strict=True))
