"""The loader in SGLang with a local checkpoint: it reads what versions changed, and keeps none."""

from __future__ import annotations

import fcntl
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.sglang_stand_in import SafeUnpickler, install_sglang
from integrations.sglang_toy import ToyModel, checkpoint, differences, model_of, step
from safetensors.torch import save_file
from slime_engine import pull as stock_pull
from torch import Tensor

from gymfast.delta import encode
from gymfast.delta.hf_delta import publish_delta, pull
from gymfast.integrations.sglang import load
from gymfast.integrations.sglang_messages import (
    STATUS,
    LocalVersion,
    Piece,
    Status,
    Update,
    from_numbers,
    pack,
)
from gymfast.integrations.sglang_model import fused_names

ATTENTION = "model.layers.1.self_attn."


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in install_sglang().items():
        monkeypatch.setitem(sys.modules, name, module)


class Host:
    """A host with a model that follows versions, published from checkpoints beside it."""

    def __init__(self, folder: Path, receive: Callable[..., Any] = pull) -> None:
        self.folder, self.receive = folder, receive
        self.model = ToyModel()
        self.weights = checkpoint(0)
        self.number = 0
        self.run = "run-1"
        self._save(self.weights)

    def _save(self, weights: dict[str, Tensor]) -> None:
        (self.folder / f"c{self.number}").mkdir()
        save_file(weights, self.folder / f"c{self.number}" / "model.safetensors")

    def train(self, names: str) -> None:
        """The next version changes tensors with `names` in their name."""
        self.number += 1
        self.weights = step(self.weights, self.number, names=names)
        self._save(self.weights)
        old, new = (self.folder / f"c{number}" for number in (self.number - 1, self.number))
        publish_delta(self.folder / "versions", self.number, old, new)

    def pull(self) -> None:
        places = [str(self.folder / name) for name in ("local", "c0", "versions")]
        self.receive(*places, self.number)

    def tell(self, **changes: Any) -> Status:
        """What becomes of the message that the newest version is there."""
        fields = {
            "checkpoint": str(self.folder / "local"),
            "source": str(self.folder / "versions"),
            "run": self.run,
            "number": self.number,
        }
        return self.send(Update(local=LocalVersion(**fields | changes)))

    def send(self, action: Update | Piece, piece: bytes | None = None) -> Status:
        payload = pack("an update", action, piece)
        self.model.loads.clear()
        with torch.inference_mode():
            load(self.model, SafeUnpickler(io.BytesIO(payload)).load())
        return from_numbers(self.model.get_weights_by_name(STATUS, 1 << 20, tp_size=1))

    def sync(self, names: str) -> Status:
        self.train(names)
        self.pull()
        return self.tell()

    @property
    def loaded(self) -> list[str]:
        return self.model.loads[-1] if self.model.loads else []

    def check(self, expected: dict[str, Tensor] | None = None) -> None:
        assert differences(self.model, model_of(expected or self.weights)) == []


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=[pull, stock_pull], ids=["gymfast", "stock"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    """A host whose model has loaded version 1."""
    host = Host(tmp_path, request.param)
    status = host.sync("")
    assert (status.error, status.num_loaded) == ("", len(host.weights))
    return host


def test_ten_versions_give_the_bits_of_the_final_checkpoint(host: Host) -> None:
    for number in range(2, 12):
        status = host.sync(f"layers.{number % 3}")
        assert (status.error, status.root) == ("", f"weight_v{number:06d}")
        assert 0 < status.num_loaded < len(host.weights)
    host.check()


def test_what_changed_is_read_with_what_is_fused_with_it_and_nothing_else(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gymfast.delta.safetensors_files import Checkpoint

    read: list[str] = []
    original = Checkpoint.read

    def noted(self: Checkpoint, name: str) -> Any:
        read.append(name)
        return original(self, name)

    host.train(ATTENTION + "q_proj")
    host.pull()
    monkeypatch.setattr(Checkpoint, "read", noted)
    status = host.tell()
    assert host.loaded == fused_names(host.loaded, [f"{ATTENTION}q_proj.weight"])
    assert sorted(read) == sorted(host.loaded)
    assert sorted(read) == sorted(f"{ATTENTION}{part}_proj.weight" for part in "qkvo")
    assert (status.num_changed, status.num_loaded) == (1, 4)
    host.check()


def test_a_version_without_changes_and_one_told_twice_load_nothing(host: Host) -> None:
    assert host.sync("no such tensor").num_loaded == 0
    assert host.tell().num_loaded == 0
    host.check()


def test_versions_that_were_pulled_and_not_told_are_loaded_with_the_next(host: Host) -> None:
    host.train(ATTENTION + "q_proj")
    host.pull()
    status = host.sync("model.layers.2.input_layernorm")
    assert status.num_changed == 2
    assert "model.layers.2.input_layernorm.weight" in host.loaded
    assert f"{ATTENTION}q_proj.weight" in host.loaded
    host.check()


def test_a_restarted_engine_loads_everything(host: Host) -> None:
    host.model = ToyModel()
    assert host.sync(ATTENTION).num_loaded == len(host.weights)
    host.check()


@pytest.mark.parametrize("change", [{"run": "run-2"}, {"source": None}, {"checkpoint": None}])
def test_another_run_or_directory_loads_everything(host: Host, change: dict[str, Any]) -> None:
    host.train(ATTENTION)
    host.pull()
    for name, value in change.items():
        if value is None:
            copy = host.folder / f"copy of {name}"
            shutil.copytree(host.folder / ("local" if name == "checkpoint" else "versions"), copy)
            change = {name: str(copy)}
    status = host.tell(**change)
    assert (status.error, status.num_loaded) == ("", len(host.weights))
    host.check()


def test_without_the_version_directories_everything_is_loaded(host: Host) -> None:
    host.train(ATTENTION)
    host.pull()
    shutil.rmtree(host.folder / "versions")
    status = host.tell()
    assert (status.error, status.num_loaded) == ("", len(host.weights))
    host.check()


def test_a_version_that_was_not_pulled_is_refused_and_the_model_untouched(host: Host) -> None:
    before = host.weights
    host.train(ATTENTION)
    status = host.tell()
    assert "local holds version 1, version 2 is to be loaded: pull it first" in status.error
    assert not status.is_flagged
    host.check(before)
    host.pull()
    assert host.tell().error == ""
    host.check()


def test_a_load_that_breaks_flags_the_engine_and_the_next_one_loads_everything(
    host: Host,
) -> None:
    host.model.break_after = 2
    status = host.sync(ATTENTION)
    assert status.error == "rank 0: RuntimeError: the loader broke"
    assert status.is_flagged
    with pytest.raises(Exception, match="the weights are not to be used"):
        host.model.forward(torch.arange(3))
    host.model.break_after = None
    status = host.sync("model.norm")
    assert (status.error, status.is_flagged) == ("", False)
    assert status.num_loaded == len(host.weights)
    host.check()
    host.model.forward(torch.arange(3))
    assert host.sync(ATTENTION).num_loaded == 8 - 4


def test_a_pull_waits_until_the_load_is_over(host: Host) -> None:
    host.train(ATTENTION)
    host.pull()
    path, is_free = host.folder / "local" / ".weight_sync" / "lock", []
    original = host.model.load_weights

    def load_and_look(weights: Any) -> Any:
        first = next(weights)
        with path.open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free.append(True)
            except BlockingIOError:
                is_free.append(False)
        return original([first, *weights])

    host.model.load_weights = load_and_look
    assert host.tell().error == ""
    assert is_free == [False]
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_no_tensor_and_no_file_is_kept_after_a_load(host: Host) -> None:
    before = open_files()
    host.sync(ATTENTION)
    assert open_files() == before
    assert host.model.gymfast_loader._copy.names == ()


def test_a_frame_after_local_versions_and_the_other_way_round_load_everything(host: Host) -> None:
    other = checkpoint(9)
    frame = encode(None, other)
    host.send(Piece(0), frame)
    status = host.send(Update(frame_bytes=len(frame)))
    assert (status.error, status.num_loaded) == ("", len(other))
    host.check(other)
    status = host.sync(ATTENTION)
    assert (status.error, status.num_loaded) == ("", len(host.weights))
    host.check()
    host.send(Piece(0), frame)
    assert host.send(Update(frame_bytes=len(frame))).num_loaded == len(other)
    host.check(other)


def test_packed_models_load_everything_and_only_where_they_can_be_unpacked(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.model = ToyModel(packs=True)
    status = host.sync("")
    assert "PackingMethod may have packed the weights" in status.error
    fields = [str(tmp_path / "local"), str(tmp_path / "versions"), "run-1"]
    for number in (1, 2):
        local = LocalVersion(*fields, number)
        status = host.send(Update(local=local, is_restored=True))
        assert (status.error, status.num_loaded) == ("", len(host.weights))
        host.check()
        host.train(ATTENTION)
        host.pull()
