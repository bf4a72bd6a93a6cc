"""The kernels of csrc/cuda as a back end, compiled once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import pytest
from cuda_module import Controls, load_module
from cuda_shim import ShimBackend, compile_shim

from gymfast import _core
from gymfast.delta.backends import select


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ShimBackend:
    path = tmp_path_factory.mktemp("cuda_shim") / "libshim.so"
    return ShimBackend.load(compile_shim(path, "-O2", "-shared", "-fPIC"))


@pytest.fixture
def backend(shim: ShimBackend) -> ShimBackend:
    """What tests/delta calls the back end under test."""
    return shim


@pytest.fixture
def parse() -> Callable[[bytes], object]:
    return _core.parse_frame


@pytest.fixture
def selectable(shim: ShimBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets states, encode and apply find the shim by its name."""

    def select_shim(name: str = "auto"):
        return shim if name == shim.name else select(name)

    for name in ("encode", "apply", "state"):
        # The package has functions of these names, so modules come from the import system.
        monkeypatch.setattr(import_module(f"gymfast.delta.{name}"), "select", select_shim)


@pytest.fixture(scope="session")
def cuda_module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The binding on the shim."""
    return load_module(tmp_path_factory.getbasetemp() / "cuda_module")


@pytest.fixture
def controls(cuda_module: ModuleType) -> Iterator[Controls]:
    """Says whose memory is whose; forgets it after the test."""
    controls = Controls(cuda_module)
    yield controls
    controls.reset()
