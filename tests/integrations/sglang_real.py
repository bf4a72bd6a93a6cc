"""Real files of SGLang, run without what they import: no kernels, no server, no GPU.

Real are the rank's updater and exporter, the scheduler's session, and the unpickler; all other
modules of SGLang are stubs that answer as one rank with an unquantized model does.
"""

from __future__ import annotations

import ast
import base64
import importlib.abc
import importlib.util
import io
import pickle  # noqa: TID251
import subprocess
import sys
import types
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from integrations.sglang_stand_in import Engine

from gymfast.integrations.sglang_plugin import register

VERSION = "0.5.23"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
EXPORTER = "sglang.srt.model_executor.model_runner_components.weight_exporter"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
BUCKET = "sglang.srt.weight_sync.tensor_bucket"
COMMON, REQUESTS = "sglang.srt.utils.common", "sglang.srt.managers.io_struct"
HTTP, CONSTANTS = "sglang.srt.entrypoints.http_server", "sglang.srt.constants"
PARALLEL, MODEL = (f"sglang.srt.arg_groups.fields.{name}" for name in ("parallel", "model"))
HOOKS = "sglang.srt.plugins.hook_registry"
RUN = (UPDATER, EXPORTER, MANAGER, BUCKET, HOOKS)
FILES = (*RUN, COMMON, REQUESTS, HTTP, CONSTANTS, PARALLEL, MODEL)
TAKEN_FROM_COMMON = {
    "_safe_load_torch_storage",
    "SafeUnpickler",
    "MultiprocessingSerializer",
    "dynamic_import",
    "init_custom_process_group",
}


def unpack_wheel(folder: Path) -> Path:
    """The folder with the files named above, from the wheel of the package index."""
    command = ["pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    wheel = ["--only-binary=:all:", "--python-version=3.11", f"sglang=={VERSION}"]
    subprocess.run([sys.executable, "-m", *command, *wheel, "-d", folder], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder, [str(path_of(Path(), name)) for name in FILES])
    return folder


def path_of(source: Path, module: str) -> Path:
    return source / Path(*module.split(".")).with_suffix(".py")


def fields_of(file: Path, name: str) -> set[str]:
    """Names of the fields of a class, read from the text."""
    body = _class(file, name).body
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


def parameters_of(file: Path, name: str, method: str) -> list[str]:
    """Names of the parameters of a method, read from the text."""
    found = [
        node
        for node in _class(file, name).body
        if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    arguments = found[0].args
    return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]


def _class(file: Path, name: str) -> ast.ClassDef:
    tree = ast.parse(file.read_text())
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)


class _Stub(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        if name.endswith("_enabled"):  # a kernel that would forbid updates
            value.return_value = False
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, source: Path) -> None:
        self._source = source

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        if name in RUN:
            return importlib.util.spec_from_file_location(name, path_of(self._source, name))
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return


def definitions_of_common(file: Path) -> dict[str, Any]:
    """Some real definitions of a file that imports half the world."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") in TAKEN_FROM_COMMON]
    names: dict[str, Any] = {
        "__name__": COMMON,
        "io": io,
        "pickle": pickle,
        "torch": torch,
        "importlib": importlib,
        "pybase64": base64,
        "torch_release": (2, 6),  # or newer: which name an option has
    }
    exec(compile(tree, COMMON, "exec"), names)
    return names


def install(source: Path) -> dict[str, Any]:
    """The real definitions, with this process made to look like the only rank of an engine."""
    sys.meta_path.insert(0, _Finder(source))
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    common = definitions_of_common(path_of(source, COMMON))
    group = types.SimpleNamespace(world_size=1, cpu_group=torch.distributed.group.WORLD)
    parallel = types.SimpleNamespace(tp_rank=0, tp_group=group)

    context = importlib.import_module("sglang.srt.runtime_context")
    context.get_model = lambda: types.SimpleNamespace(weight_cache_mode="off")
    context.get_parallel = lambda: parallel
    importlib.import_module("sglang.srt.distributed").get_tp_group = lambda: group
    utils = importlib.import_module("sglang.srt.utils")
    utils.dynamic_import = common["dynamic_import"]
    utils.init_custom_process_group = common["init_custom_process_group"]
    network = importlib.import_module("sglang.srt.utils.network")
    network.NetworkAddress = _Address
    utils.MultiprocessingSerializer = common["MultiprocessingSerializer"]
    requests = importlib.import_module(REQUESTS)
    for name in ("UpdateWeightsFromTensor", "UpdateWeightsFromDistributed", "BeginWeightUpdate"):
        setattr(requests, f"{name}ReqOutput", types.SimpleNamespace)
    requests.EndWeightUpdateReqOutput = types.SimpleNamespace
    register()
    importlib.import_module(HOOKS).HookRegistry.apply_hooks()
    return common | {
        name: getattr(importlib.import_module(module), name)
        for module, name in (
            (UPDATER, "WeightUpdater"),
            (EXPORTER, "WeightExporter"),
            (MANAGER, "SchedulerWeightUpdaterManager"),
        )
    }


class _Address:
    def __init__(self, host: str, port: int) -> None:
        self._text = f"tcp://{host}:{port}"

    def to_tcp(self) -> str:
        return self._text


class RealEngine(Engine):
    """The stand-in server around the real classes."""

    def __init__(self, model: Any, options: dict[str, Any], real: dict[str, Any]) -> None:
        self._real = real
        super().__init__(model, options)

    def build(self) -> None:
        self.deserialize = self._real["MultiprocessingSerializer"].deserialize
        one_rank: dict[str, Any] = {"tp_rank": 0, "gpu_id": 0, "get_model": lambda: self.model}
        self.updater = self._real["WeightUpdater"](
            **one_rank,
            device="cpu",
            model_config=None,
            custom_weight_loaders=self.loaders,
            update_model_fields=lambda: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: runner,
        )
        self.exporter = self._real["WeightExporter"](
            **one_rank, tp_size=1, get_model_path=lambda: ""
        )
        runner = types.SimpleNamespace(weight_updater=self.updater)
        worker = types.SimpleNamespace(
            model_runner=runner,
            weight_update_runners=lambda: [("target", runner)],
            deserialize_own_rank=lambda payloads: self.deserialize(payloads[0]),
        )
        manager = self._real["SchedulerWeightUpdaterManager"]
        group: dict[str, Any] = {}
        if "tp_cpu_group" in signature(manager).parameters:  # until 0.5.21
            group["tp_cpu_group"] = torch.distributed.group.WORLD
        self.manager = manager(
            **group,
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self.scheduler.flush_cache,
            is_fully_idle=lambda: True,
            scheduler=self.scheduler,
        )

    def do_init_weights_update_group(self, body: dict[str, Any]) -> tuple[int, Any]:
        success, message = self.updater.init_weights_update_group(**body)
        return 200 if success else 400, {"success": success, "message": message}

    def do_update_weights_from_distributed(self, body: dict[str, Any]) -> tuple[int, Any]:
        request = types.SimpleNamespace(**{"load_format": None, "weight_version": None} | body)
        output = self.manager.update_weights_from_distributed(request)
        code = 200 if output.success else 400
        return code, {"success": output.success, "message": output.message}

    @property
    def is_open(self) -> bool:
        return getattr(self.manager, "_session", None) is not None  # none before 0.5.21
