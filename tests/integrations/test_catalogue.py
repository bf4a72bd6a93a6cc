"""What `gymfast integrations` finds of frameworks, in a path made for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from slime_stubs import STAND_IN

from gymfast.errors import GymfastError, MissingDependencyError, NotFoundError
from gymfast.integrations import catalogue
from gymfast.integrations.catalogue import INTEGRATIONS, Integration, Status, check, find
from gymfast.integrations.installed import find_installed

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {integration.package: integration for integration in INTEGRATIONS}
VLLM, SGLANG = BY_NAME["vllm"], BY_NAME["sglang"]
VLLM_BASE = """
from abc import ABC, abstractmethod

class WeightTransferEngine(ABC):
    def __init__(self, {arguments}): ...
    @abstractmethod
    def init_transfer_engine(self, init_info): ...
    @abstractmethod
    def receive_weights(self, update_info): ...
"""


class Place:
    """A folder at the front of the path, and what is installed there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str = "") -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def put(self, integration: Integration) -> None:
        """The package as far as it is looked at."""
        self.write(f"{integration.package}/__init__.py")
        self.write(f"{integration.package}/{integration.marker}")

    def distribution(self, name: str, version: str, entry_points: str = "") -> None:
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.write(f"{info}/entry_points.txt", entry_points)

    def gymfast(self) -> None:
        text = "".join(
            f"[{i.plugin.group}]\ngymfast = {i.adapter}:register\n"
            for i in INTEGRATIONS
            if i.plugin
        )
        self.distribution("gymfast", "9.9", text)

    def vllm(self, version: str, arguments: str = "config, vllm_config, device, model") -> None:
        self.put(VLLM)
        self.distribution("vllm", version)
        self.write("vllm/__init__.py", f"__version__ = {version!r}")
        self.write("vllm/distributed/__init__.py")
        self.write("vllm/distributed/weight_transfer/__init__.py")
        self.write(
            "vllm/distributed/weight_transfer/base.py", VLLM_BASE.format(arguments=arguments)
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for variable in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield Place(tmp_path)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in BY_NAME:
            del sys.modules[name]


@pytest.mark.parametrize(("bound", "suffix"), [("oldest", ""), ("newest", ".post3")])
@pytest.mark.parametrize("integration", INTEGRATIONS, ids=lambda i: i.package)
def test_a_known_version_is_ready_and_nothing_is_imported(
    place: Place, integration: Integration, bound: str, suffix: str
) -> None:
    version = getattr(integration, bound) + suffix
    place.put(integration)
    place.write(f"{integration.package}/__init__.py", "raise RuntimeError('imported')")
    place.distribution(integration.distributions[-1], version)
    place.gymfast()
    found = find(integration)
    assert (found.status, found.version, found.detail) == (Status.READY, version, "")


@pytest.mark.parametrize("version", ["0.23.9", "0.33.0", "1.0", "0.1.dev5+g1234"])
def test_a_version_that_was_not_read_is_told(place: Place, version: str) -> None:
    place.vllm(version)
    place.gymfast()
    found = find(VLLM)
    assert (found.status, found.version) == (Status.UNKNOWN_VERSION, version)
    assert "0.24 to 0.32" in found.detail and "gymfast integrations vllm" in found.detail


def test_what_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "find_installed", lambda *_: None)
    assert find(VLLM).status is Status.NOT_INSTALLED
    with pytest.raises(NotFoundError, match=r"no package 'vllm' .* environment of vLLM.*0.24 to"):
        check(VLLM)


def test_the_slime_of_the_package_index_is_another_package(place: Place) -> None:
    place.write("slime/__init__.py", "from slime import core")
    place.write("slime/core/__init__.py")
    place.distribution("slime", "0.0.0")
    found = find(BY_NAME["slime"])
    assert (found.status, found.version) == (Status.OTHER_PACKAGE, "0.0.0")
    assert "is another package of the name 'slime'" in found.detail
    with pytest.raises(GymfastError, match="another package"):
        check(BY_NAME["slime"])


def test_the_plugin_is_missed_where_gymfast_is_not_installed_with_it(place: Place) -> None:
    place.vllm("0.32.0")
    place.distribution("gymfast", "9.9")
    found = find(VLLM)
    assert found.status is Status.NO_PLUGIN
    assert "gymfast 9.9 has no entry point in vllm.general_plugins" in found.detail
    with pytest.raises(NotFoundError, match="no entry point"):
        check(VLLM)


@pytest.mark.parametrize(
    ("integration", "allowed", "status"),
    [
        (VLLM, "lora_filesystem_resolver", Status.NO_PLUGIN),
        (VLLM, "", Status.NO_PLUGIN),  # split to a list of one empty name
        (VLLM, "other,gymfast", Status.READY),
        (SGLANG, "other", Status.NO_PLUGIN),
        (SGLANG, "", Status.READY),  # as if it were not set
        (SGLANG, "other, gymfast", Status.READY),
    ],
)
def test_a_variable_may_leave_the_plugin_out(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    integration: Integration,
    allowed: str,
    status: Status,
) -> None:
    place.put(integration)
    place.distribution(integration.package, integration.newest)
    place.gymfast()
    monkeypatch.setenv(integration.plugin.variable, allowed)
    found = find(integration)
    assert found.status is status
    assert (integration.plugin.variable in found.detail) == (status is Status.NO_PLUGIN)


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("setup.py", 'setup(\n    name="slime",\n    version="0.3.1",\n)\n', "0.3.1"),
        ("pyproject.toml", '[tool.a]\nversion = "7"\n[project]\nversion = "0.4"\n', "0.4"),
        ("version.txt", "0.11.0\n", "0.11.0"),
        ("slime/version/version", "0.9.1\n", "0.9.1"),
        ("slime/__init__.py", '__version__ = "0.3.0"\n', "0.3.0"),
        (
            "slime/package_info.py",
            'MAJOR = 0\nMINOR = 6\nPATCH = 0\n__version__ = ".".join(map(str, VERSION))\n',
            "0.6.0",
        ),
        ("pyproject.toml", '[project]\ndynamic = ["version"]\n', "1.2"),
    ],
)
def test_a_checkout_tells_its_version_and_commit(
    place: Place, file: str, text: str, version: str
) -> None:
    """A distribution of that name may be another one that the checkout hides, or its own."""
    place.put(BY_NAME["slime"])
    place.distribution("slime", "1.2")
    place.write(file, text)
    place.write(".git/HEAD", "ref: refs/heads/main\n")
    place.write(".git/refs/heads/main", "624b824a898ab0ec1fcb4d373004c7f3852bf515\n")
    found = find_installed("slime", ["slime"])
    assert found is not None and found.folder == place.folder / "slime"
    assert (found.version, found.commit) == (version, " (commit 624b824a8)")


def test_the_check_imports_the_framework_and_compares_its_signatures(place: Place) -> None:
    place.vllm("0.40.0")
    place.gymfast()
    found = check(VLLM)
    assert (found.status, found.version) == (Status.READY, "0.40.0"), "the signatures decide"


def test_the_check_tells_what_differs(place: Place) -> None:
    place.vllm("0.32.0", arguments="config, mesh")
    place.gymfast()
    assert find(VLLM).status is Status.READY
    with pytest.raises(GymfastError, match=r"'mesh'.*found vLLM 0.32.0, gymfast knows the API"):
        check(VLLM)


def test_the_check_tells_what_the_framework_needs(place: Place) -> None:
    place.vllm("0.32.0")
    place.gymfast()
    for text in ("import a_kernel_that_is_missing", "raise OSError('no a_kernel_that_is_here')"):
        place.write("vllm/distributed/__init__.py", text)
        importlib.invalidate_caches()
        with pytest.raises(MissingDependencyError, match=r"vLLM 0.32.0 cannot .*a_kernel_that_is"):
            check(VLLM)


def test_a_folder_of_the_name_is_no_package(place: Place) -> None:
    place.write("slime/notes.txt")
    assert find(BY_NAME["slime"]).status is Status.NOT_INSTALLED


@pytest.mark.parametrize("new", [True, False], ids=["0.5.16", "0.5.12"])
@pytest.mark.parametrize("second", ["load_format", "format"])
def test_the_check_of_sglang_finds_the_class_of_each_age(
    place: Place, new: bool, second: str
) -> None:
    place.put(SGLANG)
    place.distribution("sglang", "0.5.16" if new else "0.5.12")
    place.gymfast()
    runner = "sglang/srt/model_executor"
    module, name = "model_runner", "ModelRunner"
    for folder in ("sglang/srt", runner):
        place.write(f"{folder}/__init__.py")
    if new:
        module, name = "model_runner_components/weight_updater", "WeightUpdater"
        place.write(f"{runner}/model_runner_components/__init__.py")
    method = f"def update_weights_from_tensor(self, named_tensors, {second}=None): ..."
    place.write(f"{runner}/{module}.py", f"class {name}:\n    {method}\n")
    if second == "load_format":
        assert check(SGLANG).status is Status.READY
    else:
        with pytest.raises(GymfastError, match=r"update_weights_from_tensor takes .*'format'"):
            check(SGLANG)


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_the_check_of_a_trainer_compares_its_updater(place: Place, name: str) -> None:
    place.put(BY_NAME[name])
    module = importlib.import_module(f"gymfast.integrations.{name}")
    path = module._MODULE.replace(".", "/")
    methods = "".join(
        f"    def {method}(self{''.join(f', {p}' for p in parameters)}): ...\n"
        for method, parameters in module.EXPECTED.items()
    )
    for parent in Path(path).parents:
        if parent.name:
            place.write(f"{parent}/__init__.py")
    place.write(f"{path}.py", f"class UpdateWeightFromDiskDelta:\n{methods}")
    assert check(BY_NAME[name]).status is Status.READY
    for loaded in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[loaded]
    methods = methods.replace("update_weights(self)", "update_weights(self, now)")
    place.write(f"{path}.py", f"class UpdateWeightFromDiskDelta:\n{methods}")
    importlib.invalidate_caches()
    with pytest.raises(GymfastError, match="'now'"):
        check(BY_NAME[name])


def test_the_stand_ins_of_the_tests_have_the_file_that_marks_the_real_one() -> None:
    for name in ("slime", "miles"):
        module = importlib.import_module(f"gymfast.integrations.{name}")._MODULE
        assert (STAND_IN / Path(*module.split("."))).with_suffix(".py").is_file()


def test_the_entry_points_are_those_of_the_project() -> None:
    own = metadata.distribution("gymfast").entry_points
    for integration in INTEGRATIONS:
        if integration.plugin is not None:
            (found,) = own.select(group=integration.plugin.group, name="gymfast")
            assert callable(found.load())


@pytest.mark.parametrize("integration", INTEGRATIONS, ids=lambda i: i.package)
def test_every_adapter_is_there_with_its_check_and_its_page(integration: Integration) -> None:
    text = (ROOT / "gymfast" / "integrations" / f"{integration.package}.py").read_text()
    assert f"\ndef {integration.check}() -> None:" in text
    assert (ROOT / integration.page).is_file()
