"""The campaign of docs/reliability.md: a sample, more with `.ci/run`, all in make test-long."""

from __future__ import annotations

import csv
import logging
import shutil
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.campaign import report
from tests.campaign.__main__ import shown, shrunk
from tests.campaign.counts import WHAT, Counts, ViolationError
from tests.campaign.history import History, Profile, play
from tests.campaign.mutants import MAX_SEEDS, MUTANTS, broken, seed_that_catches
from tests.campaign.processes import KINDS

SAMPLE = (2, 4, 5)
"""With folds, with stores that are far, with both."""
QUICK = (
    "goes on after a record of somebody else",
    "keeps what failed as the committed state",
    "deletes without reading the leases",
    "keeps no version but the newest full state",
    "deletes records of epochs",
    "a fold leads from another state",
    "deletes folds that are of use",
    "does not wait for its lease when it goes",
)


@pytest.fixture(autouse=True)
def _is_quiet():
    """Every history logs thousands of warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play_all(seeds: Iterable[int]) -> Counts:
    counts = Counts()
    for seed in seeds:
        history = History(Profile.drawn(seed), counts)
        try:
            history.play()
        except ViolationError as error:
            tail = "\n".join(shown(history).splitlines()[-40:])
            pytest.fail(f"{error}\n{tail}\nall of it: python -m tests.campaign --seed {seed}")
    return counts


def test_a_sample_of_the_campaign_breaks_nothing():
    counts = play_all(SAMPLE)
    assert {"I03", "I04", "I20", "I22", "I23", "I26", "I27", "I30", "I32", "I33"} <= counts.keys()
    assert {"folds", "I21 folds", "I26 folds", "I32 folds", "I61", "I83"} <= counts.keys()


@pytest.mark.ci
def test_histories_for_ci_break_nothing():
    play_all(range(6, 26))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_campaign_breaks_nothing_at_its_counts():
    counts = play_all(range(1000))
    assert counts["I20"] >= 1_000_000
    assert counts["I26"] >= 5_000
    assert counts["I22"] >= 8_000
    assert set(WHAT) == {name for name in WHAT if counts[name] >= 100}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_processes_that_die_at_random_break_nothing(kind, seed, tmp_path):
    if kind == "objects":
        pytest.importorskip("obstore")
    counts = KINDS[kind](seed, 60.0, tmp_path)
    assert counts["I20"] > 100
    assert counts["I21"] > 5


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["files"])
def test_a_sample_of_processes_that_die_at_random_breaks_nothing(kind, tmp_path):
    counts = KINDS[kind](1, 5.0, tmp_path)
    assert counts["I20"] > 10


@pytest.mark.parametrize("name", QUICK)
def test_a_deliberate_bug_is_caught(name):
    found = seed_that_catches(name, range(5))
    assert found is not None
    assert found[1].invariant in MUTANTS[name].invariants, found


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in QUICK])
def test_every_deliberate_bug_is_caught(name):
    found = seed_that_catches(name, range(MAX_SEEDS))
    assert found is not None
    assert found[1].invariant in MUTANTS[name].invariants, found


@pytest.mark.parametrize("added", [(), ("far", "folds", "kills", "twice", "stale")])
def test_one_number_is_one_history(added):
    profile = Profile.drawn(7)
    profile = replace(profile, features=profile.features | set(added), chaos_s=20.0)
    told = []
    for _ in range(2):
        counts = Counts()
        trace = [
            line for line in shown(play(profile, counts)).splitlines() if "/probe/" not in line
        ]
        told.append((trace, dict(counts)))
    assert told[0] == told[1]


def test_a_history_that_breaks_can_be_made_smaller():
    with broken("keeps what failed as the committed state") as mutant:
        profile = mutant.profile(0)
        with pytest.raises(ViolationError) as caught:
            play(profile)
        small = shrunk(profile, caught.value)
        assert small.features <= profile.features
        assert small.chaos_s <= profile.chaos_s
        with pytest.raises(ViolationError, match=caught.value.invariant):
            play(small)


def test_the_tables_of_the_docs_are_made_from_the_figures(tmp_path, monkeypatch):
    copy = tmp_path / "reliability.md"
    shutil.copy(report.DOCS, copy)
    monkeypatch.setattr(report, "DOCS", copy)
    report.main([])
    assert copy.read_text() == (report.ROOT / "docs" / "reliability.md").read_text()


def test_no_violation_is_in_the_figures_and_every_bug_was_caught():
    rows, runs = report.read(report.CSV)
    assert runs
    assert sum(int(row["violations"]) for row in rows) == 0
    with report.MUTANTS_CSV.open() as file:
        caught = {row["mutant"]: row["invariant"] for row in csv.DictReader(file)}
    assert caught.keys() == MUTANTS.keys()
    assert all(invariant in MUTANTS[name].invariants for name, invariant in caught.items())
