"""What is said where torch or triton is missing, and of tensors that kernels cannot take."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gymfast.delta.backends import select
from gymfast.delta.geometry import Geometry
from gymfast.errors import MissingDependencyError

GEOMETRY = Geometry(8, 1, 8, 1, 8)


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in list(sys.modules):
        if name.startswith("gymfast.delta.backends.triton"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match=rf"{missing}.*gymfast\[triton\]"):
        select("triton")


def test_gymfast_imports_neither_torch_nor_triton() -> None:
    code = "import sys, gymfast, gymfast.delta; gymfast.delta.encode; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.decode().split()}
    assert not loaded & {"torch", "triton"}


@pytest.mark.usefixtures("triton_installed")
def test_tensors_in_cpu_memory_are_refused_outside_the_interpreter() -> None:
    with pytest.raises(ValueError, match="data is on cpu, expected cuda"):
        select("triton").digest_blocks(torch.zeros(8, dtype=torch.uint8), GEOMETRY, 1)
