"""miles's distributed updater and the one of gymfast in its place; test_slime_broadcast has more.

With miles's own source (GYMFAST_MILES_SOURCE) its updater, gather code and groups run over gloo.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import slime_stubs
from integrations.sglang_real import parameters_of
from integrations.test_miles import SOURCE
from integrations.test_slime_broadcast import SEND, STAGES
from integrations.test_slime_group_deltas import frames, require_same, sent, step
from slime_group_run import TENSORS, MilesHandle, Script, ask, run

from gymfast.integrations.miles import EXPECTED_DISTRIBUTED, install

WAYS = [pytest.param(True, id="gymfast")]
if SOURCE is not None:
    WAYS.append(pytest.param(False, id="miles"))
UPDATERS = Path("miles", "backends", "megatron_utils", "update_weight")


@pytest.fixture
def lasting(group_engines: dict[str, str]) -> dict[str, str]:
    for address in group_engines.values():
        ask(address, "test", {"is_reset": True, "has_sessions": True, "opens_at_pause": False})
    return group_engines


def script_of(folder: Path, steps: list[Any], lasting: dict[str, str], **options: Any) -> Script:
    return Script(folder, SOURCE, True, steps, lasting, framework="miles", **options)


@pytest.mark.parametrize("is_gymfast", WAYS)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_engines_have_the_bytes_that_were_trained(
    is_gymfast: bool, num_ranks: int, lasting: dict[str, str], tmp_path: Path
) -> None:
    stages = [list(TENSORS)] if num_ranks == 1 else STAGES
    steps = [("connect", "ab"), ("sync",), *step(0.1, 1)]
    script = script_of(tmp_path, steps, lasting, stages=stages, num_ranks=num_ranks)
    script.is_gymfast = is_gymfast
    for version, note in enumerate(run(script)[0], 1):
        require_same(note, version)
        for engine in note["engines"].values():
            calls = [c for c in engine["calls"] if "group" not in c]
            assert calls[:3] == [
                "pause_generation:retract",
                "flush_cache",
                "begin_weight_update",
            ]
            marks = [call for call in calls if call.startswith(SEND)]
            assert calls[-2:] == ["end_weight_update", "continue_generation"]
            assert sorted(chain(*engine["loads"])) == sorted(TENSORS)
            if is_gymfast:
                assert [":" in mark for mark in marks] == [False] * (len(marks) - 1) + [True]


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.ci), pytest.param(3, marks=pytest.mark.long)]
)
def test_what_changed_is_sent_to_engines_with_our_loader(
    num_ranks: int, lasting: dict[str, str], tmp_path: Path
) -> None:
    for address in lasting.values():
        ask(address, "test", {"has_loader": True})
    stages = [list(TENSORS)] if num_ranks == 1 else STAGES
    other = ("set", "b", {"other_part": "miles-pp_0/1"})
    steps = [("connect", "ab"), ("sync",), *step(0.01, 1), other, *step(0.01, 2), *step(0.01, 3)]
    script = script_of(tmp_path, steps, lasting, stages=stages, num_ranks=num_ranks)
    script.options |= {"pause_generation_mode": "in_place"}
    full, delta, _, after = notes = run(script)[0]
    for version, note in enumerate(notes, 1):
        require_same(note, version)
        calls = note["engines"]["a"]["calls"]
        assert "flush_cache" not in calls
        assert calls[-2:] == ["end_weight_update", "continue_generation"]
    assert [frames(note) > 0 for note in notes] == [False, True, False, True]
    assert sent(delta) < sent(full) / 5
    assert sent(after) < sent(full) / 5


@pytest.mark.ci
def test_an_engine_that_refuses_is_named_and_its_session_ended(
    lasting: dict[str, str], tmp_path: Path
) -> None:
    steps = [("connect", "ab"), ("sync",), ("fail", "b", SEND, "refuse", 1), *step(0.1, 1)]
    script = script_of(tmp_path, [*steps, *step(0.1, 2)], lasting)
    script.options = {"gymfast_timeout_s": 3}
    first, failed, healed = run(script)[0]
    require_same(first, 1)
    assert "engine 1 of 2 failed at update_weights_from_distributed: HTTPError" in failed["error"]
    assert failed["engines"]["a"]["calls"][-2:] == ["end_weight_update", "continue_generation"]
    require_same(healed, 2)


@pytest.mark.ci
def test_LoRA_is_left_to_miles(lasting: dict[str, str], tmp_path: Path) -> None:
    script = script_of(tmp_path, [("connect", "ab"), ("sync",)], lasting, is_lora=True)
    script.source = None  # the stand-in, which has no such methods
    connected, updated = run(script)[0]
    assert connected["error"] == updated["error"] == "NotImplementedError: "
    assert updated["engines"]["a"]["calls"] == []


def test_the_source_has_the_signatures_that_install_expects() -> None:
    folder = UPDATERS / "update_weight_from_distributed"
    own = "broadcast.py", "UpdateWeightFromDistributed"
    inherited = "mixin.py", "DistBucketedWeightUpdateMixin"
    for method, names in EXPECTED_DISTRIBUTED.items():
        is_inherited = method.startswith("_gather") or method in ("update_weights", "pop_metrics")
        if method != "pop_metrics":  # the stand-in has that of slime
            file = slime_stubs.STAND_IN / folder / own[0]
            assert parameters_of(file, own[1], method) == ["self", *names]
        if SOURCE is not None:
            name, kind = inherited if is_inherited else own
            assert parameters_of(SOURCE / folder / name, kind, method) == ["self", *names]


def test_the_handle_of_these_tests_has_the_signatures_of_the_one_of_miles() -> None:
    if SOURCE is None:
        pytest.skip("needs GYMFAST_MILES_SOURCE")
    file = SOURCE / "miles" / "backends" / "sglang_utils" / "sglang_engine.py"
    mine = Path(__file__).parents[1] / "slime_group_run.py"
    own = [(name, "MilesHandle") for name in vars(MilesHandle) if not name.startswith("__")]
    groups = "init_weights_update_group", "destroy_weights_update_group"
    for method, kind in [*own, *((name, "Handle") for name in groups)]:
        assert parameters_of(mine, kind, method) == parameters_of(file, "SGLangEngine", method)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"update_weight_transfer_mode": "p2p", "colocate": False}, "; it is p2p: leave"),
        ({"colocate": True}, "; --colocate is set: leave"),
        ({"colocate": False, "gymfast_threads": 2}, "option gymfast_threads is unknown"),
        ({"colocate": False, "gymfast_timeout_s": 0}, "gymfast_timeout_s is 0, expected"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], text: str) -> None:
    base = {"update_weight_transfer_mode": "broadcast", "distributed_timeout_minutes": 10}
    with pytest.raises(ValueError, match=text):
        install(Namespace(**base | flags))
