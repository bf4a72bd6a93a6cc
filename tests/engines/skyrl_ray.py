"""SkyRL's real entry point, Ray workers and HTTP client with the adapter, on CPUs; no model.

    GYMFAST_SKYRL_SOURCE=CHECKOUT python tests/engines/skyrl_ray.py

Real are: SkyRL's main up to the training loop, `initialize_ray`, Ray, the worker's
`init_weight_sync_state` and `broadcast_to_inference_engines`, the client. A server here answers
it, and pulls what it is told to. Needs what SkyRL imports, but for vLLM and flash_attn (its
wrapper of models is left out).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

NUM_SYNCS = 3


class Server(BaseHTTPRequestHandler):
    """A vLLM server without a model: it follows the run, and notes each call."""

    calls: list[str]
    weights: dict[str, Any]
    subscriber: Any = None

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        self._answer({"world_size": 1})

    def do_POST(self) -> None:
        from gymfast.sync import LiveTarget, Subscriber

        kind = type(self)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        given = json.loads(body) if body else {}
        call = given.get("method") or urlsplit(self.path).path.strip("/")
        kind.calls.append(call)
        if call == "init_weight_transfer_engine" and kind.subscriber is None:
            info = given["init_info"]
            kind.subscriber = Subscriber(info["store"], info["run"], LiveTarget(kind.weights))
        if call == "skyrl_start_weight_update":
            assert given["kwargs"] == {"is_checkpoint_format": False}
        if call == "update_weights":
            kind.subscriber.pull(given["update_info"]["version"])
        self._answer({"status": "ok"})

    def _answer(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def run_worker(cfg: Any) -> list[str]:
    """What a policy worker does, in a Ray worker process; the calls that the server got."""
    import torch

    wrapper = "skyrl.backends.skyrl_train.workers.model_wrapper"  # of models; needs flash_attn
    sys.modules[wrapper] = ModuleType(wrapper)
    for name in ("HFModelWrapper", "get_llm_for_sequence_regression", "_get_critic_model"):
        setattr(sys.modules[wrapper], name, None)
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
    from skyrl.backends.skyrl_train.workers.worker import Worker

    from gymfast.delta import as_tensor

    Server.calls, Server.weights = [], {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1)
    weights = {f"layers.{i}.weight": torch.randn(64, 64, dtype=torch.bfloat16) for i in range(5)}
    worker = SimpleNamespace(
        cfg=cfg.trainer,
        model=SimpleNamespace(model=SimpleNamespace()),
        weight_extractor=_Extractor(weights),
        _is_lora=False,
        _expandable_segments_disabled_for_sync=_nothing,
    )
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    async def train() -> None:
        settings = cfg.generator.inference_engine
        await Worker.init_weight_sync_state(worker, client, settings)
        for step in range(NUM_SYNCS):
            weights["layers.1.weight"].view(-1)[step::7] += 1
            await FSDPPolicyWorkerBase.broadcast_to_inference_engines(worker, client, settings)
            held = {name: as_tensor(value).data.tobytes() for name, value in Server.weights.items()}
            assert held == {n: as_tensor(v).data.tobytes() for n, v in weights.items()}
        await client.teardown()

    asyncio.run(train())
    server.shutdown()
    return Server.calls


class _Extractor:
    """Chunks of one tensor, as those of FSDP."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self._weights = weights

    def extract_weights(self, dtype: Any) -> Iterator[Any]:
        from skyrl.backends.skyrl_train.weight_sync import WeightChunk

        for name, value in self._weights.items():
            yield WeightChunk([name], [str(dtype)], [list(value.shape)], [value])

    def get_weight_metadata(self, dtype: Any) -> dict[str, list[Any]]:
        return {"names": list(self._weights), "dtype_names": [str(dtype)], "shapes": []}


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = source = os.environ["GYMFAST_SKYRL_SOURCE"]
    sys.path.insert(0, source)
    import ray
    from skyrl.train.entrypoints import main_base

    from gymfast.integrations import skyrl as adapter

    engine = "generator.inference_engine"
    sys.argv[1:] = [
        "trainer.override_entrypoint=gymfast.integrations.skyrl",
        "trainer.placement.colocate_all=false",
        "trainer.logger=console",
        f"trainer.log_path={folder}",
        f"{engine}.weight_sync_backend=delta",
        f"{engine}.delta_weight_sync.sync_dir={folder}/store/run",
        f"{engine}.engine_init_kwargs.weight_transfer_config.backend=gymfast",
    ]
    main_base.skyrl_entrypoint = ray.remote(num_cpus=1)(run_worker)  # instead of training
    seen: list[list[str]] = []
    get = ray.get
    ray.get = lambda call, **options: seen.append(get(call, **options)) or seen[-1]
    main_base.main()
    session = ["skyrl_start_weight_update", "update_weights", "skyrl_finish_weight_update"]
    init = "init_weight_transfer_engine"
    sync = [init, "pause", *session, "reset_prefix_cache", "resume"]
    assert seen[-1] == [init, *sync * NUM_SYNCS], seen[-1]
    assert adapter.HOOK in str(ray.get_runtime_context().runtime_env)
    print(f"{NUM_SYNCS} syncs through SkyRL's worker and client in a Ray worker process")


if __name__ == "__main__":
    main()
