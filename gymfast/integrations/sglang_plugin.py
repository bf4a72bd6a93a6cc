"""Hooks in SGLang: pieces of frames that arrive by a broadcast, updates of released weights, and,
with GYMFAST_ADMISSION=1, requests that ask for a version (docs/serving.md).

SGLang finds them by the entry point `sglang.srt.plugins`. See docs/integrations/sglang.md.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gymfast.errors import GymfastError
from gymfast.integrations.sglang_messages import LOADER, RECORD

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
SERVER = "sglang.srt.entrypoints.http_server"
RUN_SERVER = f"{SERVER}._setup_and_run_http_server"
ADMISSION = "GYMFAST_ADMISSION"
_Loaded = tuple[bool, str]


def register() -> None:
    """Puts the hooks around the methods that load and that begin, in each process of SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = f"{UPDATER}.load_weights_from_distributed"
    HookRegistry.register(target, load_received, HookType.AROUND)
    HookRegistry.register(f"{MANAGER}.begin_weight_update", begin_awake, HookType.AROUND)
    if os.environ.get(ADMISSION) == "1" and _may_serve():
        HookRegistry.register(RUN_SERVER, add_admission, HookType.BEFORE)


def _may_serve() -> bool:
    """True unless this is a child without the HTTP server, which it would load for nothing.

    slime and miles run the whole server in a child; it has imported the server to be run there.
    """
    return multiprocessing.parent_process() is None or SERVER in sys.modules


def load_received(
    original: Callable[..., _Loaded], updater: Any, named_tensors: Sequence[tuple[str, Any]]
) -> _Loaded:
    """Success and text, as SGLang wants it: weights go where they always went, messages to us."""
    if RECORD not in {name for name, _ in named_tensors}:
        return original(updater, named_tensors)
    if LOADER not in updater.custom_weight_loaders:
        return False, f"the server was started without --custom-weight-loader {LOADER}: add it"
    loaded: _Loaded = updater.update_weights_from_tensor(named_tensors, load_format=LOADER)
    return loaded


def begin_awake(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """What SGLang answers; a refusal where our loader would write to memory that was released."""
    updater = manager.tp_worker.model_runner.weight_updater
    if "weights" not in manager.offload_tags or LOADER not in updater.custom_weight_loaders:
        return original(manager, request)
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    text = "the weights are asleep: wake them (POST /resume_memory_occupation), then repeat it"
    return BeginWeightUpdateReqOutput(success=False, message=text)


def add_admission(*arguments: Any, **options: Any) -> None:
    """Puts admission before the HTTP server that is about to run.

    Raises GymfastError for one of several processes: updates pass through one of them only.
    """
    from sglang.srt.entrypoints.http_server import app

    from gymfast.integrations.admission import Admission

    server_args = arguments[0] if arguments else options["server_args"]
    if (num := server_args.tokenizer_worker_num) != 1:
        raise GymfastError(f"{ADMISSION}=1 needs --tokenizer-worker-num 1, found {num}")
    app.add_middleware(Admission)
