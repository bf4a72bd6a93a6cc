"""Parts: what a trainer's packer makes of chunks, and the loader in SGLang of those."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping

import pytest
import torch
from integrations.sglang_stand_in import install_sglang
from integrations.sglang_toy import ToyModel, checkpoint, differences, model_of, step
from integrations.test_sglang_loader import ATTENTION, Engine

from gymfast.integrations.part_packer import PartPacker
from gymfast.integrations.sglang_messages import (
    RECORD,
    STATUS,
    Confirm,
    Part,
    PartFrame,
    Parts,
    Status,
    Update,
    from_numbers,
    named_tensors,
    root_of_parts,
)

Weights = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in install_sglang().items():
        monkeypatch.setitem(sys.modules, name, module)


class Trainer:
    """Two stages, each with a packer; the engine gets chunks as SGLang gives them to a model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.packers = [PartPacker("stage-0"), PartPacker("stage-1")]
        engine.tell(Confirm())

    def send(self, weights: Weights, *, is_delta: bool) -> None:
        update_id = secrets.token_hex(4)
        for packer in self.packers:
            packer.begin(update_id, is_delta=is_delta)
        items = list(weights.items())
        for number, begin in enumerate(range(0, len(items), 5)):
            chunk = items[begin : begin + 5]
            named, _ = self.packers[number % 2].pack(chunk)
            with torch.inference_mode():
                self.engine.model.load_weights([(n, t.clone()) for n, t in named])

    def commit(self, version: str, *, is_delta: bool, is_restored: bool = False) -> Status:
        roots = {key: root for packer in self.packers for key, root in packer.roots.items()}
        parts = Parts(version, root_of_parts(roots), are_loaded=not is_delta)
        return self.engine.tell(Update(parts=parts, is_restored=is_restored))

    def sync(self, weights: Weights, version: str, *, is_delta: bool) -> Status:
        self.send(weights, is_delta=is_delta)
        return self.commit(version, is_delta=is_delta)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(Engine())


def test_deltas_give_the_bits_of_the_final_checkpoint(trainer: Trainer) -> None:
    weights = checkpoint(0)
    status = trainer.sync(weights, "1", is_delta=False)
    assert (status.error, status.version, status.num_loaded) == ("", "1", len(weights))
    assert differences(trainer.engine.model, model_of(weights)) == []
    for number in range(2, 6):
        weights = step(weights, number)
        status = trainer.sync(weights, str(number), is_delta=True)
        assert (status.error, status.version) == ("", str(number))
        assert sum(packer.num_frames for packer in trainer.packers) > 0
        assert differences(trainer.engine.model, model_of(weights)) == []


def test_only_what_changed_is_loaded_with_what_is_fused(trainer: Trainer) -> None:
    weights = checkpoint(0)
    trainer.sync(weights, "1", is_delta=False)
    weights = step(weights, 1, names=f"{ATTENTION}q_proj")
    status = trainer.sync(weights, "2", is_delta=True)
    assert status.num_changed == 1
    assert trainer.engine.loaded() == [name for name in weights if ATTENTION in name]
    assert differences(trainer.engine.model, model_of(weights)) == []


def test_nothing_is_loaded_before_all_parts_are_what_they_have_to_be(trainer: Trainer) -> None:
    old = checkpoint(0)
    trainer.sync(old, "1", is_delta=False)
    trainer.send(step(old, 1), is_delta=True)
    assert differences(trainer.engine.model, model_of(old)) == []
    parts = Parts("2", "0" * 64, are_loaded=False)
    status = trainer.engine.tell(Update(parts=parts))
    assert "version 2 has 0000000000000000…: send all tensors" in status.error
    assert (status.version, status.is_flagged) == ("", False)
    assert differences(trainer.engine.model, model_of(old)) == []
    new = step(old, 2)
    assert trainer.sync(new, "2", is_delta=False).version == "2"
    assert differences(trainer.engine.model, model_of(new)) == []


@pytest.mark.parametrize(
    ("action", "piece", "text"),
    [
        (PartFrame("stage-0/0"), b"no frame", "FormatError: "),
        (PartFrame("stage-7/0"), b"x", "a frame came for part 'stage-7/0', which is not here"),
    ],
)
def test_a_frame_that_does_not_fit_refuses_its_update(
    action: PartFrame, piece: bytes, text: str, trainer: Trainer
) -> None:
    weights = checkpoint(0)
    trainer.sync(weights, "1", is_delta=False)
    trainer.send(step(weights, 1), is_delta=True)
    update_id = trainer.packers[0]._update_id
    trainer.engine.model.load_weights(named_tensors(update_id, action, piece))
    status = trainer.commit("2", is_delta=True)
    assert text in status.error
    assert differences(trainer.engine.model, model_of(weights)) == []


def test_a_frame_for_another_base_is_refused(trainer: Trainer) -> None:
    weights = checkpoint(0)
    trainer.sync(weights, "1", is_delta=False)
    other = Trainer(Engine())
    other.sync(checkpoint(1), "1", is_delta=False)
    other.engine = trainer.engine
    status = other.sync(step(checkpoint(1), 1), "2", is_delta=True)
    assert "the frame was made for" in status.error
    assert "nothing was written" in status.error
    assert differences(trainer.engine.model, model_of(weights)) == []


def test_a_load_that_fails_flags_the_model_until_all_is_loaded(trainer: Trainer) -> None:
    weights = checkpoint(0)
    trainer.sync(weights, "1", is_delta=False)
    trainer.engine.model.break_after = 3
    weights = step(weights, 1)
    status = trainer.sync(weights, "2", is_delta=True)
    assert status.is_flagged
    assert status.version == ""
    trainer.engine.model.break_after = None
    status = trainer.sync(weights, "2", is_delta=False)
    assert (status.error, status.is_flagged) == ("", False)
    assert differences(trainer.engine.model, model_of(weights)) == []


def test_a_tensor_that_did_not_load_as_it_came_refuses_its_version(trainer: Trainer) -> None:
    trainer.engine.model.break_after = 3
    status = trainer.sync(checkpoint(0), "1", is_delta=False)
    assert "the loader broke" in status.error
    assert status.version == ""


def test_weights_that_somebody_else_loads_end_what_is_known(trainer: Trainer) -> None:
    trainer.sync(checkpoint(0), "1", is_delta=False)
    trainer.engine.model.load_weights(checkpoint(9).items())
    answer = trainer.engine.model.get_weights_by_name(STATUS, 1 << 20, tp_size=1)
    assert from_numbers(answer).version == ""
    status = trainer.sync(step(checkpoint(0), 1), "2", is_delta=True)
    assert "which is not here" in status.error
    assert differences(trainer.engine.model, model_of(checkpoint(9))) == []


def test_packed_weights_take_a_delta_only_once_they_are_unpacked() -> None:
    trainer = Trainer(Engine(ToyModel(packs=True)))
    weights = checkpoint(0)
    assert trainer.sync(weights, "1", is_delta=False).error == ""
    weights = step(weights, 1)
    trainer.send(weights, is_delta=True)
    assert "cannot unpack" in trainer.commit("2", is_delta=True).error
    status = trainer.commit("2", is_delta=True, is_restored=True)
    assert (status.error, status.num_loaded) == ("", len(weights))
    assert differences(trainer.engine.model, model_of(weights)) == []


def test_copies_of_a_tensor_in_two_parts_have_to_be_equal(trainer: Trainer) -> None:
    engine, ones = trainer.engine, torch.ones(3, dtype=torch.bfloat16)
    for second in (ones, 2 * ones):
        roots = {}
        for key, tensor in (("a/0", ones), ("b/0", second)):
            packer = PartPacker(key[0])
            packer.begin(f"{second[0]}", is_delta=False)
            engine.model.load_weights(list(packer.pack([("copied.weight", tensor)])[0]))
            roots |= packer.roots
        status = engine.tell(Update(parts=Parts("1", root_of_parts(roots), are_loaded=True)))
        is_equal = second is ones
        assert (status.error == "") == is_equal
        assert is_equal or "is in two parts, and differs in 'b/0'" in status.error


def test_a_packer_sends_whole_tensors_where_a_frame_is_no_gain() -> None:
    packer = PartPacker("stage")
    old = {"w": torch.randn(4096).bfloat16(), "scale": torch.ones(())}
    sent = []
    for number, new in enumerate((old, step(old, 1), {n: t + 1 for n, t in old.items()}, old)):
        packer.begin(str(number), is_delta=number > 0)
        named, is_frame = packer.pack(list(new.items()))
        assert (RECORD in dict(named)) and (("w" in dict(named)) != is_frame)
        sent.append(is_frame)
    assert sent == [False, True, False, False]


def test_a_record_says_which_part_comes() -> None:
    ((name, tensor),) = named_tensors("id", Part("stage-0/1", is_staged=True))
    assert name == RECORD
    assert b"stage-0/1" in bytes(tensor.tolist())
