"""miles's delta updater and the one of gymfast in its place; test_slime has what they share.

With miles's own source (GYMFAST_MILES_SOURCE) its updater and gather code run, with stubs for ray
and megatron; without it a stand-in of the same signatures. Engines receive with the reader of the
tests, or with slime's, which is the same.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import pytest
from slime_engine import digest_of_bytes
from slime_run import Script, run
from slime_script import START, decoded, sync_of, truth

from gymfast.integrations.miles import EXPECTED, install

_GIVEN = os.environ.get("GYMFAST_MILES_SOURCE")
SOURCE = Path(_GIVEN) if _GIVEN else None


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("is_gymfast", [False, True], ids=["miles", "gymfast"])
def test_versions_hold_what_was_trained(is_gymfast: bool, num_ranks: int, tmp_path: Path) -> None:
    steps = [*START, *sync_of(1), ("sync",), ("connect", "b", "c"), *sync_of(2)]
    script = Script(tmp_path, SOURCE, is_gymfast, num_ranks, steps, framework="miles")
    ranks = run(script)
    assert [note["error"] for rank in ranks for note in rank] == [None] * 4 * num_ranks
    assert decoded(script) == [truth(step) for step in (0, 1, 1, 2)]
    calls = ["pull_weights", "pause_generation", "update_weights_from_disk", "continue_generation"]
    assert ranks[0][-1]["engines"]["b"]["calls"] == calls
    for engine in ranks[0][-1]["engines"].values():
        assert engine["served"] == digest_of_bytes(truth(2))
        assert set(engine["pauses"]) == {"in_place"}
    assert 0 < ranks[-1][-1]["metrics"]["perf/update_weights_density"] < 1


def test_failures_and_copies_are_handled_as_for_slime(tmp_path: Path) -> None:
    steps = [
        *START,
        *(*sync_of(1), ("fail", "b", "pull_weights", "refuse"), *sync_of(2)),
        *(("fail_hook", 1), *sync_of(3), *sync_of(4)),
    ]
    script = Script(tmp_path, SOURCE, True, 3, steps, framework="miles", has_copies=True)
    ranks = run(script)
    for notes in ranks:
        assert [note["version"] for note in notes] == [0, 1, 2, 2, 3]
        assert "engine 1 of 2 failed at pull_weights" in notes[2]["error"]
        assert "the bucket is not reachable" in notes[3]["error"]
        assert notes[4]["error"] is None
    assert decoded(script) == [truth(0), truth(1), truth(2), truth(4)]
    assert ranks[0][4]["engines"]["b"]["served"] == digest_of_bytes(truth(4))


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="without --colocate; it is p2p: leave"):
        install(Namespace(update_weight_transfer_mode="p2p"))


def test_the_stand_in_has_the_signatures_that_install_expects(tmp_path: Path) -> None:
    sources = [None] if SOURCE is None else [None, SOURCE]
    for number, source in enumerate(sources):
        steps = [("signatures",)]
        script = Script(tmp_path / str(number), source, False, 1, steps, framework="miles")
        assert run(script)[0] == [{name: ["self", *names] for name, names in EXPECTED.items()}]
