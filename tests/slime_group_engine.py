"""A server with the endpoints that slime calls, around SGLang's receiving code.

`python slime_group_engine.py FOLDER` prints its port. FOLDER holds `sglang/srt`: of 0.5.21 and
later the real updater and session run, of 0.5.15 the methods of its model runner; "" is a stand-in
with their signatures. As SGLang's scheduler it does one request after the other.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch
import torch.distributed as dist
from integrations import sglang_real, sglang_stand_in

from gymfast.delta import State
from gymfast.integrations.sglang import load
from gymfast.integrations.sglang_messages import LOADER

RUNNER = Path("sglang", "srt", "model_executor", "model_runner.py")
METHODS = (
    *("init_weights_update_group", "destroy_weights_update_group"),
    *("update_weights_from_distributed", "_update_bucketed_weights_from_distributed"),
    "update_weights_from_tensor",
)
STAND_IN = Path(__file__).parent / "slime_stand_in" / "slime" / "utils" / "distributed_utils.py"


class Model(torch.nn.Module):
    """Keeps what it is given, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.digests: dict[str, str] = {}
        self.loads: list[list[str]] = []
        self.keeps = True
        self.break_load = False

    def restart(self) -> None:
        """As the model of a new process."""
        for name in ("gymfast_loader", "load_weights", "get_weights_by_name", "forward"):
            vars(self).pop(name, None)
        self.digests = {}

    def load_weights(self, weights: Any) -> None:
        weights = list(weights)
        if self.break_load:
            self.break_load = False
            raise RuntimeError("no room for a parameter")
        self.loads.append([name for name, _ in weights])
        for name, tensor in weights if self.keeps else ():
            self.digests[name] = digest(tensor)


def digest(tensor: torch.Tensor) -> str:
    """Of type, shape and bytes."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    what = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return sha256(what + data).hexdigest()[:16]


class Receiver:
    """The least that an engine does with a broadcast; all others get its `receive`."""

    def __init__(self, model: Model) -> None:
        self._model, self._groups = model, {}
        self._make_group = _load(STAND_IN).init_process_group

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def init_weights_update_group(
        self, master_address, master_port, rank_offset, world_size, group_name, backend="nccl"
    ) -> tuple[bool, str]:
        try:
            self._groups[group_name] = self._make_group(
                backend=backend,
                init_method=f"tcp://{master_address}:{master_port}",
                world_size=world_size,
                rank=rank_offset,
                group_name=group_name,
            )
        except RuntimeError as error:
            return False, f"Failed to initialize custom process group: {error}."
        return True, "Success"

    def destroy_weights_update_group(self, group_name) -> tuple[bool, str]:
        if group_name not in self._groups:
            return False, "The group to be destroyed does not exist."
        dist.destroy_process_group(self._groups.pop(group_name))
        return True, "Success"

    def receive(self, body: dict[str, Any]) -> tuple[bool, str]:
        group = self._groups[body["group_name"]]
        described = [
            (name, getattr(torch, dtype), shape)
            for name, dtype, shape in zip(
                body["names"], body["dtypes"], body["shapes"], strict=True
            )
        ]
        tensors = [torch.empty(shape, dtype=dtype) for _, dtype, shape in described]
        try:
            if body.get("load_format") == "flattened_bucket":
                flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
                dist.broadcast(flat, 0, group=group)
                begin = 0
                for number, tensor in enumerate(tensors):
                    end = begin + tensor.numel() * tensor.element_size()
                    tensors[number] = flat[begin:end].view(tensor.dtype).reshape(tensor.shape)
                    begin = end
            else:
                works = [dist.broadcast(t, 0, group=group, async_op=True) for t in tensors]
                for work in works:
                    work.wait()
        except RuntimeError as error:
            return False, f"Failed to receive weights: {error}"
        self._model.load_weights(list(zip(body["names"], tensors, strict=True)))
        return True, "Success"

    def receive_tensors(self, body: dict[str, Any]) -> tuple[bool, str]:
        (payload,) = body["serialized_named_tensors"]
        assert body["load_format"] == LOADER
        load(self._model, sglang_stand_in.deserialize(base64.b64decode(payload)))
        return True, "Success"


def runner_of(source: Path, model: Model) -> Any:
    """The real methods of the model runner of an SGLang that has no updater of its own."""
    tree = ast.parse((source / RUNNER).read_text())
    named = {getattr(n, "name", ""): n for n in tree.body}
    runner = named["ModelRunner"]
    runner.body = [node for node in runner.body if getattr(node, "name", "") in METHODS]
    runner.bases = []
    tree.body = [named["LocalSerializedTensor"], named["_unwrap_tensor"], runner]
    common = sglang_real.definitions_of_common(sglang_real.path_of(source, sglang_real.COMMON))
    names = {
        "torch": torch,
        "Optional": Optional,
        "dataclass": dataclass,
        "monkey_patch_torch_reductions": lambda: None,
        "MultiprocessingSerializer": common["MultiprocessingSerializer"],
        "dynamic_import": common["dynamic_import"],
        "logger": logging.getLogger("sglang"),
        "NetworkAddress": sglang_real._Address,
        "init_custom_process_group": common["init_custom_process_group"],
        "FlattenedTensorBucket": _load(
            sglang_real.path_of(source, sglang_real.BUCKET)
        ).FlattenedTensorBucket,
    }
    exec(compile(tree, str(RUNNER), "exec"), names)

    class Runner(names["ModelRunner"]):
        begin = end = lambda self: None

        def __init__(self) -> None:
            self.model, self.device, self.tp_rank, self._model_update_group = model, "cpu", 0, {}
            self.server_args = SimpleNamespace(custom_weight_loader=[LOADER])

        def receive(self, body: dict[str, Any]) -> tuple[bool, str]:
            keys = ("names", "dtypes", "shapes", "group_name", "load_format")
            return self.update_weights_from_distributed(*(body.get(key) for key in keys))

        def receive_tensors(self, body: dict[str, Any]) -> tuple[bool, str]:
            (payload,) = body["serialized_named_tensors"]
            named = common["MultiprocessingSerializer"].deserialize(base64.b64decode(payload))
            return self.update_weights_from_tensor(named, body["load_format"])

    return Runner()


def session_of(source: Path, model: Model) -> Any:
    """The real updater of an SGLang with sessions, which slime's handle does not open or close."""
    engine = sglang_real.RealEngine(model, {}, sglang_real.install(source))
    manager = engine.manager

    class Session:
        init_weights_update_group = staticmethod(engine.updater.init_weights_update_group)
        destroy_weights_update_group = staticmethod(engine.updater.destroy_weights_update_group)

        def begin(self) -> None:
            assert manager.begin_weight_update(SimpleNamespace(selector="all")).success

        def end(self) -> None:
            assert manager.end_weight_update(SimpleNamespace()).success

        def receive(self, body: dict[str, Any]) -> tuple[bool, str]:
            rest = {"load_format": None, "weight_version": None, "selector": "all"}
            request = {**rest, "torch_empty_cache": False, "abort_all_requests": False, **body}
            output = manager.update_weights_from_distributed(SimpleNamespace(**request))
            return output.success, output.message

        def receive_tensors(self, body: dict[str, Any]) -> tuple[bool, str]:
            assert body["selector"] == "target"
            _, answer = engine.answer("/update_weights_from_tensor", body)
            return answer["success"], answer["message"]

    return Session()


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"loaded_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Engine:
    def __init__(self, source: str) -> None:
        self.model = Model()
        self.has_loader = self.is_new = False
        if not source:
            self.receiver: Any = Receiver(self.model)
        elif sglang_real.path_of(Path(source), sglang_real.UPDATER).is_file():
            self.receiver = session_of(Path(source), self.model)
            self.is_new = True
        else:
            self.receiver = runner_of(Path(source), self.model)
        # slime's handle opens no session: the pause does it for new versions.
        self.has_sessions = self.opens_at_pause = self.is_new
        self.lock = threading.Lock()
        self.version, self.server_version = "default", "0.5.23"
        self.calls: list[str] = []
        self.failures: list[dict[str, Any]] = []
        self.is_paused = self.is_open = False

    def answer(self, path: str, body: dict[str, Any]) -> tuple[bool, Any]:
        if path == "server_info":
            return True, self._server_info()
        if path == "get_weights_by_name":
            return self._get_weights_by_name(body)
        if path == "test":
            return True, self._test(body)
        with self.lock:
            self.calls.append(path)
            how = self._failure(path)
            if how == "die":
                os._exit(1)
            if how == "silent":
                time.sleep(600)
            if how == "refuse":
                return False, {"success": False, "message": "this engine has no room"}
            success, message = getattr(self, f"_{path}")(body)
            return success, {"success": success, "message": message}

    def _test(self, body: dict[str, Any]) -> dict[str, Any]:
        """For tests alone: sets what breaks, tells what is seen."""
        if body.get("is_reset"):
            for name in ("slime", "miles"):
                for stage in range(2):
                    self.receiver.destroy_weights_update_group(f"{name}-pp_{stage}")
            self.model.restart()
            self.version, self.server_version, self.has_loader = "default", "0.5.23", False
            self.has_sessions = self.opens_at_pause = self.is_new
            self.failures.clear()
            if self.is_open:
                self._end_weight_update({})
        for name in ("has_loader", "has_sessions", "opens_at_pause"):
            setattr(self, name, body.get(name, getattr(self, name)))
        self.model.break_load = body.get("break_load", self.model.break_load)
        if body.get("is_restarted"):
            self.model.restart()
        if "other_part" in body:  # as if somebody else had sent it
            others = {"another": torch.ones(3)}
            self.model.gymfast_loader._parts._parts[body["other_part"]] = State.copy_of(others)
        self.model.keeps = body.get("keeps", self.model.keeps)
        self.failures += body.get("failures", [])
        self.server_version = body.get("server_version", self.server_version)
        calls, self.calls = self.calls, []
        loads, self.model.loads = self.model.loads, []
        return {
            "calls": calls,
            "loads": loads,
            "version": self.version,
            "is_paused": self.is_paused,
            "digests": self.model.digests,
        }

    def _server_info(self) -> dict[str, Any]:
        if not self.has_loader:
            return {"version": self.server_version}
        sizes = {"tp_size": 1, "dp_size": 1, "pp_size": 1}
        return {"version": self.server_version, "custom_weight_loader": [LOADER]} | sizes

    def _begin_weight_update(self, body: dict[str, Any]) -> tuple[bool | int, str]:
        if not self.has_sessions:
            return 404, "Not Found"  # slime's patched 0.5.15
        if self.is_open:
            return False, "a weight-update session is already open; call end first"
        self.is_open = True
        self.receiver.begin()
        return True, "Success"

    def _end_weight_update(self, body: dict[str, Any]) -> tuple[bool, str]:
        if not self.is_open:
            return False, "no weight-update session is open; call begin first"
        self.is_open = False
        self.receiver.end()
        return True, "Success"

    def _get_weights_by_name(self, body: dict[str, Any]) -> tuple[bool, Any]:
        find = getattr(self.model, "get_weights_by_name", None)
        value = find and find(body["name"], body["truncate_size"])
        return value is not None, value or {"message": "failed"}

    def _update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[bool, str]:
        assert self.is_paused
        assert not body["flush_cache"]
        return self._told(body, *self.receiver.receive_tensors(body))

    def _failure(self, path: str) -> str:
        for failure in self.failures:
            if failure["path"] == path:
                if failure["after"] == 0:
                    self.failures.remove(failure)
                    return failure["how"]
                failure["after"] -= 1
        return ""

    def _init_weights_update_group(self, body: dict[str, Any]) -> tuple[bool, str]:
        return self.receiver.init_weights_update_group(**body | {"backend": "gloo"})

    def _destroy_weights_update_group(self, body: dict[str, Any]) -> tuple[bool, str]:
        return self.receiver.destroy_weights_update_group(**body)

    def _pause_generation(self, body: dict[str, Any]) -> tuple[bool, str]:
        self.is_paused = True
        if body:
            self.calls[-1] += f":{body['mode']}"
        if self.opens_at_pause and not self.is_open:
            self._begin_weight_update(body)
        return True, "ok"

    def _continue_generation(self, body: dict[str, Any]) -> tuple[bool, str]:
        self.is_paused = False
        if self.opens_at_pause and self.is_open:
            self._end_weight_update(body)
        return not self.is_open, "ok"

    def _flush_cache(self, body: dict[str, Any]) -> tuple[bool, str]:
        assert self.is_paused
        return True, "ok"

    def _post_process_weights(self, body: dict[str, Any]) -> tuple[bool, str]:
        self.calls[-1] += f":{body['restore_weights_before_load']:d}"
        self.calls[-1] += f"{body['post_process_quantization']:d}"
        return True, "ok"

    def _update_weights_from_distributed(self, body: dict[str, Any]) -> tuple[bool, str]:
        assert self.is_paused
        assert not body["flush_cache"]
        return self._told(body, *self.receiver.receive(body))

    def _update_weight_version(self, body: dict[str, Any]) -> tuple[bool, str]:
        self.version = body["new_version"]
        return True, "ok"

    def _told(self, body: dict[str, Any], success: bool, message: str) -> tuple[bool, str]:
        if success and body.get("weight_version") is not None:
            self.version = body["weight_version"]
            self.calls[-1] += f":{self.version}"
        return success, message


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        success, answer = self.engine.answer(self.path.strip("/"), body)
        data = json.dumps(answer).encode()
        code = 200 if success is True else success or 400
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST  # noqa: N815 - http.server's

    def log_message(self, *arguments: Any) -> None:
        return


def main(source: str) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not source or not sglang_real.path_of(Path(source), sglang_real.UPDATER).is_file():
        sys.modules.update(sglang_stand_in.install_sglang())
    Handler.engine = Engine(source)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
