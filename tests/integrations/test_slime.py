"""slime's delta updater and the one of gymfast in its place, through the same scripted runs.

With slime's own source (GYMFAST_SLIME_SOURCE, or an installed slime) its updater, its gather code
and its receiver run, with stubs for ray and megatron; without it a stand-in of the same signatures.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from slime_engine import digest_of_bytes
from slime_run import COPIED, TENSORS, Script, run
from slime_script import START, decoded, sync_of, truth

from gymfast.integrations import slime


def _source() -> Path | None:
    given = os.environ.get("GYMFAST_SLIME_SOURCE")
    if given:
        return Path(given)
    found = importlib.util.find_spec("slime")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))).parent


SOURCE = _source()
BOTH = pytest.mark.parametrize("is_gymfast", [False, True], ids=["slime", "gymfast"])


@BOTH
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_versions_hold_what_was_trained(is_gymfast: bool, num_ranks: int, tmp_path: Path) -> None:
    steps = [*START, *sync_of(1), *sync_of(2), ("sync",), *sync_of(3)]
    script = Script(tmp_path, SOURCE, is_gymfast, num_ranks, steps)
    ranks = run(script)
    assert [note["error"] for rank in ranks for note in rank] == [None] * 5 * num_ranks
    assert decoded(script) == [truth(step) for step in (0, 1, 2, 2, 3)]
    calls = ["pull_weights", "pause_generation", "flush_cache"]
    calls += ["update_weights_from_disk", "continue_generation"]
    for number, note in enumerate(ranks[0]):
        assert note["version"] == number
        for engine in note["engines"].values():
            assert engine["calls"] == (calls if number else ["pull_weights"])
    assert ranks[0][-1]["engines"]["b"]["served"] == digest_of_bytes(truth(3))
    assert [note["hook"] for note in ranks[0]] == [
        ["versions"],
        *([f"weight_v{number:06d}"] for number in range(1, 5)),
    ]
    check_metrics(ranks[-1][1]["metrics"], script)
    assert [note["hook"] for note in ranks[-1]][1:] == [n["hook"] for n in ranks[0]][1:]


@pytest.mark.parametrize(
    ("encoding", "algorithm"),
    [("overwrite", "xxh3-128"), ("overwrite", "blake3"), ("xor", "adler32")],
)
def test_every_encoding_and_digest_of_the_flags(
    encoding: str, algorithm: str, tmp_path: Path
) -> None:
    script = Script(tmp_path, SOURCE, True, 1, [*START, *sync_of(1), *sync_of(2)])
    script.encoding, script.algorithm = encoding, algorithm
    notes = run(script)[0]
    assert [note["error"] for note in notes] == [None] * 3
    assert decoded(script) == [truth(step) for step in range(3)]
    assert notes[-1]["engines"]["a"]["served"] == digest_of_bytes(truth(2))


def check_metrics(metrics: dict[str, float], script: Script) -> None:
    """Names and meaning are those of slime, for the first version."""
    old, new = truth(0), truth(1)
    changed = sum(a != b for name in TENSORS for a, b in zip(old[name], new[name], strict=True))
    total = sum(map(len, new.values()))
    files = (script.versions / "weight_v000001").glob("*.safetensors")
    assert metrics.pop("perf/update_weights_density") == pytest.approx(changed / total)
    assert metrics.pop("perf/update_weights_wire_bytes") == sum(f.stat().st_size for f in files)
    phases = (
        ("encode", "hook", "pull", "plan", "pause", "reload", "promote")
        if script.is_gymfast
        else ()
    )
    assert set(metrics) == {f"perf/update_weights_{phase}_time" for phase in phases}
    assert all(seconds >= 0 for seconds in metrics.values())


@BOTH
def test_an_engine_that_fails_to_pull_catches_up_with_the_next_version(
    is_gymfast: bool, tmp_path: Path
) -> None:
    fails = [("fail", "b", "pull_weights", how) for how in ("before", "after")]
    steps = [*START, fails[0], *sync_of(1), *sync_of(2), fails[1], *sync_of(3), *sync_of(4)]
    script = Script(tmp_path, SOURCE, is_gymfast, 1, steps)
    notes = run(script)[0]
    assert [note["version"] for note in notes] == list(range(5))
    for number in (1, 3):
        assert "ConnectionError" in notes[number]["error"]
        for engine in notes[number]["engines"].values():
            assert engine["served"] == (digest_of_bytes(truth(2)) if number == 3 else "")
            assert engine["calls"] == ["pull_weights"]
    for number in (2, 4):
        assert notes[number]["error"] is None
        for engine in notes[number]["engines"].values():
            assert engine["served"] == digest_of_bytes(truth(number))
    assert decoded(script) == [truth(step) for step in range(5)]


@BOTH
def test_an_engine_that_joins_late_gets_the_whole_chain(is_gymfast: bool, tmp_path: Path) -> None:
    steps = [*START, *sync_of(1), *sync_of(2), ("connect", "b", "c"), *sync_of(3)]
    script = Script(tmp_path, SOURCE, is_gymfast, 1, steps)
    notes = run(script)[0]
    assert [note["error"] for note in notes] == [None] * 4
    assert set(notes[3]["engines"]) == {"b", "c"}
    for engine in notes[3]["engines"].values():
        assert engine["served"] == digest_of_bytes(truth(3))


def test_R25_a_version_is_promoted_only_once_every_engine_has_it(tmp_path: Path) -> None:
    fail = ("fail", "b", "pull_weights", "refuse")
    steps = [*START, *sync_of(1), fail, *sync_of(2), fail, *sync_of(3), *sync_of(4)]
    script = Script(tmp_path, SOURCE, True, 3, steps)
    ranks = run(script)
    for rank, notes in enumerate(ranks):
        assert [note["version"] for note in notes] == [0, 1, 2, 2, 3]
        assert notes[4]["error"] is None
        for note in notes[2:4]:
            assert "engine 1 of 2 failed at pull_weights: engine b has no room" in note["error"]
            assert ("failed on rank 0" in note["error"]) == (rank > 0)
    assert ranks[0][3]["engines"]["a"]["calls"] == ["pull_weights"]
    calls = ranks[0][4]["engines"]["b"]["calls"]
    assert calls[:2] == ["pull_weights", "pull_weights"]
    assert calls[-1] == "continue_generation"
    assert decoded(script) == [truth(0), truth(1), truth(2), truth(4)]
    for engine in ranks[0][4]["engines"].values():
        assert engine["served"] == digest_of_bytes(truth(4))


def test_a_version_that_no_engine_was_told_of_is_written_again(tmp_path: Path) -> None:
    failing = [step for rank in range(3) for step in (("fail_hook", rank), *sync_of(2))]
    script = Script(tmp_path, SOURCE, True, 3, [*START, *sync_of(1), *failing, *sync_of(3)])
    ranks = run(script)
    for rank, notes in enumerate(ranks):
        assert [note["version"] for note in notes] == [0, 1, 1, 1, 1, 2]
        assert notes[5]["error"] is None
        for failed, note in enumerate(notes[2:5]):
            other = "" if failed == rank else f"the post-write hook failed on rank {failed}: "
            assert f"{other}OSError: the bucket is not reachable" in note["error"]
    assert all(note["engines"]["a"]["calls"] == [] for note in ranks[0][2:5])
    assert decoded(script) == [truth(0), truth(1), truth(3)]
    assert ranks[0][5]["engines"]["a"]["served"] == digest_of_bytes(truth(3))


def test_engines_generate_again_when_one_fails_to_load(tmp_path: Path) -> None:
    methods = ("pause_generation", "flush_cache", "update_weights_from_disk", "continue_generation")
    steps: list[tuple[Any, ...]] = [*START]
    for number, method in enumerate(methods, 1):
        steps += [("fail", "b", method, "after"), *sync_of(number)]
    notes = run(Script(tmp_path, SOURCE, True, 1, [*steps, *sync_of(5)]))[0]
    for note, method in zip(notes[1:], methods, strict=False):
        assert f"engine 1 of 2 failed at {method}" in note["error"]
        assert not any(engine["is_paused"] for engine in note["engines"].values())
    assert notes[5]["error"] is None
    for engine in notes[5]["engines"].values():
        assert engine["served"] == digest_of_bytes(truth(5))


def test_copies_on_pipeline_stages_are_stored_once(tmp_path: Path) -> None:
    script = Script(tmp_path, SOURCE, True, 3, [*START, *sync_of(1), *sync_of(2), *sync_of(3)])
    script.has_copies = True
    ranks = run(script)
    assert [note["error"] for rank in ranks for note in rank] == [None] * 12
    assert decoded(script) == [truth(step) for step in range(4)]
    assert ranks[0][3]["engines"]["a"]["served"] == digest_of_bytes(truth(3))


def test_copies_that_differ_are_refused_before_an_engine_is_told(tmp_path: Path) -> None:
    steps = [*START, *sync_of(1), ("train", 2), ("differ", 1, COPIED), ("sync",), *sync_of(3)]
    script = Script(tmp_path, SOURCE, True, 3, steps)
    script.has_copies = True
    ranks = run(script)
    for notes in ranks:
        assert f"tensor '{COPIED}' has different bytes on ranks 0 and 1" in notes[2]["error"]
        assert [note["version"] for note in notes] == [0, 1, 1, 2]
    assert ranks[0][2]["engines"]["a"]["calls"] == []
    assert decoded(script) == [truth(0), truth(1), truth(3)]


def test_R90_a_snapshot_beyond_the_budget_is_refused_with_numbers(tmp_path: Path) -> None:
    script = Script(tmp_path, SOURCE, True, 3, START)
    script.options = {"gymfast_host_memory_bytes": 60_000}
    ranks = run(script)
    for notes in ranks:
        assert "BudgetError" in notes[0]["error"]
        assert (
            "the limit of this rank is 60000: raise gymfast_host_memory_bytes"
            in (notes[0]["error"])
        )


def test_frames_beyond_the_budget_leave_the_chain_as_it_was(tmp_path: Path) -> None:
    held = sum(map(len, truth(0).values()))
    script = Script(tmp_path, SOURCE, True, 1, [*START, *sync_of(1), *sync_of(0)])
    script.options = {"gymfast_host_memory_bytes": held + 200}
    notes = run(script)[0]
    assert "the frame of tensor" in notes[1]["error"]
    assert [note["version"] for note in notes] == [0, 0, 1]
    assert notes[2]["error"] is None
    assert decoded(script) == [truth(0), truth(0)]


def test_a_tensor_of_another_size_than_in_the_base_is_named(tmp_path: Path) -> None:
    script = Script(tmp_path, SOURCE, True, 3, START)
    script.base_changes = {"output.scale": [2]}
    for notes in run(script):
        assert "tensor 'output.scale' has 4 bytes in" in notes[0]["error"]
        assert (
            "--hf-checkpoint has to be the checkpoint that engines start from"
            in (notes[0]["error"])
        )


@BOTH
def test_ranks_and_engines_without_a_common_directory_meet_in_the_store(
    is_gymfast: bool, tmp_path: Path
) -> None:
    failing = [("fail_hook", 1), *sync_of(2)] if is_gymfast else []
    steps = [*START, *sync_of(1), *failing, ("sync",), *sync_of(3)]
    ranks = run(Script(tmp_path, SOURCE, is_gymfast, 3, steps, has_views=True))
    if is_gymfast:
        assert "the bucket is not reachable" in ranks[0][2]["error"]
        assert [note["version"] for note in ranks[0]] == [0, 1, 1, 2, 3]
    for notes in ranks:
        assert [note["error"] for note in notes[-2:]] == [None, None]
    for engine in ranks[0][-1]["engines"].values():
        assert engine["served"] == digest_of_bytes(truth(3))


def test_the_stand_in_has_the_signatures_that_install_expects(tmp_path: Path) -> None:
    steps = [("signatures",)]
    found = [run(Script(tmp_path / "0", None, False, 1, steps))[0]]
    if SOURCE is not None:
        found.append(run(Script(tmp_path / "1", SOURCE, False, 1, steps))[0])
    expected = {method: ["self", *names] for method, names in slime.EXPECTED.items()}
    assert found == [[expected]] * len(found)


def test_the_patch_in_the_documentation_applies(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "integrations" / "slime.md").read_text()
    patch = text.partition("```diff\n")[2].partition("```")[0]
    files = re.findall(r"^--- a/(.+)$", patch, re.MULTILINE)
    assert len(files) == 2
    assert patch.count("update_weight_cls = load_function(") == 1
    if SOURCE is None:
        return
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((SOURCE / file).read_text())
    apply = ["git", "apply", "--unsafe-paths", "--directory", str(tmp_path), "-"]
    subprocess.run(apply, input=patch, text=True, check=True, cwd=tmp_path)
    assert "custom_update_weight_class_path" in (tmp_path / files[0]).read_text()
