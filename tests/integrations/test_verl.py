"""The checkpoint engine of verl: against a stand-in, and against verl where it is installed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import verl_stand_in as stand_in
from integrations.verl_stand_in import CheckpointEngine, Fleet, abstractmethod, in_parallel

from gymfast.errors import (
    ChainError,
    ChannelError,
    ConflictError,
    GymfastError,
    MissingDependencyError,
)

Q = "layers.0.q_proj.weight"
NAMES = (Q, "layers.0.k_proj.weight", "layers.0.experts.weight", "norm.weight", "head.weight")


@pytest.fixture(params=["stand-in", *(["verl"] if stand_in.is_installed() else [])])
def registry(request, monkeypatch) -> type:
    return stand_in.real(monkeypatch) if request.param == "verl" else stand_in.install(monkeypatch)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(64, 48, generator=generator).bfloat16() for n in NAMES}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    store = (tmp_path / "store").as_uri()
    return {"store": store, "run": "run", "timeout_s": 5.0, "sync_timeout_s": 20.0}


@pytest.fixture
def fleet(registry: type, options: dict[str, Any]) -> Fleet:
    return Fleet(registry, options)


def step(weights: dict[str, torch.Tensor], *names: str) -> None:
    for name in names:
        weights[name].view(-1)[::97] += 1.0


def test_after_each_sync_every_engine_holds_the_weights_of_the_trainer(
    fleet: Fleet, weights: dict[str, torch.Tensor]
) -> None:
    raw_bytes = sum(tensor.nbytes for tensor in weights.values())
    for number in range(5):
        assert fleet.sync(weights, number) == [None] * 4
        assert all(adapter.holds(weights) for adapter in fleet.adapters)
        assert fleet.metrics["checkpoint_engine/version"] == number
        assert fleet.num_drained == 2 * (number + 1)
        if number:
            assert 0 < fleet.metrics["checkpoint_engine/changed_ratio"] < 0.02
            assert fleet.metrics["checkpoint_engine/payload_mbytes"] < 0.1 * raw_bytes / 2**20
        step(weights, *NAMES)


@pytest.mark.parametrize("changed", [(Q,), ()])
def test_row_33_a_sync_brings_all_tensors_also_if_one_or_none_changed(
    fleet: Fleet, weights: dict[str, torch.Tensor], changed: tuple[str, ...]
) -> None:
    fleet.sync(weights)
    step(weights, *changed)
    assert fleet.sync(weights) == [None] * 4
    assert all(adapter.holds(weights) for adapter in fleet.adapters)


def test_row_36_words_that_changed_places_are_a_change(
    fleet: Fleet, weights: dict[str, torch.Tensor]
) -> None:
    fleet.sync(weights)
    words = weights[Q].view(torch.int64).view(-1)
    words[:2] = words[:2].flip(0)
    fleet.sync(weights)
    assert fleet.metrics["checkpoint_engine/changed_elems"] == 8
    assert all(adapter.holds(weights) for adapter in fleet.adapters)


def test_a_reader_that_fails_is_an_error_everywhere_and_no_engine_is_touched(
    fleet: Fleet, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    fleet.sync(weights)
    old = {name: tensor.clone() for name, tensor in weights.items()}
    good = fleet.readers[1]
    elsewhere = (tmp_path / "elsewhere").as_uri()
    fleet.readers[1] = fleet.start_reader(store=elsewhere, timeout_s=0.2)
    step(weights, Q)
    trainer, drained, other, failed = fleet.sync(weights)
    assert drained is None
    for error in (trainer, other):
        with pytest.raises(ChainError, match=r"reader 1: DeadlineError: .*version 1 of run 'run'"):
            raise error
    assert "waiting for version 1 of run 'run'" in str(failed)
    assert [adapter.num_updates for adapter in fleet.adapters] == [1, 1]
    assert all(adapter.holds(old) for adapter in fleet.adapters)
    fleet.readers[1] = good
    assert fleet.sync(weights) == [None] * 4
    assert all(adapter.holds(weights) for adapter in fleet.adapters)


def test_a_frame_that_rots_in_the_store_is_healed_by_an_anchor_with_the_next_sync(
    fleet: Fleet, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    fleet.sync(weights)
    before = set((tmp_path / "store").rglob("*"))
    publish = fleet.trainers[0]._stream.publish

    def publish_and_rot(*args: Any, **kwargs: Any) -> Any:
        report = publish(*args, **kwargs)
        made = set((tmp_path / "store" / "run" / "objects").rglob("*")) - before
        frames = [file for file in made if file.is_file()]
        assert frames
        for file in frames:
            file.write_bytes(bytes(file.stat().st_size))
        return report

    fleet.trainers[0]._stream.publish = publish_and_rot
    step(weights, *NAMES)
    errors = fleet.sync(weights)
    for error in errors[2:]:
        with pytest.raises(GymfastError, match=r"version 1 .*damaged"):
            raise error
    assert [adapter.num_updates for adapter in fleet.adapters] == [1, 1]
    fleet.trainers[0]._stream.publish = publish
    step(weights, Q)
    assert fleet.sync(weights) == [None] * 4
    assert all(adapter.holds(weights) for adapter in fleet.adapters)
    assert fleet.metrics["checkpoint_engine/payload_mbytes"] > 0.02  # all of it
    step(weights, Q)
    assert fleet.sync(weights) == [None] * 4
    assert fleet.metrics["checkpoint_engine/payload_mbytes"] < 0.01


def test_a_trainer_that_fails_is_an_error_everywhere_and_the_next_sync_heals(
    fleet: Fleet, weights: dict[str, torch.Tensor]
) -> None:
    fleet.sync(weights)
    step(weights, *NAMES)
    start_s = time.monotonic()
    trainer, drained, *readers = fleet.sync(weights | {"norm.weight": "no tensor"})
    assert time.monotonic() - start_s < 4
    assert isinstance(trainer, TypeError) and drained is None and fleet.num_drained == 4
    for error in readers:
        with pytest.raises(ChainError, match=r"published nothing: TypeError: .*norm.weight"):
            raise error
    assert [adapter.num_updates for adapter in fleet.adapters] == [1, 1]
    assert fleet.sync(weights) == [None] * 4
    assert all(adapter.holds(weights) for adapter in fleet.adapters)
    assert fleet.metrics["checkpoint_engine/version"] == 1


def test_a_trainer_that_never_sends_does_not_hold_the_readers_up(
    fleet: Fleet, weights: dict[str, torch.Tensor]
) -> None:
    fleet.build_process_group()
    calls = [reader.receive_weights for reader in fleet.readers]
    errors = in_parallel([*calls, fleet.trainers[0].finalize])
    for error in errors[:2]:
        with pytest.raises(ChannelError, match=r"the trainer at 127.0.0.1 port \d+ is gone"):
            raise error
    assert fleet.sync(weights) == [None] * 4


def test_an_engine_that_dies_while_it_loads_is_healed_by_the_next_sync(
    fleet: Fleet, weights: dict[str, torch.Tensor]
) -> None:
    fleet.sync(weights)
    step(weights, *NAMES)
    fleet.adapters[0].fails_after = 2
    errors = fleet.sync(weights)
    assert [type(error) for error in errors].count(RuntimeError) == 1
    fleet.adapters[0].fails_after = 10**9
    step(weights, Q)
    assert fleet.sync(weights) == [None] * 4
    assert all(adapter.holds(weights) for adapter in fleet.adapters)


def test_a_trainer_that_restarts_goes_on_in_the_run_and_fences_the_old_one(
    fleet: Fleet, weights: dict[str, torch.Tensor]
) -> None:
    fleet.sync(weights, 10)
    old, fleet.trainers = fleet.trainers, fleet.start_trainer()
    step(weights, Q)
    assert fleet.sync(weights, 7) == [None] * 4
    assert fleet.metrics["checkpoint_engine/version"] == 1
    assert all(adapter.holds(weights) for adapter in fleet.adapters)
    fleet.trainers = old
    trainer, _, *readers = fleet.sync(weights, 11)
    assert isinstance(trainer, ConflictError)
    assert all(isinstance(error, ChainError) for error in readers)


def test_a_load_that_goes_on_after_its_sync_ended_does_not_mix_versions(
    fleet: Fleet, weights: dict[str, torch.Tensor]
) -> None:
    fleet.build_process_group()
    reader, late = fleet.readers
    loads: list[Any] = []
    in_parallel(
        [
            lambda: fleet._send(fleet.trainers[0], weights, 0),
            lambda: loads.append(reader.receive_weights()),
            late.receive_weights,
        ]
    )
    assert next(loads[0])[0] == NAMES[0]
    fleet.sync(weights)
    with pytest.raises(ChainError, match="ended while its tensors were being loaded"):
        next(loads[0])


def test_a_reader_that_is_killed_while_it_pulls_is_named_and_one_that_joins_late_catches_up(
    registry: type, options: dict[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(registry, options, num_readers=1)
    for _ in range(3):
        assert fleet.sync(weights) == [None] * 3
        step(weights, *NAMES)
    old = {name: tensor.clone() for name, tensor in fleet.adapters[0].live.items()}
    (metadata, *_) = [engine.prepare() for engine in [*fleet.trainers, *fleet.readers]]
    trainer_kwargs, rollout_kwargs = registry.get("gymfast").build_topology(2, 2, [metadata])
    fleet.trainers[0].init_process_group(num_readers=trainer_kwargs["num_readers"][0])
    ticket = rollout_kwargs["ticket"][0]
    fleet.readers[0].init_process_group(ticket=ticket, reader=0)
    program = (
        "import os, signal, sys\n"
        "from gymfast.integrations.sync_round import RoundMember, Ticket\n"
        "member = RoundMember(Ticket(*sys.argv[1:2], int(sys.argv[2]), sys.argv[3]), 1, 5.0)\n"
        "with member.taking(20.0):\n"
        f"    os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    where = [ticket["host"], str(ticket["port"]), ticket["token"]]
    killed = subprocess.Popen([sys.executable, "-c", program, *where], cwd=Path.cwd())
    start_s = time.monotonic()
    trainer, reader = in_parallel(
        [
            lambda: fleet._send(fleet.trainers[0], weights, None),
            lambda: fleet._receive(fleet.readers[0], fleet.adapters[0], None),
        ]
    )
    assert killed.wait() == -signal.SIGKILL
    assert time.monotonic() - start_s < 15
    for error in (trainer, reader):
        with pytest.raises(ChainError, match=r"reader 1: the process at 127.0.0.1 is gone"):
            raise error
    assert all(torch.equal(fleet.adapters[0].live[name], old[name]) for name in old)
    fleet.readers.append(fleet.start_reader())
    fleet.adapters.append(stand_in.Adapter())
    assert fleet.sync(weights) == [None] * 4
    assert all(adapter.holds(weights) for adapter in fleet.adapters)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"stor": "x"}, "unknown field `stor`"),
        ({"run": ""}, r"length >= 1 - at `\$.run`"),
        ({"timeout_s": "soon"}, r"`float`, got `str` - at `\$.timeout_s`"),
    ],
)
def test_options_that_are_not_known_are_refused_by_name(
    registry: type, options: dict[str, Any], changed: dict[str, Any], found: str
) -> None:
    for is_master in ({"is_master": True}, {}):
        with pytest.raises(ValueError, match=f"engine_kwargs.gymfast: .*{found}.*anchor_every"):
            registry.new("gymfast", bucket_size=1, **is_master, **(options | changed))


def test_a_missing_option_and_a_store_that_cannot_be_are_refused_at_the_start(
    registry: type, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="missing required field `run`"):
        registry.new("gymfast", bucket_size=1, store="file:///tmp/x")
    for is_master in ({"is_master": True}, {}):
        with pytest.raises(ValueError, match="nowhere"):
            Fleet(registry, options | {"store": "nowhere:x"}).start_reader(**is_master)
        with pytest.raises(ValueError, match="store is 'memory:x', which no engine can see"):
            Fleet(registry, options | {"store": "memory:x"}).start_reader(**is_master)


def test_the_registered_class_is_one_of_verl(registry: type) -> None:
    engine = registry.get("gymfast")
    assert {"CheckpointEngine", "GymfastCheckpointEngine"} <= {c.__name__ for c in engine.__mro__}
    assert engine.wire_format == "named_tensors" and not engine.__abstractmethods__


def test_a_verl_with_another_interface_is_refused(monkeypatch) -> None:
    class Engine(CheckpointEngine):
        async def receive_weights(self): ...

        @abstractmethod
        def commit(self, version: int): ...

    Engine.receive_weights.__isabstractmethod__ = True
    Engine.__abstractmethods__ |= {"receive_weights"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.0")
    with pytest.raises(
        GymfastError, match=r"verl 0.12.0.*'commit'.*'receive_weights': \('self',\)"
    ):
        stand_in.install(monkeypatch, Engine)


def test_the_interface_of_0_8_is_known(monkeypatch) -> None:
    class Engine(CheckpointEngine):
        @classmethod
        @abstractmethod
        def build_topology(cls, trainer_world_size, rollout_world_size, metadata): ...

    assert stand_in.install(monkeypatch, Engine).get("gymfast")


def test_without_verl_the_import_says_who_it_is_for(monkeypatch) -> None:
    for name in ("verl", "verl.checkpoint_engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"needs verl 0.8 to 0.9.1, .*custom_backend"):
        stand_in.import_adapter(monkeypatch)


def test_row_4_nothing_of_torch_is_patched(fleet: Fleet, weights: dict[str, torch.Tensor]) -> None:
    before = torch.Tensor.copy_
    fleet.sync(weights)
    assert torch.Tensor.copy_ is before
