"""Deltas over slime's process groups, to engines that have our loader; see test_slime_broadcast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.test_slime import SOURCE
from integrations.test_slime_broadcast import STAGES, arguments
from slime_group_run import TENSORS, Script, ask, run

from gymfast.integrations.slime import install

SEND, TELL = "update_weights_from_distributed", "update_weights_from_tensor"
ALL_BYTES = sum(torch.empty(shape, dtype=dtype).nbytes for dtype, shape in TENSORS.values())


@pytest.fixture
def able(group_engines: dict[str, str]) -> dict[str, str]:
    """Engines with our loader, as after a restart."""
    for address in group_engines.values():
        ask(address, "test", {"is_reset": True, "has_loader": True})
    return group_engines


def step(share: float, seed: int) -> list[tuple[Any, ...]]:
    return [("change", share, seed), ("sync",)]


def frames(note: dict[str, Any]) -> int:
    return int(note["metrics"]["perf/update_weights_num_frames"])


def sent(note: dict[str, Any]) -> int:
    return int(note["metrics"]["perf/update_weights_wire_bytes"])


def buckets(note: dict[str, Any]) -> int:
    return int(note["metrics"]["perf/update_weights_num_buckets"])


def require_same(note: dict[str, Any], version: int) -> None:
    """All engines hold what was trained, generate, and know the number."""
    assert note["error"] is None
    for engine in note["engines"].values():
        assert engine["digests"] == note["truth"]
        assert engine["version"] == str(version)
        assert not engine["is_paused"]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_what_changed_is_sent_to_engines_that_hold_the_version_before(
    num_ranks: int, able: dict[str, str], tmp_path: Path
) -> None:
    steps = [("connect", "ab"), ("sync",), *step(0.01, 1), *step(0.02, 2), ("sync",)]
    stages = [list(TENSORS)] if num_ranks == 1 else STAGES
    ranks = run(Script(tmp_path, SOURCE, True, steps, able, stages, num_ranks))
    for version, note in enumerate(ranks[0], 1):
        require_same(note, version)
    full, *deltas = ranks[0]
    assert frames(full) == 0
    assert sent(full) > ALL_BYTES
    for note in deltas:
        assert frames(note) > buckets(note) / 2
        assert sent(note) < ALL_BYTES / 5
    for engine in deltas[-1]["engines"].values():  # nothing changed, nothing is loaded
        assert engine["loads"] == []
        assert [call for call in engine["calls"] if call.endswith(":4")] == [f"{TELL}:4"]


@pytest.mark.ci
def test_a_part_of_which_most_changed_goes_as_it_is(able: dict[str, str], tmp_path: Path) -> None:
    steps = [("connect", "a"), ("sync",), *step(0.9, 1), *step(0.01, 2)]
    dense, sparse = run(Script(tmp_path, SOURCE, True, steps, able))[0][1:]
    require_same(dense, 2)
    require_same(sparse, 3)
    assert frames(dense) < buckets(dense)
    assert sent(dense) > 0.9 * ALL_BYTES
    assert frames(sparse) > frames(dense)


@pytest.mark.parametrize(
    ("is_full_at_once", "fields"),
    [
        pytest.param(True, {"is_restarted": True}, id="restarted", marks=pytest.mark.ci),
        pytest.param(False, {"other_part": "slime-pp_0/1"}, id="another-base"),
        pytest.param(False, {"other_part": "of another"}, id="another-part", marks=pytest.mark.ci),
        pytest.param(False, {"break_load": True}, id="load-fails", marks=pytest.mark.ci),
    ],
)
def test_an_engine_that_cannot_take_the_delta_gets_everything_in_the_same_update(
    is_full_at_once: bool, fields: dict[str, Any], able: dict[str, str], tmp_path: Path
) -> None:
    steps = [("connect", "ab"), ("sync",), *step(0.01, 1), ("set", "b", fields)]
    notes = run(Script(tmp_path, SOURCE, True, [*steps, *step(0.01, 2), *step(0.01, 3)], able))[0]
    for version, note in enumerate(notes, 1):
        require_same(note, version)
    assert frames(notes[2]) == 0
    passes = 1 if is_full_at_once else 2
    assert sent(notes[2]) > ALL_BYTES
    assert buckets(notes[2]) == passes * buckets(notes[0])
    assert frames(notes[3]) > 0
    assert sent(notes[3]) < ALL_BYTES / 5


@pytest.mark.ci
def test_who_refuses_each_delta_gets_none_until_it_is_connected_again(
    able: dict[str, str], tmp_path: Path
) -> None:
    refused = [("set", "a", {"other_part": "another"}), *step(0.01, 1)]
    steps = [("connect", "a"), ("sync",), *refused, *refused, *step(0.01, 2)]
    notes = run(Script(tmp_path, SOURCE, True, [*steps, ("connect", "a"), ("sync",)], able))[0]
    for version, note in enumerate(notes, 1):
        require_same(note, version)
    passes = [buckets(note) / buckets(notes[0]) for note in notes]
    assert passes == [1, 2, 2, 1, 1]
    told = [sum(TELL in call for call in n["engines"]["a"]["calls"]) for n in notes]
    assert told[3] == 1  # a greeting
    assert told[4] > 1


@pytest.mark.ci
@pytest.mark.parametrize("path", [SEND, TELL])
def test_after_a_failure_everything_is_sent(
    path: str, able: dict[str, str], tmp_path: Path
) -> None:
    fail = ("fail", "b", path, "refuse", 0)
    steps = [("connect", "ab"), ("sync",), fail, *step(0.01, 1), *step(0.01, 2), *step(0.01, 3)]
    script = Script(tmp_path, SOURCE, True, steps, able)
    script.options = {"gymfast_timeout_s": 3}
    first, failed, healed, delta = run(script)[0]
    require_same(first, 1)
    assert "this engine has no room" in failed["error"]
    assert failed["version"] == 1
    require_same(healed, 2)
    require_same(delta, 3)
    assert frames(healed) == 0
    assert frames(delta) > 0


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.ci), pytest.param(3, marks=pytest.mark.long)]
)
def test_a_newcomer_and_one_without_our_loader_make_it_full_for_all(
    num_ranks: int, able: dict[str, str], tmp_path: Path
) -> None:
    steps = [("connect", "ab"), ("sync",), ("connect", "abc"), *step(0.01, 1), *step(0.01, 2)]
    steps += [("set", "c", {"has_loader": False}), ("connect", "abc"), *step(0.01, 3)]
    steps += [("set", "c", {"has_loader": True}), ("connect", "abc"), *step(0.01, 4)]
    stages = [list(TENSORS)] if num_ranks == 1 else STAGES
    notes = run(Script(tmp_path, SOURCE, True, [*steps, *step(0.01, 5)], able, stages, num_ranks))
    for version, note in enumerate(notes[0], 1):
        require_same(note, version)
    assert [frames(note) > 0 for note in notes[0]] == [False, False, True, False, False, True]


@pytest.mark.ci
def test_deltas_are_left_out_where_they_are_not_wanted(
    able: dict[str, str], tmp_path: Path
) -> None:
    script = Script(tmp_path, SOURCE, True, [("connect", "a"), ("sync",), *step(0.01, 1)], able)
    script.options |= {"gymfast_delta": False}
    for version, note in enumerate(run(script)[0], 1):
        require_same(note, version)
        assert frames(note) == 0
        assert not any(TELL in call for call in note["engines"]["a"]["calls"])


def test_an_option_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="gymfast_delta is 'yes', expected true or false"):
        install(arguments(gymfast_delta="yes"))
