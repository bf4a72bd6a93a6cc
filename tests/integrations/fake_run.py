"""A run of a store, a fake engine that follows it, and the trainer's side of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from integrations.fake_engine import FakeEngine
from integrations.fake_model import checkpoint, dense, step
from torch import Tensor

from gymfast.integrations.sglang_client import SGLangClient
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.vllm_client import VLLMClient
from gymfast.sync import Publisher

PAUSE = {"vllm": "/pause", "sglang": "/pause_generation"}
RESUME = {"vllm": "/resume", "sglang": "/continue_generation"}
FLUSH = {"vllm": "/reset_prefix_cache", "sglang": "/update_weights_from_tensor"}
LOAD = {"vllm": "/update_weights", "sglang": "/update_weights_from_tensor"}
BASE = 9


class FakeRun:
    """`options` are those of the engine; it starts with other weights than those of version 0."""

    def __init__(self, engine: FakeEngine, kind: str, folder: Path, **options: Any) -> None:
        self.engine, self.kind, self.options = engine, kind, options
        self.folder, self.url = folder, (folder / "store").as_uri()
        self.restart()
        self.client = self.make_client()
        self.publisher = Publisher(self.url, "run", anchor_every=100)
        self.weights = checkpoint(0)
        self.states: list[dict[str, Tensor]] = []

    def restart(self) -> None:
        """The engine again, as one that was killed; it serves its base."""
        self.engine.reset(self.kind, self.folder, base=BASE, **self.options)

    def make_client(self, timeout_s: float = 30.0, **options: Any) -> VLLMClient | SGLangClient:
        client = VLLMClient if self.kind == "vllm" else SGLangClient
        return client(self.engine.url, timeout_s=timeout_s, **options)

    def publish(self, names: str = "", *, weights: dict[str, Tensor] | None = None) -> int:
        """The next version: the start, then changes where `names` is in the name; its number."""
        if weights is not None:
            self.weights = weights
        elif self.states:
            self.weights = step(self.weights, len(self.states), names=names)
        self.states.append(self.weights)
        return self.publisher.publish(self.weights).version

    def pull(self, version: int | None = None, **options: Any) -> None:
        newest = len(self.states) - 1
        follow = InitRequest(store=self.url, run="run")
        self.client.pull(follow, newest if version is None else version, **options)

    def sync(self, names: str = "") -> int:
        version = self.publish(names)
        self.pull()
        return version

    def dense(self, version: int = -1) -> list[dict[str, str]]:
        """Digests of the live bytes of an engine that was started with that version."""
        num_ranks, packs = self.options.get("num_ranks", 1), self.options.get("packs", True)
        return dense(self.states[version], num_ranks, packs=packs)

    def live(self) -> list[dict[str, str]]:
        return [rank["digests"] for rank in self.engine.seen()["ranks"]]

    def sleep(self, level: int) -> None:
        if self.kind == "vllm":
            self.engine.http.require(f"/sleep?level={level}", {})
        else:
            self.engine.http.require("/release_memory_occupation", {})

    def wake_up(self) -> None:
        path = "/wake_up" if self.kind == "vllm" else "/resume_memory_occupation"
        self.engine.http.require(path, {})


Start = Callable[..., FakeRun]
