"""slime's and miles's engines with our loader: one message instead of a reload.

Engine a is a server in another process with the loader; b, where it is there, reloads. With the
source of slime or miles its updater and gather code run, and slime's receiver.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from slime_engine import digest_of_bytes
from slime_run import TENSORS, Script, run
from slime_script import START, sync_of, truth

_GIVEN = {name: os.environ.get(f"GYMFAST_{name.upper()}_SOURCE") for name in ("slime", "miles")}
SOURCES = {name: Path(path) if path else None for name, path in _GIVEN.items()}
LOADED = ["/update_weights_from_tensor", "/get_weights_by_name"]
ALL = set(TENSORS)


def script_of(folder: Path, steps: list[tuple[Any, ...]], framework: str = "slime") -> Script:
    ranks = 3 if framework == "miles" else 1
    script = Script(folder, SOURCES[framework], True, ranks, steps, framework=framework)
    script.servers = ["a"]
    return script


def log_of(script: Script) -> str:
    return (script.folder / "rank0.log").read_text()


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_engines_with_the_loader_load_what_changed_and_others_reload(
    framework: str, tmp_path: Path
) -> None:
    steps = [*START, *sync_of(1), *sync_of(2), ("sync",), *sync_of(3)]
    script = script_of(tmp_path, steps, framework)
    ranks = run(script)
    assert [note["error"] for rank in ranks for note in rank] == [None] * 5 * len(ranks)
    notes = [note["engines"] for note in ranks[0]]
    for number, step in enumerate((1, 2, 2, 3), 1):
        for engine in notes[number].values():
            assert engine["served"] == digest_of_bytes(truth(step))
            assert not engine["is_paused"]
        assert "update_weights_from_disk" not in notes[number]["a"]["calls"]
        assert "update_weights_from_disk" in notes[number]["b"]["calls"]
        assert notes[number]["a"]["version"] == str(number)
    assert set(notes[1]["a"]["loads"][0]) == ALL
    assert notes[3]["a"]["loads"] == []
    for number in (2, 4):  # each step leaves every second tensor alone
        (loaded,) = notes[number]["a"]["loads"]
        assert 0 < len(loaded) < len(ALL)
    mode = "in_place" if framework == "miles" else "abort"
    flush = [] if framework == "miles" else ["/flush_cache"]
    last = ":".join([LOADED[0], "2", *([] if framework == "miles" else ["flush"])])
    assert notes[2]["a"]["requests"] == [
        *("/model_info", "/pull_weights", "/server_info", f"/pause_generation:{mode}", *flush),
        *("/begin_weight_update", *LOADED, last, "/end_weight_update", "/continue_generation"),
    ]
    log = log_of(script)
    assert log.count("engine 0 loads what changed, with gymfast.integrations.sglang.load") == 1
    assert log.count("engine 1 reloads its checkpoint at each update: its handle does not") == 1


def test_an_engine_whose_load_breaks_stays_paused_and_is_healed_by_the_next_version(
    tmp_path: Path,
) -> None:
    breaks = [("break_loader", "a", 2), *sync_of(2), ("break_loader", "a", None)]
    steps = [*START, *sync_of(1), *breaks, *sync_of(3), *sync_of(4)]
    notes = run(script_of(tmp_path, steps))[0]
    text = "engine 0 of 2 failed at update_weights_from_tensor: FlaggedError: http://127.0.0.1:"
    assert text in notes[2]["error"]
    assert "stays paused: rank 0: RuntimeError: the loader broke" in notes[2]["error"]
    a, b = (notes[2]["engines"][name] for name in "ab")
    assert (a["is_paused"], b["is_paused"]) == (True, False)
    assert b["served"] == digest_of_bytes(truth(2))
    assert [note["version"] for note in notes] == list(range(5))
    assert (notes[3]["error"], notes[4]["error"]) == (None, None)
    assert set(notes[3]["engines"]["a"]["loads"][-1]) == ALL
    assert len(notes[4]["engines"]["a"]["loads"][-1]) < len(ALL)
    for number in (3, 4):
        for engine in notes[number]["engines"].values():
            assert engine["served"] == digest_of_bytes(truth(number))
            assert not engine["is_paused"]


def test_an_engine_that_missed_a_version_or_restarted_catches_up_in_slimes_pinned_sglang(
    tmp_path: Path,
) -> None:
    restart = ("restart", "a", {"missing": ["/begin_weight_update"]})
    missed = [("fail", "b", "pull_weights", "refuse"), *sync_of(2)]
    begin = [("connect", "a", "b"), restart, ("sync",), *sync_of(1)]
    notes = run(script_of(tmp_path, [*begin, *missed, *sync_of(3), restart, *sync_of(4)]))[0]
    assert "failed at pull_weights" in notes[2]["error"]
    assert notes[2]["engines"]["a"]["served"] == digest_of_bytes(truth(1))
    assert (notes[3]["error"], notes[4]["error"]) == (None, None)
    assert set(notes[4]["engines"]["a"]["loads"][0]) == ALL
    for number in (3, 4):
        engine = notes[number]["engines"]["a"]
        assert engine["served"] == digest_of_bytes(truth(number))
        before, after = "/post_process_weights:10", "/post_process_weights:01"
        assert engine["requests"][-7:] == [
            *("/begin_weight_update", before, *LOADED, f"{LOADED[0]}:{number}:flush", after),
            "/continue_generation",
        ]


REASONS: dict[str, dict[str, Any]] = {
    "started without --custom-weight-loader": {"info": {"custom_weight_loader": None}},
    "has dp_size 2": {"info": {"dp_size": 2}},
    "has a draft model": {"info": {"speculative_algorithm": "EAGLE"}},
    "cannot make its weights loadable": {"fails": {"/begin_weight_update": "cannot restore"}},
    "/server_info answered 400": {"fails": {"/server_info": "busy"}},
}


def test_a_server_that_the_loader_does_not_fit_reloads_with_a_clear_line(tmp_path: Path) -> None:
    """It is not sent a message: one for a loader that is not there would end it."""
    steps: list[tuple[Any, ...]] = [("connect", "a"), ("sync",)]
    for step, options in enumerate(REASONS.values(), 1):
        steps += [("restart", "a", options), *sync_of(step)]
    script = script_of(tmp_path, steps)
    notes = run(script)[0]
    said = [row for row in log_of(script).splitlines() if "engine 0 reloads" in row]
    rows = {text: [row for row in said if text in row] for text in REASONS}
    assert [len(found) for found in rows.values()] == [1] * len(REASONS)
    for step, note in enumerate(notes):
        assert note["error"] is None
        engine = note["engines"]["a"]
        assert engine["served"] == digest_of_bytes(truth(step))
        assert ("update_weights_from_disk" in engine["calls"]) == (step > 0)
        assert not any(LOADED[0] in path for path in engine["requests"])
