"""The loader in SGLang: messages in, tensors of a checkpoint into a live model, a status back."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from integrations.sglang_stand_in import SafeUnpickler, install_sglang
from integrations.sglang_toy import (
    ToyModel,
    checkpoint,
    differences,
    model_of,
    step,
)

from gymfast.delta import encode
from gymfast.integrations.sglang import load
from gymfast.integrations.sglang_messages import (
    RECORD,
    STATUS,
    Confirm,
    Piece,
    Status,
    Update,
    from_numbers,
    pack,
)
from gymfast.integrations.sglang_model import fused_names
from gymfast.integrations.update_request import InitRequest
from gymfast.sync import Publisher

ATTENTION = "model.layers.1.self_attn."


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in install_sglang().items():
        monkeypatch.setitem(sys.modules, name, module)


class Engine:
    """A live model and the way of a message to its loader."""

    def __init__(self, model: ToyModel | None = None) -> None:
        self.model = model or ToyModel()

    def tell(self, action: Piece | Update | Confirm, piece: bytes | None = None) -> Status:
        payload = pack("an update", action, piece)
        with torch.inference_mode():  # as SGLang's scheduler runs
            load(self.model, SafeUnpickler(io.BytesIO(payload)).load())
        return from_numbers(self.model.get_weights_by_name(STATUS, 1 << 20, tp_size=1))

    def send(self, frame: bytes, **options: bool) -> Status:
        for offset in range(0, len(frame), 1000):
            self.tell(Piece(offset), frame[offset : offset + 1000])
        return self.tell(Update(frame_bytes=len(frame), **options))

    def loaded(self) -> list[str]:
        """Names that the newest call of the model's loader got."""
        return self.model.loads[-1]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_ten_deltas_give_the_bits_and_tokens_of_the_final_checkpoint(engine: Engine) -> None:
    weights = checkpoint(0)
    assert engine.send(encode(None, weights)).error == ""
    places = {name: value.data_ptr() for name, value in engine.model.named_parameters()}
    for version in range(1, 11):
        new = step(weights, version)
        status = engine.send(encode(weights, new))
        assert (status.error, status.num_changed) == ("", len(weights))
        weights = new
    expected, tokens = model_of(weights), torch.arange(8)
    assert differences(engine.model, expected) == []
    assert torch.equal(engine.model.forward(tokens), expected.forward(tokens))
    assert {n: v.data_ptr() for n, v in engine.model.named_parameters()} == places


@pytest.mark.parametrize("tells", [True, False], ids=["loader-tells", "loader-does-not-tell"])
def test_a_change_of_q_loads_k_and_v_with_it_and_nothing_else(tells: bool) -> None:
    engine = Engine(ToyModel(tells=tells))
    weights = checkpoint(0)
    engine.send(encode(None, weights))
    new = step(weights, 1, names=ATTENTION + "q_proj")
    status = engine.send(encode(weights, new))
    assert engine.loaded() == [f"{ATTENTION}{part}_proj.weight" for part in "qkvo"]
    assert (status.num_changed, status.num_loaded) == (1, 4)
    assert differences(engine.model, model_of(new)) == []


def test_a_change_of_one_expert_loads_the_whole_block_of_its_layer(engine: Engine) -> None:
    weights = checkpoint(0)
    engine.send(encode(None, weights))
    new = step(weights, 1, names="layers.2.mlp.experts.1")
    engine.send(encode(weights, new))
    assert {name.split(".mlp.")[0] for name in engine.loaded()} == {"model.layers.2"}
    assert {n for n in engine.loaded() if "experts" in n} == {
        f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (0, 1)
    }
    assert differences(engine.model, model_of(new)) == []


def test_names_without_a_number_go_together_since_they_may_be_tied() -> None:
    names = ["embed.weight", "layers.0.norm.weight", "lm_head.weight"]
    assert fused_names(names, ["lm_head.weight"]) == ["embed.weight", "lm_head.weight"]


def test_nothing_changed_loads_nothing(engine: Engine) -> None:
    weights = checkpoint(0)
    engine.send(encode(None, weights))
    engine.model.loads.clear()
    assert engine.send(encode(weights, weights)).num_loaded == 0
    assert engine.model.loads == []


def test_a_late_joiner_takes_anchor_and_chain_from_the_store(tmp_path: Path) -> None:
    url, weights = f"file://{tmp_path}", checkpoint(0)
    follow = InitRequest(store=url, run="run")
    early, late = Engine(), Engine()
    publisher = Publisher(url, "run", anchor_every=100)
    for version in range(5):
        assert publisher.publish(weights).version == version
        assert early.tell(Update(follow=follow, version=version)).error == ""
        newest, weights = weights, step(weights, version)
    status = late.tell(Update(follow=follow, version=4))
    assert status.error == ""
    assert status.root == early.tell(Update(follow=follow, version=4)).root == publisher.root
    assert differences(late.model, model_of(newest)) == []
    assert differences(early.model, model_of(newest)) == []


def test_a_version_that_is_not_published_is_refused_and_the_next_one_works(tmp_path: Path) -> None:
    url, weights, engine = f"file://{tmp_path}", checkpoint(0), Engine()
    follow = InitRequest(store=url, run="run")
    publisher = Publisher(url, "run")
    publisher.publish(weights)
    engine.tell(Update(follow=follow, version=0))
    status = engine.tell(Update(follow=follow, version=7))
    assert "NotFoundError" in status.error
    assert not status.is_flagged
    assert differences(engine.model, model_of(weights)) == []
    new = step(weights, 1)
    publisher.publish(new)
    assert engine.tell(Update(follow=follow, version=1)).error == ""
    assert differences(engine.model, model_of(new)) == []


def test_a_frame_for_another_base_is_refused_with_the_model_untouched(engine: Engine) -> None:
    weights = checkpoint(0)
    engine.send(encode(None, weights))
    engine.model.loads.clear()
    status = engine.send(encode(checkpoint(5), checkpoint(6)))
    assert "rank 0: " in status.error
    assert not status.is_flagged
    assert engine.model.loads == []
    new = step(weights, 1)
    assert engine.send(encode(weights, new)).error == ""
    assert differences(engine.model, model_of(new)) == []


def test_a_lost_piece_is_refused(engine: Engine) -> None:
    frame = encode(None, checkpoint(0))
    engine.tell(Piece(0), frame[:100])
    engine.tell(Piece(200), frame[200:])
    assert "100 of" in engine.tell(Update(frame_bytes=len(frame))).error


def test_what_is_left_of_an_interrupted_frame_does_not_spoil_the_next(engine: Engine) -> None:
    weights = checkpoint(0)
    engine.tell(Piece(0), b"half of something")
    assert engine.send(encode(None, weights)).error == ""
    assert differences(engine.model, model_of(weights)) == []


@pytest.mark.parametrize("healing", ["anchor", "full update"])
def test_a_load_that_fails_flags_the_engine_until_it_is_healed(
    engine: Engine, healing: str
) -> None:
    weights, new, newest = checkpoint(0), checkpoint(1), checkpoint(2)
    engine.send(encode(None, weights))
    engine.model.break_after = 3
    status = engine.send(encode(weights, new))
    assert "the loader broke" in status.error
    assert status.is_flagged
    engine.model.break_after = None

    status = engine.send(encode(new, newest))
    assert "the engine is flagged, send an anchor or a full update" in status.error
    assert status.is_flagged
    with pytest.raises(Exception, match=r"not to be used.*the loader broke"):
        engine.model.forward(torch.arange(3))

    if healing == "anchor":
        status = engine.send(encode(None, newest))
    else:
        status = engine.send(encode(new, newest), is_full=True)
    assert (status.error, status.is_flagged) == ("", False)
    assert status.num_loaded == status.num_tensors == len(weights)
    expected, tokens = model_of(newest), torch.arange(3)
    assert differences(engine.model, expected) == []
    assert torch.equal(engine.model.forward(tokens), expected.forward(tokens))


def test_a_forward_of_the_engine_is_put_back_when_the_model_is_healed(engine: Engine) -> None:
    weights = checkpoint(0)
    engine.model.forward = compiled = lambda tokens: tokens
    for broken in (0, 1):
        engine.model.break_after = broken
        assert engine.send(encode(None, weights)).is_flagged
        assert engine.model.forward is not compiled
    engine.model.break_after = None
    engine.send(encode(None, weights))
    assert engine.model.forward is compiled


def test_weights_that_somebody_else_changed_are_all_loaded_again(engine: Engine) -> None:
    weights = checkpoint(0)
    engine.send(encode(None, weights))
    engine.model.load_weights(checkpoint(9).items())
    new = step(weights, 1, names=ATTENTION)
    status = engine.send(encode(weights, new))
    assert status.num_loaded == len(weights)
    assert differences(engine.model, model_of(new)) == []


@pytest.mark.parametrize("names", [ATTENTION, "none of them"])
def test_a_model_that_is_packed_after_updates_is_always_loaded_whole(names: str) -> None:
    engine, weights = Engine(ToyModel(packs=True)), checkpoint(0)
    engine.send(encode(None, weights), is_restored=True)
    new = step(weights, 1, names=names)
    assert engine.send(encode(weights, new), is_restored=True).num_loaded == len(weights)
    assert differences(engine.model, model_of(new)) == []


def test_a_model_that_the_cpu_server_packs_is_always_loaded_whole(engine: Engine) -> None:
    weights = checkpoint(0)
    engine.send(encode(None, weights))
    engine.model.model.norm.use_intel_amx_backend = True
    assert engine.send(encode(weights, weights), is_restored=True).num_loaded == len(weights)


def test_a_checkpoint_that_leaves_parameters_empty_flags_the_engine(engine: Engine) -> None:
    weights = checkpoint(0)
    del weights["model.norm.weight"]
    status = engine.send(encode(None, weights))
    assert "1 parameters got no tensor: ['model.norm.weight']" in status.error
    assert status.is_flagged


def test_a_parameter_that_moves_flags_the_engine(engine: Engine) -> None:
    weights = checkpoint(0)
    engine.send(encode(None, weights))
    load_weights, norm = engine.model.load_weights, engine.model.model.norm.weight
    kept = norm.data  # so that its memory is not given to the copy

    def moving(pairs: object) -> object:
        norm.data = kept.clone()
        return load_weights(pairs)

    engine.model.load_weights = moving
    status = engine.send(encode(weights, step(weights, 1)))
    assert "moved 1 parameters to other memory: ['model.norm.weight']" in status.error
    assert status.is_flagged


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ([("w", torch.zeros(3, dtype=torch.bfloat16))], "messages of gymfast, no weights"),
        ([("w", torch.zeros(3, dtype=torch.uint8))], "messages of gymfast, no weights"),
        ([(RECORD, "text")], "no flat uint8 tensor"),
        ([(RECORD, b"{}")], "no _Protocol"),
        ([(RECORD, b'{"protocol": 1}')], "the trainer speaks protocol 1, this engine 3"),
        ([(RECORD, b'{"protocol": 3, "update_id": "", "action": {"type": "x"}}')], "no Record"),
        (
            [
                (
                    RECORD,
                    b'{"protocol": 3, "update_id": "", "action": {"type": "piece", "offset": 0}}',
                )
            ],
            "one without the other",
        ),
    ],
)
def test_what_is_no_message_is_refused_and_named(
    engine: Engine, named: list[tuple[str, object]], sentence: str
) -> None:
    weights = checkpoint(0)
    engine.send(encode(None, weights))
    as_tensors = [
        (name, torch.frombuffer(bytearray(v), dtype=torch.uint8) if isinstance(v, bytes) else v)
        for name, v in named
    ]
    load(engine.model, as_tensors)
    status = from_numbers(engine.model.get_weights_by_name(STATUS))
    assert sentence in status.error
    assert status.update_id == ""
    assert differences(engine.model, model_of(weights)) == []


def test_an_unknown_sglang_is_refused_with_one_sentence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["sglang.srt.distributed"], "get_tp_group")
    status = engine.send(encode(None, checkpoint(0)))
    assert "this SGLang is not known, gymfast knows 0.5.12 to 0.5.23" in status.error
    assert engine.model.loads == []


def test_other_weights_are_still_read_by_name(engine: Engine) -> None:
    engine.model.get_weights_by_name = lambda name, size, tp_size: [name, size, tp_size]
    engine.send(encode(None, checkpoint(0)))
    assert engine.model.get_weights_by_name("w", 5, tp_size=1) == ["w", 5, 1]
