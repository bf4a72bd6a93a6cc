"""The stand-in against the real files of SGLang, and what the client relies on in them."""

from __future__ import annotations

import ast
import io
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from integrations import sglang_stand_in
from integrations.sglang_real import (
    COMMON,
    CONSTANTS,
    EXPORTER,
    HOOKS,
    HTTP,
    MANAGER,
    MODEL,
    PARALLEL,
    REQUESTS,
    UPDATER,
    definitions_of_common,
    fields_of,
    parameters_of,
    path_of,
)

from gymfast.integrations.admission import Admission
from gymfast.integrations.sglang_messages import Confirm, Piece, Update, pack, unpack
from gymfast.integrations.sglang_plugin import RUN_SERVER, SERVER, add_admission

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    ("module", "name", "methods"),
    [
        (
            UPDATER,
            "WeightUpdater",
            ["update_weights_from_tensor", "begin_weight_update", "end_weight_update"],
        ),
        (
            MANAGER,
            "SchedulerWeightUpdaterManager",
            ["update_weights_from_tensor", "begin_weight_update", "end_weight_update"],
        ),
        (EXPORTER, "WeightExporter", ["get_weights_by_name"]),
    ],
)
def test_the_stand_in_has_the_signatures_of_the_real_classes(
    sglang_source: Path, module: str, name: str, methods: list[str]
) -> None:
    stand_in = Path(sglang_stand_in.__file__)
    for method in methods:
        expected = parameters_of(path_of(sglang_source, module), name, method)
        assert parameters_of(stand_in, name, method) == expected


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "UpdateWeightsFromTensorReqInput",
            {
                "serialized_named_tensors",
                "load_format",
                "flush_cache",
                "weight_version",
                "selector",
            },
        ),
        ("BeginWeightUpdateReqInput", {"selector"}),
        ("GetWeightsByNameReqInput", {"name", "truncate_size"}),
        ("PauseGenerationReqInput", {"mode"}),
    ],
)
def test_requests_have_the_fields_that_the_client_sends(
    sglang_source: Path, name: str, fields: set[str]
) -> None:
    assert fields <= fields_of(path_of(sglang_source, REQUESTS), name)


def test_the_server_has_the_endpoints_that_the_client_calls(sglang_source: Path) -> None:
    text = path_of(sglang_source, HTTP).read_text()
    for path in (
        "server_info",
        "pause_generation",
        "begin_weight_update",
        "update_weights_from_tensor",
        "get_weights_by_name",
        "end_weight_update",
        "continue_generation",
    ):
        assert re.search(rf'@app\.(get|post|api_route)\("/{path}"', text), path


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (PARALLEL, "tp_size"),
        (PARALLEL, "dp_size"),
        (PARALLEL, "pp_size"),
        (MODEL, "custom_weight_loader"),
    ],
)
def test_the_server_tells_what_the_client_asks_about_it(
    sglang_source: Path, module: str, name: str
) -> None:
    assert re.search(rf"^    {name}: ", path_of(sglang_source, module).read_text(), re.MULTILINE)


def test_the_hook_finds_what_was_released_and_how_to_refuse(sglang_source: Path) -> None:
    manager, requests = path_of(sglang_source, MANAGER), path_of(sglang_source, REQUESTS)
    needed = {"offload_tags", "tp_worker"}
    assert needed <= fields_of(manager, "SchedulerWeightUpdaterManager")
    assert fields_of(requests, "BeginWeightUpdateReqOutput") == {"success", "message"}
    assert 'GPU_MEMORY_TYPE_WEIGHTS = "weights"' in path_of(sglang_source, CONSTANTS).read_text()


def test_an_open_session_is_told_in_the_words_that_the_client_looks_for(
    sglang_source: Path,
) -> None:
    assert "session is already open" in path_of(sglang_source, MANAGER).read_text()


@pytest.mark.parametrize(
    ("action", "piece"), [(Piece(3), b"bytes"), (Update(version=4), None), (Confirm(), None)]
)
def test_the_real_unpickler_takes_every_message(
    sglang_source: Path, action: Piece | Update | Confirm, piece: bytes | None
) -> None:
    common = definitions_of_common(path_of(sglang_source, COMMON))
    payload = pack("an id", action, piece)
    named = common["SafeUnpickler"](io.BytesIO(payload)).load()
    record, found = unpack(named)
    assert (record.update_id, record.action) == ("an id", action)
    assert found == (piece or b"")


def test_admission_goes_before_the_server_through_the_hooks_of_sglang(
    sglang_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = ast.parse(path_of(sglang_source, HTTP).read_text())
    found = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    run = found[RUN_SERVER.rpartition(".")[2]]
    assert run.args.args[0].arg == "server_args"
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert "app" in names

    spec = spec_from_file_location("hooks_of_sglang", path_of(sglang_source, HOOKS))
    assert spec is not None and spec.loader is not None
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    server, calls = ModuleType(SERVER), []
    server.app = SimpleNamespace(add_middleware=calls.append)
    server._setup_and_run_http_server = lambda *_: calls.append("run")
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, SERVER, server)
    sys.modules["sglang"].srt = sys.modules["sglang.srt"]
    sys.modules["sglang.srt"].entrypoints = sys.modules["sglang.srt.entrypoints"]
    sys.modules["sglang.srt.entrypoints"].http_server = server
    hooks.HookRegistry.register(RUN_SERVER, add_admission, hooks.HookType.BEFORE)
    hooks.HookRegistry.apply_hooks()
    server._setup_and_run_http_server(SimpleNamespace(tokenizer_worker_num=1), "manager")
    assert calls == [Admission, "run"]
