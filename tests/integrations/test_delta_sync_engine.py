"""The updater of slime and miles, the receiver of version directories, and a fake engine behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from integrations.fake_engine import FakeEngine
from integrations.fake_model import checkpoint, dense, step
from safetensors.torch import save_file

from gymfast.errors import GymfastError
from gymfast.integrations.delta_stream import DeltaStream, StreamSettings
from gymfast.integrations.delta_sync import DeltaSync, Trainer
from gymfast.integrations.engines import Engines
from gymfast.integrations.ranks import Ranks


class Handle:
    """An actor of Ray that passes calls on to its server, as slime's does."""

    def __init__(self, engine: FakeEngine, folder: Path) -> None:
        self._engine = engine
        self._folders = {n: str(folder / n) for n in ("local", "base", "source")}

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: int, **options: Any) -> Callable[[], Any]:
            if arguments:
                options["target_version"] = arguments[0]
            return lambda: answered(options)

        def answered(options: dict[str, Any]) -> Any:
            answer = self._engine.http.call(f"/{method}", self._folders | options)
            if answer.code != 200:  # as raise_for_status does
                raise OSError(f"{answer.code}: {answer.text}")
            return answer.body

        return SimpleNamespace(remote=remote)


class SyncRun:
    """A trainer of one rank whose engine has two."""

    def __init__(self, engine: FakeEngine, folder: Path) -> None:
        engine.reset("sglang", folder, num_ranks=2)
        self.engine, self.weights = engine, checkpoint(0)
        (folder / "base").mkdir()
        save_file(self.weights, folder / "base" / "model.safetensors")
        settings = StreamSettings(folder / "source", folder / "base", "xor", "xxh3-128", 1, None)
        ranks = Ranks(0, lambda value: [value])
        engines = Engines([Handle(engine, folder)], lambda call, timeout: call(), 60)
        local = str(folder / "local")
        trainer = Trainer(walk=self._walk, engines=lambda: engines, local_checkpoint=local)
        self.sync = DeltaSync(DeltaStream(settings, ranks), ranks, trainer)
        self.sync.start()

    def train(self, number: int, names: str = "") -> None:
        self.weights = step(self.weights, number, names=names)
        self.sync.write(number)

    def live(self) -> list[dict[str, str]]:
        return [rank["digests"] for rank in self.engine.seen()["ranks"]]

    def _walk(self, add: Any) -> None:
        for name, tensor in self.weights.items():
            add(name, tensor)


@pytest.fixture
def run(fake_engine: FakeEngine, tmp_path: Path) -> SyncRun:
    return SyncRun(fake_engine, tmp_path)


def test_I42_I44_versions_arrive_in_place_and_without_old_keys_and_values(run: SyncRun) -> None:
    (before, _) = run.engine.seen()["ranks"]
    for number, names in enumerate(("", "layers.1.q_proj", "embed", "no such tensor"), 1):
        old = run.engine.generate("a long prompt")
        run.train(number, names)
        run.sync.deliver()
        assert run.live() == dense(run.weights, 2)
        is_same = run.engine.generate("a long prompt") == old
        assert is_same == (names == "no such tensor")
    seen = run.engine.seen()
    assert (seen["stale_hits"], seen["version"], seen["is_paused"]) == (0, "4", False)
    assert seen["ranks"][0]["places"] == before["places"]


def test_R63_R64_an_engine_is_paused_and_flushed_around_each_load(run: SyncRun) -> None:
    run.train(1)
    run.engine.seen()
    run.sync.deliver()
    events = run.engine.seen()["events"]
    order = ["/pull_weights", "/pause_generation", "flushed", "/update_weights_from_disk"]
    order += ["version 1", "flushed", "/continue_generation"]
    assert [event for event in events if event in order] == order


@pytest.mark.parametrize("how", ["before", "after"])
def test_R25_an_engine_that_did_not_say_that_it_pulled_serves_the_old_version(
    run: SyncRun, how: str
) -> None:
    run.train(1)
    run.sync.deliver()
    served = run.live()
    run.train(2)
    run.engine.seen(fails={"/pull_weights": how})
    with pytest.raises(GymfastError, match="pull_weights"):
        run.sync.deliver()
    seen = run.engine.seen(fails={})
    assert (seen["version"], seen["is_paused"]) == ("1", False)
    assert run.live() == served
    run.train(3)
    run.sync.deliver()
    assert run.live() == dense(run.weights, 2)
    assert run.engine.seen()["version"] == "3"
