"""Chains written by slime's own updater, read version by version."""

from __future__ import annotations

from pathlib import Path

import pytest
from delta_checkpoints import read
from hf_delta_data import CHAINS, NUM_VERSIONS, expected_of, golden_chain, version_of

from gymfast.delta import Tensor
from gymfast.delta.hf_delta.digests import new_hasher
from gymfast.delta.hf_delta.patch import open_patch
from gymfast.delta.hf_delta.version import open_version
from gymfast.testing.compare import assert_bits_equal


@pytest.fixture(params=CHAINS)
def chain(request) -> Path:
    return golden_chain(request.param)


def apply_in_memory(path: Path, weights: dict[str, Tensor], window_bytes: int) -> None:
    version = open_version(path)
    assert version is not None
    with version:
        for stored in version.tensors.values():
            data = weights[stored.name].data
            patch = open_patch(version, stored, data.size)
            for start in range(0, data.size, window_bytes):
                window = data[start : start + window_bytes]
                patch.apply(window.copy(), window, start)
            patch.finish()
            hasher = new_hasher(version.algorithm)
            hasher.update(data.data)
            assert hasher.hexdigest() == stored.digest


@pytest.mark.parametrize("window_bytes", [97, 4096, 2**22])
def test_every_version_of_every_chain_gives_the_expected_tensors(chain, window_bytes) -> None:
    weights = read(chain / "base")
    for number in range(1, NUM_VERSIONS + 1):
        apply_in_memory(version_of(chain, number), weights, window_bytes)
        assert_bits_equal(weights, read(expected_of(chain, number)))


def test_the_metadata_of_every_version_is_read(chain: Path) -> None:
    encoding, _, algorithm = chain.name.partition("-")
    for number in range(1, NUM_VERSIONS + 1):
        with open_version(version_of(chain, number)) as version:
            assert (version.number, version.base) == (number, number - 1)
            assert (version.encoding, version.algorithm) == (encoding, algorithm)
            assert bool(version.tensors) == (number != 4)  # the version without any change


def test_a_full_checkpoint_is_no_delta_version(chain: Path) -> None:
    assert open_version(chain / "base") is None
