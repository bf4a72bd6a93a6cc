"""What SGLang puts around a loader: unpickling, sessions, and a process that dies of an exception.

The classes have the signatures of the real ones: test_sglang_real.py compares them.
"""

from __future__ import annotations

import base64
import importlib
import io
import pickle  # noqa: TID251
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from slime_engine import receiver_of

ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
}


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)  # noqa: TID251 - as SGLang does


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")


class WeightUpdater:
    """One rank: hands tensors to the loader of that name."""

    def __init__(self, model: Any, custom_weight_loaders: list[str]) -> None:
        self.model, self.custom_weight_loaders = model, custom_weight_loaders

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Any]], load_format: str | None = None
    ) -> tuple[bool, str]:
        if load_format not in self.custom_weight_loaders:
            raise NotImplementedError(f"Unknown load_format={load_format}")
        module, _, function = load_format.rpartition(".")
        getattr(importlib.import_module(module), function)(self.model, named_tensors)
        return True, "Success"

    def begin_weight_update(self) -> None:
        return

    def end_weight_update(self, *, run_post_load: bool) -> None:
        return


class WeightExporter:
    def __init__(self, model: Any) -> None:
        self.model = model

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        return self.model.get_weights_by_name(name, truncate_size, tp_size=1)


def install_sglang(world_size: int = 1, cpu_group: Any = None) -> dict[str, types.ModuleType]:
    """Modules for `from sglang.srt.distributed import get_tp_group`, not yet in sys.modules."""
    names = ("", ".srt", ".srt.distributed", ".srt.managers", ".srt.managers.io_struct")
    modules = {f"sglang{name}": types.ModuleType(f"sglang{name}") for name in names}
    modules["sglang.srt.managers.io_struct"].BeginWeightUpdateReqOutput = types.SimpleNamespace
    group = types.SimpleNamespace(world_size=world_size, cpu_group=cpu_group)
    modules["sglang.srt.distributed"].get_tp_group = lambda: group
    return modules


class SchedulerWeightUpdaterManager:
    """The session around updates, of one rank."""

    def __init__(self, updater: WeightUpdater, scheduler: Scheduler) -> None:
        self.updater, self.scheduler = updater, scheduler
        self.tp_worker = types.SimpleNamespace(
            model_runner=types.SimpleNamespace(weight_updater=updater)
        )
        self.is_open = False
        self.offload_tags: set[str] = set()  # what a sleep released

    def begin_weight_update(self, recv_req: Any) -> Any:
        if self.is_open:
            return _output(False, "a weight-update session is already open; call end first")
        self.is_open = True
        self.updater.begin_weight_update()
        return _output(True, "Success")

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        if not self.is_open:
            return _output(False, "update_weights_from_tensor must run between begin and end")
        named = deserialize(recv_req.serialized_named_tensors[0])
        success, message = self.updater.update_weights_from_tensor(named, recv_req.load_format)
        self.scheduler.record_weight_version_change(new_version=recv_req.weight_version)
        if recv_req.flush_cache:
            self.scheduler.flush_cache()
        return _output(success, message)

    def end_weight_update(self, recv_req: Any) -> Any:
        if not self.is_open:
            return _output(False, "no weight-update session is open; call begin first")
        self.is_open = False
        self.updater.end_weight_update(run_post_load=False)
        return _output(True, "Success")


class Scheduler:
    """What a request did to version and cache."""

    def __init__(self) -> None:
        self.weight_version = "default"
        self.notes: list[str] = []

    def record_weight_version_change(self, new_version: str | None) -> None:
        if new_version is not None:
            self.weight_version = new_version
            self.notes.append(new_version)

    def flush_cache(self, empty_cache: bool = False) -> bool:
        self.notes.append("flush")
        return True


def deserialize(data: bytes) -> Any:
    return SafeUnpickler(io.BytesIO(data)).load()


def _output(success: bool, message: str) -> Any:
    return types.SimpleNamespace(success=success, message=message)


class Engine:
    """What the server does with a request. `options` make it another version, or fail."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self.loaders = ["gymfast.integrations.sglang.load"]
        self.scheduler = Scheduler()
        self.is_paused = False
        self.calls: list[str] = []
        self.build()

    def build(self) -> None:
        self.deserialize = deserialize
        self.updater = WeightUpdater(self.model, self.loaders)
        self.exporter = WeightExporter(self.model)
        self.manager = SchedulerWeightUpdaterManager(self.updater, self.scheduler)

    @property
    def is_open(self) -> bool:
        return self.manager.is_open

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls.append(path)
        if path in self.options.get("fails", {}):
            return 400, {"success": False, "message": self.options["fails"][path]}
        handler: Callable[[dict[str, Any]], tuple[int, Any]] | None = getattr(
            self, "do" + path.replace("/", "_"), None
        )
        if handler is None or path in self.options.get("missing", ()):
            return 404, {"detail": "Not Found"}
        return handler(body)

    def do_server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        info = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "quantization": None}
        return 200, info | {"custom_weight_loader": self.loaders} | self.options.get("info", {})

    def do_pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.is_paused = True
        self.calls[-1] += f":{body.get('mode', 'abort')}"
        return 200, {"status": "ok"}

    def do_continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.is_paused = False
        return 200, {"status": "ok"}

    def do_begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        return _answer(self.manager.begin_weight_update(types.SimpleNamespace(**body)))

    def do_end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        return _answer(self.manager.end_weight_update(types.SimpleNamespace(**body)))

    def do_post_process_weights(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls[-1] += f":{body['restore_weights_before_load']:d}"
        self.calls[-1] += f"{body['post_process_quantization']:d}"
        return 200, {"success": True, "message": "Success"}

    def do_update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        body = {"weight_version": None, "flush_cache": True, "torch_empty_cache": False} | body
        payloads = [base64.b64decode(p, validate=True) for p in body["serialized_named_tensors"]]
        request = types.SimpleNamespace(**body | {"serialized_named_tensors": payloads})
        self.scheduler.notes = []
        if "/begin_weight_update" in self.options.get("missing", ()):
            answer = _answer(self._update_without_session(request))
        else:
            answer = _answer(self.manager.update_weights_from_tensor(request))
        self.calls[-1] = ":".join([self.calls[-1], *sorted(self.scheduler.notes)])
        return answer

    def _update_without_session(self, request: Any) -> Any:
        named = self.deserialize(request.serialized_named_tensors[0])
        output = self.updater.update_weights_from_tensor(named, request.load_format)
        self.scheduler.record_weight_version_change(request.weight_version)
        if request.flush_cache:
            self.scheduler.flush_cache()
        return _output(*output)

    def do_pull_weights(self, body: dict[str, Any]) -> tuple[int, Any]:
        local, source = body["local_checkpoint_dir"], body["source_dir"]
        receiver_of(self.options.get("slime_source"))(
            local, self.options["model_path"], source, body["target_version"]
        )
        return 200, {"success": True, "message": "Success."}

    def do_update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        (file,) = Path(body["model_path"]).glob("*.safetensors")
        self.model.load_weights(load_file(file).items())
        self.scheduler.record_weight_version_change(body["weight_version"])
        return 200, {"success": True, "message": "Success."}

    def do_flush_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.is_paused
        return 200, {}

    def do_get_weights_by_name(self, body: dict[str, Any]) -> tuple[int, Any]:
        value = self.exporter.get_weights_by_name(body["name"], body["truncate_size"])
        if value is None:
            return 400, {"message": "failed"}
        return 200, [value] * self.options["num_groups"] if "num_groups" in self.options else value

    def do_model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": self.scheduler.weight_version}

    def do_test(self, body: dict[str, Any]) -> tuple[int, Any]:
        """For tests alone: sets what breaks, tells what is seen and what the weights are."""
        self.options.update(body.get("options", {}))
        self.model.break_after = body.get("break_after")
        bits = {name: value.view(torch.int16) for name, value in self.model.named_parameters()}
        seen = {
            "calls": self.calls[:-1],
            "loads": self.model.loads,
            "updater": type(self.updater).__module__,
            "is_paused": self.is_paused,
            "is_open": self.is_open,
            "weights": {name: value.tolist() for name, value in bits.items()},
        }
        self.calls, self.model.loads = [], []
        return 200, seen


def _answer(output: Any) -> tuple[int, Any]:
    code = 200 if output.success else 400
    return code, {"success": output.success, "message": output.message}
