"""The double of NCCL that tests of this folder share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from nccl_doubles import Double, build

from gymfast.errors import MissingDependencyError


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Double:
    folder = tmp_path_factory.mktemp("nccl_double")
    os.environ["DOUBLE_SEGMENTS"] = str(tmp_path_factory.mktemp("nccl_segments"))
    double = Double(build(folder))
    try:
        double.load()
    except MissingDependencyError as error:
        if "two different NCCLs" in str(error):
            pytest.skip("needs a process without the real NCCL")
        raise
    return double


@pytest.fixture
def double(built: Double) -> Iterator[Double]:
    built.reset()
    yield built
    built.reset()
