"""The commit and retention protocols hold in every interleaving; broken variants are caught."""

from __future__ import annotations

import pytest
from sync import explorer, explorer_retention
from sync.explorer import World

from gymfast.sync.commit import CLAIM, COMMIT, FINAL, Answer, Step


@pytest.mark.parametrize(
    ("num_faults", "num_crashes", "num_publishes", "at_least"),
    [(1, 1, 1, 30_000), (2, 0, 1, 10_000), (1, 0, 2, 30_000)],
)
def test_i21_i22_i23_the_commit_protocol_holds_everywhere(
    num_faults, num_crashes, num_publishes, at_least
):
    world = World(faults_left=num_faults, crashes_left=num_crashes)
    num_states = explorer.explore(explorer.Rules(max_publishes=num_publishes), world)
    assert num_states > at_least


@pytest.mark.parametrize(("num_faults", "num_crashes"), [(1, 0), (0, 1)])
def test_i21_nobody_needs_to_look_for_objects_that_a_store_promises_to_show(
    num_faults, num_crashes
):
    world = World(faults_left=num_faults, crashes_left=num_crashes)
    assert explorer.explore(explorer.Rules(max_publishes=1, trusts_puts=True), world) > 1000


@pytest.mark.long
def test_nobody_needs_to_look_for_objects_that_a_store_promises_to_show_long():
    world = World(faults_left=1, crashes_left=1)
    assert explorer.explore(explorer.Rules(max_publishes=2, trusts_puts=True), world) > 10**5


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_faults", "num_crashes", "num_publishes"), [(1, 1, 2), (2, 1, 1), (2, 0, 2)]
)
def test_the_commit_protocol_holds_everywhere_long(num_faults, num_crashes, num_publishes):
    world = World(faults_left=num_faults, crashes_left=num_crashes)
    assert explorer.explore(explorer.Rules(max_publishes=num_publishes), world) > 10**5


@pytest.mark.parametrize("name", explorer.BROKEN)
def test_the_explorer_finds_the_bug_in_a_publisher_that(name):
    with pytest.raises(explorer.ViolationError, match="writer"):
        explorer.explore(explorer.BROKEN[name](), World(faults_left=1, crashes_left=0))


@pytest.mark.parametrize(
    ("readers", "reads_early", "least"),
    [
        pytest.param("of the log", False, 10_000, marks=pytest.mark.ci),
        ("of the log", True, 10_000),
        ("of folds", True, 5_000),
        pytest.param("of both", False, 100_000, marks=pytest.mark.ci),
        pytest.param("of any kind", True, 300_000, marks=pytest.mark.long),
    ],
)
def test_i26_retention_never_breaks_a_reader_that_holds_a_lease(readers, reads_early, least):
    rules = explorer_retention.Rules(reads_early=reads_early)
    assert explorer_retention.explore(rules, explorer_retention.STARTS[readers]) > least


@pytest.mark.parametrize("name", explorer_retention.BROKEN)
def test_the_explorer_finds_the_bug_in_a_retention_that(name):
    with pytest.raises(explorer_retention.ViolationError):
        explorer_retention.explore(explorer_retention.BROKEN[name])


@pytest.mark.parametrize("table", [COMMIT, CLAIM])
def test_every_step_of_a_table_ends_and_is_reached(table):
    steps = {step for step, _ in table}
    assert {to for to in table.values() if to not in FINAL} <= steps
    for step in steps:
        assert (step, Answer.GIVE_UP) in table, f"{step} could be waited for without a deadline"
    assert Step.DONE in table.values()
    for step in steps:
        reached = {step}
        while more := {to for (s, _), to in table.items() if s in reached} - reached:
            reached |= more
        assert reached & FINAL
