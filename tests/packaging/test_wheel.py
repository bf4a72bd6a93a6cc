"""The sdist builds a wheel, and the wheel works beside its five dependencies only."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging_environments import Environment, build, clean_copy

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]

SMOKE_TEST = """
import numpy as np
import gymfast, gymfast.delta as delta, gymfast_sim
old = {"w": np.arange(4096, dtype=np.uint16)}
new = {"w": old["w"].copy()}
new["w"][::97] ^= 1
frame = delta.encode(old, new)
delta.apply(old, frame)
assert (old["w"] == new["w"]).all() and len(frame) < 4096
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build(clean_copy(folder / "source"), folder, "--sdist")
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = next(path for path in folder.iterdir() if path.is_dir())
    build(source, folder, "--wheel")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment.create(tmp_path_factory.mktemp("venv"))
    environment.install(wheel)
    return environment


def test_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gymfast", "gymfast_sim"}
    preset = "gymfast_sim/presets/providers/modal-claimed.toml"
    for name in ("gymfast/py.typed", "gymfast/_core.pyi", "gymfast_sim/py.typed", preset):
        assert name in names
    assert any(name.startswith("gymfast/_core.") and name.endswith(".so") for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_and_sdist_are_small(wheel: Path, sdist: Path) -> None:
    assert wheel.stat().st_size < 4 * 2**20
    assert sdist.stat().st_size < 4 * 2**20


def test_sdist_holds_what_a_build_and_a_test_run_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "README.md", "tests/conftest.py", "Makefile"} <= names
    assert not [name for name in names if name.startswith((".ci/", "build/", ".venv"))]


def test_wheel_brings_only_the_five_dependencies(installed: Environment) -> None:
    indirect = {"markdown-it-py", "mdurl", "pygments"}
    expected = {"gymfast", "numpy", "msgspec", "safetensors", "click", "rich", *indirect}
    assert installed.distributions() - {"pip", "setuptools"} == expected


def test_wheel_encodes_and_applies(installed: Environment) -> None:
    installed.run("python", "-I", "-c", SMOKE_TEST)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of the CUDA toolkit")
def test_wheel_has_the_cuda_module_where_nvcc_is(installed: Environment) -> None:
    code = "from gymfast import _cuda; print(_cuda.__doc__, _cuda.device_count())"
    assert "__cuda_array_interface__" in installed.run("python", "-I", "-c", code)


def test_wheel_has_the_command(installed: Environment) -> None:
    assert "0.1.0" in installed.run("gymfast", "--version")
    assert "delta" in installed.run("gymfast", "--help")
