"""Random numbers: the published test vectors, the same numbers in Python and C++, independence."""

from __future__ import annotations

import numpy as np
import pytest

from gymfast import _core
from gymfast_sim.draws import MAX_SEED, Draws, Purpose, philox, reference_draw

# Source: kat_vectors of Random123, lines "philox4x32 10".
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def _words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    assert philox(_words(counter), _words(key)) == _words(expected)  # type: ignore[arg-type]
    assert _core.sim_philox(*_words(counter), *_words(key)) == _words(expected)


def test_python_and_cpp_draw_the_same_numbers() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5_000):
        seed, replication, attempt = (int(n) for n in rng.integers(0, 2**32, 3))
        entity = int(rng.integers(0, 2**63))
        purpose, index = int(rng.integers(0, 256)), int(rng.integers(0, 2**24))
        found = Draws(seed, replication)(entity, attempt, purpose, index)
        assert found == reference_draw((seed, replication), entity, attempt, purpose, index)


def test_numbers_never_reach_the_ends_of_the_interval() -> None:
    from gymfast_sim.draws import _unit

    assert (_unit(0, 0), _unit(2**32 - 1, 2**32 - 1)) == (2.0**-53, 1 - 2.0**-53)


def test_every_part_of_a_name_makes_another_number() -> None:
    names = [(1, 2, 3, 4, 5), (2, 2, 3, 4, 5), (1, 3, 3, 4, 5), (1, 2, 4, 4, 5), (1, 2, 3, 5, 5)]
    names += [(1, 2, 3, 4, 6)]
    found = {Draws(s)(entity, attempt, p, i) for s, entity, attempt, p, i in names}
    found.add(Draws(1, 1)(2, 3, 4, 5))
    assert len(found) == len(names) + 1


def test_numbers_are_uniform_and_the_two_of_a_draw_independent() -> None:
    draws = Draws(11)
    pairs = np.array([draws(entity, 0, Purpose.WORK) for entity in range(40_000)])
    for column in pairs.T:
        ordered = np.sort(column)
        distance = np.abs(ordered - (np.arange(ordered.size) + 0.5) / ordered.size).max()
        assert distance < 1.95 / np.sqrt(ordered.size)  # Kolmogorov-Smirnov at 0.1 %
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 3.3 / np.sqrt(len(pairs))


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed is"):
        Draws(seed)


def test_purposes_and_indices_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="purpose has 8 bits"):
        Draws(0)(0, 0, 256)
    with pytest.raises(ValueError, match="index has 24"):
        Draws(0)(0, 0, 0, 2**24)
