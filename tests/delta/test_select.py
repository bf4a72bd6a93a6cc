"""Which back end runs, and what is said where the native one is missing."""

from __future__ import annotations

import sys

import pytest
import torch
from cuda_device import FakeCuda

from gymfast.delta import State, memory
from gymfast.delta.backends import select
from gymfast.errors import MissingDependencyError


def test_auto_is_a_back_end_of_its_own() -> None:
    assert select().name == select("auto").name == "auto"
    assert select("cpu").name == "cpu"
    assert select("reference").name == "reference"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'gpu', expected one of auto, cpu, reference"):
        select("gpu")


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_missing_extension_module_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, "gymfast.delta.backends.cpu", raising=False)
    monkeypatch.delattr("gymfast._core", raising=False)
    monkeypatch.setitem(sys.modules, "gymfast._core", None)
    with pytest.raises(MissingDependencyError, match=r"gymfast\._core.*backend='reference'"):
        select(name)
    assert select("reference").name == "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(MissingDependencyError, match=r"cuda:0 memory.*finds no GPU.*backend='cpu'"):
        memory.zeros(4, "cuda:0")
    with pytest.raises(MissingDependencyError, match=r"pinned memory.*finds no GPU"):
        memory.zeros(4, "pinned")


def test_a_tensor_on_a_gpu_without_a_back_end_for_it_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("cuda", "triton"):
        monkeypatch.setitem(sys.modules, f"gymfast.delta.backends.{name}", None)
    weights = {"w": torch.ones(3).as_subclass(FakeCuda)}
    reasons = r"a tensor is in CUDA memory.*gymfast\._cuda.*nvcc.*gymfast\[triton\]"
    with pytest.raises(MissingDependencyError, match=reasons):
        State.copy_of(weights)
