"""A run of the simulator, logged and replayed: the same step times; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from gymfast_sim.backtest import backtest
from gymfast_sim.engine_simpy import simulate
from gymfast_sim.fit_log import read_log
from gymfast_sim.records import RunRecord, State
from gymfast_sim.scenario import Scenario

TEXT = """
name = "recorded"
[rollouts]
prompts = 40
fail_ratio = 0.05
work = { law = "lognormal", median_s = 2.0, sigma = 0.8 }
[policy]
policy = "elastic"
max_size = 12
[sandboxes]
start_fail_ratio = 0.1
boot = { law = "lognormal", median_s = 1.0, sigma = 0.5 }
reset = { law = "uniform", low_s = 0.1, high_s = 0.3 }
[limits]
rate_per_s = 5.0
burst = 3
"""
BEGIN_S = 1000.0


def _log(record: RunRecord, step: int, begin_s: float) -> Iterable[dict[str, object]]:
    """What a pool would have written, from the trace of a run."""
    state: dict[int, tuple[int, float]] = {}
    user: dict[int, int] = {}
    attempt: dict[int, int] = {}
    names = {State.STARTING: "boot", State.RESETTING: "reset"}
    for row in record.trace:
        at_s = begin_s + row.time_ns / 1e9
        if row.kind == 1 and row.state == 3:
            user[row.other] = row.number
            if row.number not in attempt:
                yield _line("wait", begin_s, at_s, step, row.number, 0)
                attempt[row.number] = 0
        if row.kind != 0:
            continue
        before, since_s = state.get(row.number, (State.PENDING, at_s))
        state[row.number] = (row.state, at_s)
        box = f"{step}-{row.number}"
        if before in names:
            times = {"phase": names[State(before)], "t0_s": since_s, "t1_s": at_s}
            outcome = "failed" if before == State.STARTING and row.state == State.GONE else "ok"
            yield {**times, "sandbox": box, "outcome": outcome}
        if before == State.WORKING:
            number = user[row.number]
            line = _line("exec", since_s, at_s, step, number, attempt[number])
            is_failed = row.state in (State.LOST, State.GONE)
            yield {**line, "sandbox": box, "outcome": "failed" if is_failed else "ok"}
            attempt[number] += is_failed


def _line(
    phase: str, t0_s: float, t1_s: float, step: int, rollout: int, attempt: int
) -> dict[str, object]:
    names = {"step": step, "rollout": rollout, "attempt": attempt}
    return {"phase": phase, "t0_s": t0_s, "t1_s": t1_s, **names}


def _write(path: Path, scenario: Scenario, num_steps: int) -> list[float]:
    """A log of steps, and how long each took."""
    found, lines, begin_s = [], [], BEGIN_S
    for step in range(num_steps):
        record = simulate(scenario, replication=step, keep_trace=True)
        lines += list(_log(record, step, begin_s))
        begin_s += record.steps[0].step_s + 60
        found.append(record.steps[0].rollouts_s)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def test_a_replay_takes_as_long_as_what_was_recorded(tmp_path: Path) -> None:
    scenario = Scenario.from_toml(TEXT)
    recorded = _write(tmp_path / "a.jsonl", scenario, 6)
    report = backtest(read_log(tmp_path / "a.jsonl"), scenario, num_replications=2, seed=99)
    assert [row.recorded_s for row in report.steps] == pytest.approx(recorded, abs=1e-5)
    assert [row.simulated_s for row in report.steps] == pytest.approx(recorded, rel=1e-6)
    assert abs(report.step_time.ratio) < 1e-6 and abs(report.blocked_time.ratio) < 1e-6
    assert report.step_time.low is not None and report.step_time.high is not None


def test_another_limit_than_that_of_the_run_is_an_error_with_its_sign(tmp_path: Path) -> None:
    scenario = Scenario.from_toml(TEXT)
    _write(tmp_path / "a.jsonl", scenario, 6)
    spans = read_log(tmp_path / "a.jsonl")
    limits = msgspec.structs.replace(scenario.limits, rate_per_s=0.5)
    slower = backtest(spans, msgspec.structs.replace(scenario, limits=limits))
    assert slower.step_time.low is not None and slower.step_time.low > 0.05
    assert slower.blocked_time.ratio > 0.05
    wide = Scenario.from_toml(TEXT.replace("max_size = 12", "max_size = 40"))
    faster = backtest(spans, wide)
    assert faster.step_time.high is not None and faster.step_time.high < 0


def test_sandboxes_of_an_earlier_step_are_ready_at_once(tmp_path: Path) -> None:
    lines = [{"phase": "boot", "t0_s": 0.0, "t1_s": 9.0, "sandbox": "a"}]
    for step, begin_s in enumerate((0.0, 100.0)):
        start_s = begin_s + (9.0 if step == 0 else 0.0)
        lines.append(_line("wait", begin_s, start_s, step, 0, 0))
        lines.append({**_line("exec", start_s, start_s + 5, step, 0, 0), "sandbox": "a"})
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = TEXT.replace("rate_per_s = 5.0\nburst = 3\n", "").replace("reset =", "#")
    report = backtest(read_log(path), Scenario.from_toml(text))
    assert [row.simulated_s for row in report.steps] == pytest.approx([14.0, 5.0])
    assert [row.recorded_s for row in report.steps] == pytest.approx([14.0, 5.0])
    assert report.step_time.low is None


EXEC: dict[str, object] = {**_line("exec", 1.0, 2.0, 0, 0, 0), "sandbox": "a"}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([{**EXEC, "phase": "nap"}], "line 1: phase 'nap' cannot be replayed, expected one of"),
        ([{"phase": "exec", "took_s": 1.0}], "line 1: a duration alone cannot be replayed"),
        ([{**EXEC, "sandbox": None}], "line 1: exec has no sandbox: name it"),
        ([{**EXEC, "step": None}], "line 1: exec has no step and rollout"),
        ([{**EXEC, "attempt": 1}], "rollout 0 of step 0 has no exec in attempt 0"),
        ([_line("wait", 1.0, 2.0, 0, 0, 0)], "rollout 0 of step 0 has no exec in attempt 0"),
        ([{**EXEC, "image": "x"}, {**EXEC, "image": "y"}], "the images x, y: replay one"),
        ([{"phase": "boot", "t0_s": 1, "t1_s": 2, "sandbox": "a"}], "there is no run in it"),
    ],
)
def test_a_log_that_is_no_run_is_refused(
    lines: list[dict[str, object]], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    kept = [{k: v for k, v in line.items() if v is not None} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    with pytest.raises(ValueError, match=text):
        backtest(read_log(path), Scenario.from_toml(TEXT))
